"""Records the tensors that autograd saves while a call runs."""

from torch import Tensor

from backhaul_runtime.errors import Refusal, UnsupportedTensorError
from backhaul_runtime.program.program import is_function_name
from backhaul_runtime.program.undefined_saves import UNDEFINED_CONTENT
from backhaul_runtime.record.call_memory import SavedVersion
from backhaul_runtime.record.custom.custom_functions import CustomFunctions
from backhaul_runtime.record.recording import SavedTensor
from backhaul_runtime.record.running_call import RunningCall
from backhaul_runtime.tensors.deferred_digest import Digest, digest_of
from backhaul_runtime.tensors.digest import saved_digest
from backhaul_runtime.tensors.layout import Layout, layout_of
from backhaul_runtime.torch_internals.private import counter_of, version_of
from backhaul_runtime.torch_internals.storages import storage_key

FUNCTION_SAVES = "a custom autograd function saves a tensor"
"""A refusal without the function's name: when the function saves tensors, the graph has no node of it yet."""


class SavedTensorRecorder:
    """Adds each tensor that autograd saves in a call to the recording, with its digest.

    Args:
        call: The call that runs.
        custom: What is recorded of its custom functions.
    """

    def __init__(self, call: RunningCall, custom: CustomFunctions) -> None:
        self._call = call
        self._custom = custom

    def add(self, tensor: Tensor) -> None:
        """Records a tensor that autograd is about to save. One that can't be recorded is listed without a digest."""
        call = self._call
        if not call.op.name:
            call.recording.refuse(self._custom.refused or FUNCTION_SAVES)
        saved = call.recording.guarded(self._saved, tensor)
        if saved is None:
            kind = Layout(tensor.dtype, () if tensor.is_nested else tuple(tensor.shape), (), device=tensor.device.type)
            saved = SavedTensor(b"", call.op.name, kind, -1, 0)
        call.saved.append(saved)

    def _saved(self, tensor: Tensor) -> SavedTensor:
        call, memory = self._call, self._call.memory
        try:
            layout = layout_of(tensor)
        except UnsupportedTensorError as error:
            raise Refusal(f"autograd saves a {error.fields['reason']}") from None
        reads = call.op.reads
        is_undefined = reads is not None or (call.op.is_undefined is not None and call.op.is_undefined(tensor))
        if is_undefined:
            content: Digest = UNDEFINED_CONTENT if reads is None else reads
        else:
            content = memory.contents.digest(tensor, layout)
        source = next(iter(memory.sources.at(storage_key(tensor))), -1)
        is_hidden = source < 0 and memory.interior.is_hidden(tensor)
        if source < 0 and is_function_name(call.op.name):
            self._custom.note_saved(tensor, is_hidden=is_hidden)
        if is_hidden:
            memory.interior.add_hidden(tensor)
        if source < 0:
            version = SavedVersion(counter_of(tensor), version_of(tensor))
            memory.saved[storage_key(tensor)][len(call.recording.saved)] = version
        if call.recording.refusal is None:
            call.builder.note_save()
        digest, offset = digest_of(saved_digest, layout, content), int(tensor.storage_offset())
        saved = SavedTensor(digest, call.op.name, layout, source, offset, is_undefined=is_undefined)
        saved.projection = call.choices.projection(tensor, saved, is_hidden=is_hidden)
        return saved

"""The saved-tensor hooks of a checkpointed call."""

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from backhaul._backward.handles import Handle, HandleTable
from backhaul._torch_api.kept_regions import is_in_kept_region
from backhaul._torch_api.selective import Hooks, KeptTensor, Selection
from backhaul_runtime.errors import SavedTensorModifiedError
from backhaul_runtime.program.op_rules import hides_write
from backhaul_runtime.program.program import is_function_name
from backhaul_runtime.record.call_memory import SavedVersion
from backhaul_runtime.record.recorder import Recorder
from backhaul_runtime.record.sources import MakeCopy
from backhaul_runtime.tensors.digest import content_digest, digest_of_tensor, saved_digest, tensor_address
from backhaul_runtime.tensors.layout import as_laid_out, copy_exact, layout_of, unsupported_reason
from backhaul_runtime.torch_internals.private import (
    DisablePythonDispatcher,
    DisableTorchDispatch,
    pop_saved_tensor_hooks,
    pytree,
    version_of,
)
from backhaul_runtime.torch_internals.storages import StorageLedger, storage_key


class SavedTensorHooks:
    """The hook that autograd calls for each tensor it saves.

    Autograd keeps it as long as the handles. So `release` drops the recorder, and with it the tensors of the call.

    Attributes:
        recorder: Records the call during its forward; None afterwards.
        packed_bytes: Bytes that autograd saved and that are not kept. Each storage counts once, leaves do not count.
        has_kept_region: Whether autograd saved a tensor inside `kept_region`.
    """

    def __init__(self, make_copy: MakeCopy, selection: Selection | None, hooks: Hooks | None) -> None:
        self._table: HandleTable | None = None
        self._make_copy = make_copy
        self._selection = selection
        self._hooks = hooks
        self.recorder: Recorder | None = None
        self.packed_bytes = 0
        self.has_kept_region = False
        self._packed = StorageLedger()
        self._of_this_op: list[tuple[Handle, Tensor, bool]] = []
        self._undefined: list[tuple[KeptTensor, Tensor]] = []

    def __call__(self, tensor: Tensor) -> Handle | Tensor:
        recorder, table = self.recorder, self._table
        if recorder is None or table is None:
            # The call has ended, and Ctrl-C has kept the hook from being taken off. This tensor stays as it is, and
            # the following ones go to autograd.
            pop_saved_tensor_hooks()
            return tensor.detach()
        guarded = recorder.recording.guarded
        handle = guarded(self._noted, recorder, table, tensor) or Handle(table, -1)
        if self._selection is not None:  # it may call hooks of the user, whose errors pass
            handle.kept = self._selection.keep(tensor)
            if handle.kept is not None:
                guarded(self._expect, handle.kept, handle.index, tensor)
        if handle.kept is not None:
            return handle
        is_statistic, in_kept_region = guarded(self._looked_at, recorder, tensor) or (False, False)
        self.has_kept_region |= in_kept_region
        if in_kept_region or recorder.recording.refusal is not None:
            handle.kept = self._kept(handle.index, tensor, is_statistic=is_statistic)
        else:
            self._of_this_op.append((handle, tensor, is_statistic))
        return handle

    @staticmethod
    def _noted(recorder: Recorder, table: HandleTable, tensor: Tensor) -> Handle:
        recorder.note_saved(tensor)
        handle = table.add(len(recorder.recording.saved) - 1)
        if is_function_name(recorder.call.op.name) and unsupported_reason(tensor) is None:
            handle.storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        return handle

    def _looked_at(self, recorder: Recorder, tensor: Tensor) -> tuple[bool, bool]:
        """Returns whether a tensor is a statistic, and whether it is in a kept region. Counts one that is dropped."""
        is_statistic = unsupported_reason(tensor) is None and hides_write(recorder.call.op.name, tensor)
        in_kept_region = is_in_kept_region()
        if not in_kept_region and recorder.recording.refusal is None:
            self._count(recorder, tensor)
        return is_statistic, in_kept_region

    def _count(self, recorder: Recorder, tensor: Tensor) -> None:
        recording = recorder.recording
        source = recording.saved[-1].source
        if source < 0 or not recording.sources[source].is_leaf:
            self.packed_bytes += self._packed.add(tensor)

    def begin(self, recorder: Recorder, table: HandleTable) -> None:
        """Sets the recorder and the table of handles. Called once, before the call runs."""
        self.recorder, self._table = recorder, table

    def op_ended(self, is_recorded: bool) -> None:
        """Drops the tensors that the ending op saved, or keeps them if they cannot be recomputed."""
        if self._of_this_op:
            if not is_recorded:
                for handle, tensor, is_statistic in self._of_this_op:
                    handle.kept = self._kept(handle.index, tensor, is_statistic=is_statistic)
                    if is_statistic:  # the op has written to it, so it reads none of it in backward
                        handle.kept.digest = b""
            self._of_this_op.clear()
        if self._undefined:
            assert self.recorder is not None
            self.recorder.recording.guarded(self._digest_undefined)
            self._undefined.clear()

    def overwritten(self, alias: Tensor, versions: Mapping[int, SavedVersion]) -> None:
        """Keeps saved tensors in memory that is about to be written to, as autograd does without checkpointing.

        Backward then reads what is written, or raises an error if the version of a saved tensor shows the write.

        Args:
            alias: A tensor in that memory.
            versions: The versions of the saved tensors in that memory, by position.
        """
        assert self.recorder is not None
        assert self._table is not None
        for position, (counter, version) in versions.items():
            reference = self._table.handles.get(position)
            handle = reference() if reference is not None else None
            if handle is None:
                continue
            if handle.kept is None:
                saved = self.recorder.recording.saved[position]
                # A tensor that is made in an inference mode has no version.
                with torch.inference_mode(False), DisablePythonDispatcher(), DisableTorchDispatch():
                    counter.data = as_laid_out(alias, saved.layout, saved.offset)
                handle.kept = KeptTensor(counter, version, modified)
            elif self._selection is None:
                handle.kept.digest = b""  # it has other contents from here on; its version is still compared

    def find_overwritten(self, returned: object) -> None:
        """Keeps saved tensors in the memory of what the call has returned, if their bytes have changed.

        No op explains the change (NumPy, DLPack, a storage), so no program does. For writes that autograd sees it has a
        check of its own. Accelerators are left out, because the host would wait for them.
        """
        assert self.recorder is not None
        recording, memory = self.recorder.recording, self.recorder.call.memory
        for output in pytree.tree_leaves(returned):
            if not isinstance(output, Tensor) or unsupported_reason(output) or output.device.type != "cpu":
                continue
            for position, saved_version in memory.saved.get(storage_key(output), {}).items():
                saved, (counter, version) = recording.saved[position], saved_version
                if saved.is_undefined or version_of(counter) != version:
                    continue
                with DisablePythonDispatcher(), DisableTorchDispatch():  # modes around the call must not see this
                    tensor = as_laid_out(output, saved.layout, saved.offset)
                    digest = saved_digest(saved.layout, content_digest(tensor, saved.layout))
                if digest != saved.digest:
                    self.overwritten(output, {position: saved_version})
                    recording.refuse("it writes to memory in a way that no op explains (NumPy, or a custom kernel)")

    def _digest_undefined(self) -> None:
        for kept, tensor in self._undefined:
            kept.digest = digest_of_tensor(tensor)

    def release(self) -> None:
        """Drops everything that belongs to the call, which has ended."""
        self._undefined.clear()
        self.recorder = self._table = self._selection = self._hooks = None
        self._of_this_op.clear()

    def _expect(self, kept: KeptTensor, index: int, tensor: Tensor) -> None:
        """Notes the contents that a kept tensor must have when it is unpacked."""
        assert self.recorder is not None
        saved = self.recorder.recording.saved[index]
        kept.digest = saved.noted
        if saved.is_undefined:  # the op may still write to it, and the digest is that of the op's inputs
            kept.digest = b""
            self._undefined.append((kept, tensor))

    def _copy(self, tensor: Tensor) -> Tensor:
        """Returns a copy of an argument, because the caller may change it. Equal copies are shared."""
        layout = layout_of(tensor)
        address = None if layout.is_on_accelerator else tensor_address(layout, content_digest(tensor, layout))
        return self._make_copy(tensor, layout, address)

    def _kept(self, index: int, tensor: Tensor, *, is_statistic: bool) -> KeptTensor:
        """Keeps a tensor. Once a step of our own has failed, autograd's own checks are all that it gets."""
        assert self.recorder is not None
        recording = self.recorder.recording
        is_plain = recording.guarded(unsupported_reason, tensor) is None
        # The recorder and dispatch modes around the call must not see this. Tensor subclasses must, to keep their type.
        with DisablePythonDispatcher(), DisableTorchDispatch() if is_plain else nullcontext():
            kept = None if recording.failure else recording.guarded(self._keep, index, tensor, is_statistic)
            kept = kept or KeptTensor(tensor.detach(), version_of(tensor), modified)
            if self._hooks is not None:  # an error of theirs is the user's
                kept.pack(*self._hooks)
        return kept

    def _keep(self, index: int, tensor: Tensor, is_statistic: bool) -> KeptTensor:
        assert self.recorder is not None
        if is_statistic:
            tensor = copy_exact(tensor)
        elif unsupported_reason(tensor) is None and self.recorder.call.memory.sources.is_of_argument(tensor):
            tensor = self._copy(tensor)
        kept = KeptTensor(tensor.detach(), version_of(tensor), modified)
        self._expect(kept, index, tensor)
        return kept


def modified(tensor: Tensor, saved_version: int) -> Exception:
    """Returns the error for a kept tensor that was written to after it was saved."""
    is_plain = unsupported_reason(tensor) is None
    return SavedTensorModifiedError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
        f"{list(tensor.shape) if is_plain else type(tensor).__name__} is at version {version_of(tensor)}, it was saved "
        f"at {saved_version}. This also fails without checkpointing: use the out-of-place op"
    )


def unpack(handle: Handle | Tensor) -> Tensor:
    """The unpack hook: returns the tensor for what `SavedTensorHooks` returned."""
    return handle if isinstance(handle, Tensor) else handle.table.unpack(handle)

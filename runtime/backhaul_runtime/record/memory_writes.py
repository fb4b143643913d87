"""Prepares for the writes of a running call: what a replay begins with is copied before an op overwrites it."""

import torch
from torch import Tensor

from backhaul_runtime.errors import Refusal
from backhaul_runtime.record.running_call import RunningCall
from backhaul_runtime.tensors.layout import unsupported_reason
from backhaul_runtime.torch_internals.private import base_of, is_differentiable_view
from backhaul_runtime.torch_internals.storages import storage_key


def prepare_write(call: RunningCall, tensor: Tensor) -> None:
    """Prepares for an op that is about to write to a tensor. Raises Refusal if it can't be prepared.

    Args:
        call: The call that runs.
        tensor: The tensor that the op is about to write to.
    """
    recording, memory, sources = call.recording, call.memory, call.memory.sources
    reason = unsupported_reason(tensor)
    # Some of these have no storage to look at below. Only tensors from outside need bytes that can be copied.
    if tensor.layout is not torch.strided or (reason and tensor not in memory.interior):
        raise Refusal(f"an op writes to a {reason}")
    key = storage_key(tensor)
    # Where autograd does not see the write, backward reads what the op writes, which a replay does not compute.
    if key in memory.saved:
        memory.has_overwritten_saved = True
        memory.overwritten(tensor, memory.saved[key])
    # NOTE [What the recorder relies on], Rule 3. A copy of any other tensor would be for nothing.
    if recording.refusal is not None:
        for index in sources.at(key):
            sources.note_write(index)
        return
    memory.interior.note_write(tensor)
    if tensor in memory.interior:  # a replay makes it, so its contents need no copy
        return
    # An argument in this memory that no op has used yet must become a source now: afterwards it has other contents, and
    # the history of the write. One that is a source already would only be digested again.
    for argument in sources.arguments:
        plain = call.known.ref_of(argument) is None and unsupported_reason(argument) is None
        if plain and storage_key(argument) == key:
            call.known.add_source(argument)
    if not sources.at(key):  # the write may be the first op that uses this memory
        call.known.add_source(tensor)
    indices = sources.at(key)
    # A replay gives each source memory of its own, so the write would not reach the others.
    if len(indices) > 1:
        recording.refuse("an op writes to memory that two sources share")
    for index in indices:
        sources.note_write(index)
        # Autograd gives the base and its other views a new history, which no node of this call could replace.
        takes_gradients = recording.sources[index].requires_grad and torch.is_grad_enabled()
        if takes_gradients and is_differentiable_view(sources.tensors[index]):
            recording.refuse("an op writes to a differentiable view of a tensor from outside")
        # The alias is the source in a replay, whose autograd would see the write.
        is_alias = _origin(tensor) is not _origin(sources.tensors[index])
        if is_alias and any(saved.source == index for saved in recording.saved):
            recording.refuse("an op writes to a tensor from outside in a way that autograd does not see (.data)")


def _origin(tensor: Tensor) -> Tensor:
    """Returns the tensor that a tensor is a view of, or the tensor itself."""
    base = base_of(tensor)
    return tensor if base is None else base

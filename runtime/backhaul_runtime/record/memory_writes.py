"""Prepares for the writes of a running call: what a replay begins with is copied before an op overwrites it."""

import torch
from torch import Tensor

from backhaul_runtime.errors import Refusal
from backhaul_runtime.record.interior_memory import InteriorMemory
from backhaul_runtime.record.known_tensors import KnownTensors
from backhaul_runtime.record.recording import Recording
from backhaul_runtime.record.sources import SourceLedger
from backhaul_runtime.tensors.layout import unsupported_reason
from backhaul_runtime.torch_internals.private import is_differentiable_view
from backhaul_runtime.torch_internals.storages import storage_key


class MemoryWrites:
    """Copies sources before ops write to them, and refuses writes that a replay would not repeat.

    Args:
        recording: Is refused if a replay can't repeat a write.
        sources: The sources of the call.
        known: Makes a tensor from outside a source.
        interior: The memory that the ops have made, which needs no copies.
    """

    def __init__(
        self, recording: Recording, sources: SourceLedger, known: KnownTensors, interior: InteriorMemory
    ) -> None:
        self._recording = recording
        self._sources = sources
        self._known = known
        self._interior = interior

    def prepare(self, tensor: Tensor) -> None:
        """Prepares for an op that is about to write to a tensor. Raises Refusal if it can't be prepared."""
        reason = unsupported_reason(tensor)
        if tensor.layout is not torch.strided or (reason and tensor not in self._interior):
            raise Refusal(f"an op writes to a {reason}")
        key = storage_key(tensor)
        if self._recording.refusal is not None:  # NOTE [What the recorder relies on], Rule 3
            for index in self._sources.at(key):
                self._sources.note_write(index)
            return
        self._interior.note_write(tensor)
        if tensor in self._interior:
            return
        # An argument in this memory that no op has used yet must become a source before its contents change.
        for argument in self._sources.arguments:
            plain = self._known.ref_of(argument) is None and unsupported_reason(argument) is None
            if plain and storage_key(argument) == key:
                self._known.add_source(argument)
        if not self._sources.at(key):
            self._known.add_source(tensor)
        indices = self._sources.at(key)
        # A replay gives each source memory of its own, so the write would not reach the others.
        if len(indices) > 1:
            self._recording.refuse("an op writes to memory that two sources share")
        for index in indices:
            self._sources.note_write(index)
            # Autograd gives the base and its other views a new history, which no node of this call could replace.
            takes_gradients = self._recording.sources[index].requires_grad and torch.is_grad_enabled()
            if takes_gradients and is_differentiable_view(self._sources.tensors[index]):
                self._recording.refuse("an op writes to a differentiable view of a tensor from outside")

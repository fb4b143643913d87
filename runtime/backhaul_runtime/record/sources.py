"""What a call takes from outside: its arguments, and tensors that it captures."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from backhaul_runtime.program.program import RecordedChoice
from backhaul_runtime.record.recording import RecordedSource
from backhaul_runtime.replay.recorded_choices import is_binary, pack_bits
from backhaul_runtime.tensors.deferred_digest import Digest
from backhaul_runtime.tensors.digest import content_digest, tensor_address
from backhaul_runtime.tensors.layout import Layout, copy_exact, layout_of, unsupported_reason
from backhaul_runtime.torch_internals.private import identity_of
from backhaul_runtime.torch_internals.storages import storage_key

Hold = Callable[[Tensor, Layout, Digest | None], Tensor]
"""Given a tensor, its layout and its address, if that is known, returns a copy to keep."""

SMALL_BYTES = 1 << 20
"""Up to this size captured tensors that are neither parameters nor take gradients are copied: counters, statistics and
other state that may move on before backward."""


class SourceLedger:
    """The sources met so far, by number in the order of first use.

    Args:
        noted: Where they are noted; it may outlive the call.
        arguments: Tensors passed to the call. They are copied at first use, for the caller may change them later.
        hold: Makes copies of tensors that may change.

    Attributes:
        arguments: As given, also those that no op used yet.
        tensors: The caller's own objects, one per source.
    """

    def __init__(self, noted: list[RecordedSource], arguments: Sequence[Tensor], hold: Hold) -> None:
        self.arguments = arguments
        self.tensors: list[Tensor] = []
        self._noted = noted
        self._hold = hold
        self._argument_ids = {identity_of(tensor) for tensor in arguments}
        self._edges: list[GradientEdge | None] = []  # of those that are no leaves
        self._by_storage: dict[int, list[int]] = {}

    def is_argument(self, tensor: Tensor) -> bool:
        """Whether it was passed to the call."""
        return identity_of(tensor) in self._argument_ids

    def is_of_argument(self, tensor: Tensor) -> bool:
        """Whether it lies in the memory of an argument."""
        key = storage_key(tensor)
        return any(storage_key(argument) == key for argument in self.arguments if unsupported_reason(argument) is None)

    def at(self, storage: int) -> Sequence[int]:
        """The sources that lie in a storage, given by its key."""
        return self._by_storage.get(storage, ())

    def add(self, tensor: Tensor, layout: Layout, address: Digest) -> int:
        """Notes a tensor at its first use, as it is now. Returns its number."""
        is_leaf, is_argument = tensor.is_leaf, self.is_argument(tensor)
        is_state = not tensor.requires_grad and not isinstance(tensor, torch.nn.Parameter)
        is_own_state = not is_argument and is_leaf and is_state and layout.span_bytes <= SMALL_BYTES
        is_copy = is_argument or not is_leaf or is_own_state
        if not is_copy:
            value = tensor.detach()
        elif is_own_state and not isinstance(address, bytes):
            value = copy_exact(tensor, layout)  # others may write to it unseen, so its version does not tell copies
        else:
            value = self._hold(tensor, layout, address)
        offset, edge = int(tensor.storage_offset()), None if is_leaf else get_gradient_edge(tensor)
        source = RecordedSource(layout, offset, address, value, is_copy, is_argument, tensor.requires_grad, is_leaf)
        index = self._add(tensor, edge, source)
        self._by_storage.setdefault(storage_key(tensor), []).append(index)
        return index

    def add_given(self, tensor: Tensor) -> RecordedChoice:
        """Makes a copy of a draw or decision a source."""
        packs = is_binary(tensor)
        value = pack_bits(tensor) if packs else copy_exact(tensor)
        layout = layout_of(value)
        source = RecordedSource(
            layout,
            0,
            tensor_address(layout, content_digest(value, layout)),
            value,
            is_copy=True,
            is_argument=False,
            requires_grad=False,
            is_leaf=True,
            is_given=True,
        )
        return RecordedChoice(self._add(value, None, source), tensor.numel() if packs else 0)

    def _add(self, tensor: Tensor, edge: GradientEdge | None, source: RecordedSource) -> int:
        self.tensors.append(tensor)
        self._edges.append(edge)
        self._noted.append(source)
        return len(self.tensors) - 1

    def cut(self, count: int) -> None:
        """Drops all sources but the first, which alone the program names."""
        del self.tensors[count:], self._edges[count:], self._noted[count:]

    def note_write(self, index: int) -> None:
        """Notes that an op is about to write into a source, and keeps what it holds."""
        source = self._noted[index]
        if not source.is_copy:
            source.kept_value, source.is_copy = copy_exact(source.value, source.layout), True
        source.is_written = True
        source.written = None if source.is_argument else self.tensors[index]

    def rewrites_autograd(self) -> bool:
        """Whether the call gave a source another history: wrote something differentiable into it, or detached it."""
        return any(map(self.is_rewritten, range(len(self.tensors))))

    def is_rewritten(self, index: int) -> bool:
        """As `rewrites_autograd`, of one."""
        tensor, source, edge = self.tensors[index], self._noted[index], self._edges[index]
        return (
            tensor.requires_grad != source.requires_grad
            or tensor.is_leaf != source.is_leaf
            or (edge is not None and get_gradient_edge(tensor)[:2] != edge[:2])
        )

    def edges(self) -> list[GradientEdge | None]:
        """Where the gradient of each source went when the call met it, None if it took none.

        Asked once the call has ended: a leaf's edge is made on demand, which autograd may be switched off for inside.
        """
        return [
            edge or (get_gradient_edge(tensor) if source.requires_grad and tensor.requires_grad else None)
            for tensor, source, edge in zip(self.tensors, self._noted, self._edges, strict=True)
        ]

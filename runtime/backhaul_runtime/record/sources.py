"""The sources of a running call: its arguments, and the tensors that its function captures."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from backhaul_runtime.program.program import RecordedChoice
from backhaul_runtime.record.recording import RecordedSource
from backhaul_runtime.replay.recorded_choices import is_binary, pack_bits
from backhaul_runtime.tensors.deferred_digest import Digest
from backhaul_runtime.tensors.digest import content_digest, tensor_address
from backhaul_runtime.tensors.layout import Layout, copy_exact, layout_of, unsupported_reason
from backhaul_runtime.torch_internals.private import identity_of, is_leaf
from backhaul_runtime.torch_internals.storages import storage_key

MakeCopy = Callable[[Tensor, Layout, Digest | None], Tensor]
"""A function that returns a copy of a tensor, from the tensor, its layout, and its address or None if unknown. Equal
addresses may share one copy."""

SMALL_BYTES = 1 << 20
"""Captured tensors of up to this size are copied if they are no parameters and take no gradients: counters, statistics
and other state may change before backward."""


class SourceKind(NamedTuple):
    """What decides how a source is kept. It does not depend on the contents of the tensor.

    Attributes:
        is_copy: Whether the trainer keeps a copy, because the contents may change before backward.
        is_own_state: Whether the tensor is state that the function captures, which may change without a new version.
        is_argument: Whether the tensor was passed to the call.
        requires_grad: Whether the tensor requires gradients.
        is_leaf: Whether the tensor is a leaf of autograd's graph, and no view that takes gradients.
    """

    is_copy: bool
    is_own_state: bool
    is_argument: bool
    requires_grad: bool
    is_leaf: bool

    @classmethod
    def of(cls, tensor: Tensor, layout: Layout, *, is_argument: bool, is_part: bool = False) -> Self:
        """Returns the kind of a tensor from outside.

        Args:
            tensor: The tensor of the caller.
            layout: The layout of the tensor.
            is_argument: Whether the tensor was passed to the call.
            is_part: Whether the tensor is a part of an object, as the scales of a quantised weight are. They change
                like parameters do, if at all.
        """
        leaf, requires_grad = is_leaf(tensor), tensor.requires_grad
        is_state = not requires_grad and not isinstance(tensor, torch.nn.Parameter)
        is_own_state = not is_argument and leaf and is_state and not is_part and layout.span_bytes <= SMALL_BYTES
        return cls(is_argument or not leaf or is_own_state, is_own_state, is_argument, requires_grad, leaf)


def recorded_source(
    tensor: Tensor, layout: Layout, address: Digest, make_copy: MakeCopy, kind: SourceKind
) -> RecordedSource:
    """Returns a tensor from outside as a source, with a copy if its contents may change before backward.

    Args:
        tensor: The tensor of the caller.
        layout: The layout of the tensor.
        address: Its address, possibly still on an accelerator.
        make_copy: Makes a copy of the tensor.
        kind: The kind of the tensor.
    """
    is_copy, is_own_state, is_argument, requires_grad, leaf = kind
    if not is_copy:
        value = tensor.detach()
    elif is_own_state and not isinstance(address, bytes):
        # While the address is on an accelerator, `make_copy` finds copies by version. But ops may write to state
        # without a new version, as BatchNorm does to its statistics. `make_copy` would then return an old copy.
        value = copy_exact(tensor, layout)
    else:
        value = make_copy(tensor, layout, address)
    offset = int(tensor.storage_offset())
    return RecordedSource(layout, offset, address, value, is_copy, is_argument, requires_grad, leaf)


def note_write(source: RecordedSource, tensor: Tensor) -> None:
    """Notes that an op is about to write to a source, and copies its contents unless that was done before."""
    if not source.is_copy:
        source.retained, source.is_copy = copy_exact(source.value, source.layout), True
    source.is_written = True
    source.written = None if source.is_argument else tensor


class SourceLedger:
    """The sources that the ops of a running call have used so far, numbered in the order of first use.

    Args:
        noted: The list to which sources are added. It may outlive the call and the ledger.
        arguments: The tensors passed to the call. They are copied at first use, because the caller may change them.
        make_copy: Makes copies of tensors that may change before backward.

    Attributes:
        arguments: The tensors passed to the call, including those that no op has used yet.
        tensors: The caller's own tensor of each source, by its number.
    """

    def __init__(self, noted: list[RecordedSource], arguments: Sequence[Tensor], make_copy: MakeCopy) -> None:
        self.arguments = arguments
        self.tensors: list[Tensor] = []
        self._noted = noted
        self._make_copy = make_copy
        self._argument_ids = {identity_of(tensor) for tensor in arguments}
        self._edges: list[GradientEdge | None] = []  # by number of the source, None for leaves
        self._by_storage: dict[int, list[int]] = {}

    def is_argument(self, tensor: Tensor) -> bool:
        """Whether a tensor was passed to the call."""
        return identity_of(tensor) in self._argument_ids

    def is_of_argument(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the storage of an argument."""
        key = storage_key(tensor)
        return any(storage_key(argument) == key for argument in self.arguments if unsupported_reason(argument) is None)

    def at(self, storage: int) -> Sequence[int]:
        """Returns the numbers of the sources that lie in a storage, given by its key."""
        return self._by_storage.get(storage, ())

    def alias_of(self, tensor: Tensor, layout: Layout, address: Digest) -> int | None:
        """Returns the number of a source with the same memory and contents as a tensor that takes no gradients.

        None if there is none. A subclass of tensors may make such an alias at each use of a weight.
        """
        if tensor.requires_grad or not isinstance(address, bytes):
            return None
        offset = int(tensor.storage_offset())
        for index in self.at(storage_key(tensor)):
            source = self._noted[index]
            is_same = (source.offset, source.named, source.layout) == (offset, address, layout)
            if is_same and not source.requires_grad and not source.is_written and source.is_leaf == tensor.is_leaf:
                return index
        return None

    def add(self, tensor: Tensor, layout: Layout, address: Digest, *, is_part: bool = False) -> int:
        """Adds a tensor from outside at its first use, before the op runs. Returns its number.

        The arguments are those of `recorded_source` and `SourceKind.of`.
        """
        edge = None if tensor.is_leaf else get_gradient_edge(tensor)
        kind = SourceKind.of(tensor, layout, is_argument=self.is_argument(tensor), is_part=is_part)
        source = recorded_source(tensor, layout, address, self._make_copy, kind)
        index = self._add(tensor, edge, source)
        self._by_storage.setdefault(storage_key(tensor), []).append(index)
        return index

    def add_given(self, tensor: Tensor) -> RecordedChoice:
        """Adds a copy of a draw or decision as a source, as bits if it is binary. Returns the recorded choice."""
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
        """Drops all sources except the first `count`: the program names no others."""
        del self.tensors[count:], self._edges[count:], self._noted[count:]

    def note_write(self, index: int) -> None:
        """Works as the function of this name, for the source of a number."""
        note_write(self._noted[index], self.tensors[index])

    def rewrites_autograd(self) -> bool:
        """Whether the call changed a source's history, by writing a differentiable value to it or detaching it."""
        return any(map(self.is_rewritten, range(len(self.tensors))))

    def is_rewritten(self, index: int) -> bool:
        """Whether the call changed the history of one source, as for `rewrites_autograd`."""
        tensor, source, edge = self.tensors[index], self._noted[index], self._edges[index]
        return (
            tensor.requires_grad != source.requires_grad
            or is_leaf(tensor) != source.is_leaf
            or (edge is not None and get_gradient_edge(tensor)[:2] != edge[:2])
        )

    def edges(self) -> list[GradientEdge | None]:
        """Returns where the gradient of each source arrived at its first use, None for a source that took no gradient.

        Call it once the call has ended. Torch makes a leaf's edge on demand, which fails while gradients are disabled.
        """
        return [
            edge or (get_gradient_edge(tensor) if source.requires_grad and tensor.requires_grad else None)
            for tensor, source, edge in zip(self.tensors, self._noted, self._edges, strict=True)
        ]

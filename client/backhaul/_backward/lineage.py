"""Recovery of a segment whose worker is lost: its sources are kept here, or are computed again from earlier segments.

NOTE [Lineage]
1. Each source of a segment on a worker is kept on the trainer, or has a recipe: how it follows from outputs of earlier
   segments. So of a chain of segments the first boundary is kept. With durability "none" a source may have neither.
2. A recipe runs the same ops on the same values as forward, so it gives the same bits. The code does not rely on that:
   a rebuilt value whose address differs is an error.
3. A lineage refers to earlier lineages but not to their frames. So it does not delay the release of segments on
   workers.
4. Backward needs the boundaries of a chain from its end. A walk up a chain of n boundaries keeps every k-th one for
   later walks, with k the square root of n, and the last k. That costs about two forwards in all, and keeps about two
   square roots of n boundaries at a time.
5. What a worker still stores is fetched instead of computed. The code does not rely on that either: a fetched value is
   used only if it has the requested address, and a value that does not arrive in time is computed.
"""

import itertools
import math
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.multiprocessing.reductions import StorageWeakRef

from backhaul._backward.local_recompute import outputs_here
from backhaul._config import Durability
from backhaul_runtime.errors import SegmentLostError
from backhaul_runtime.program.program import Program
from backhaul_runtime.record.recording import RecordedSource, Recording
from backhaul_runtime.tensors.deferred_digest import Digest
from backhaul_runtime.tensors.digest import content_digest, tensor_address
from backhaul_runtime.tensors.layout import Layout, allocate, copy_exact, layout_of
from backhaul_runtime.torch_internals.private import version_of

_FEW = 8
"""Up to this number of boundaries, a walk keeps all of them."""
_serials = itertools.count()


class Copies:
    """Copies of tensors that the trainer keeps, by content. Each is kept as long as it is referenced. Thread-safe.

    Args:
        fetch: Requests a missing tensor from the workers, within deadlines. It may return a wrong tensor.
    """

    def __init__(self, fetch: Callable[[bytes], Tensor | None] = lambda _: None) -> None:
        self.fetch = fetch
        self._tensors: weakref.WeakValueDictionary[Hashable, Tensor] = weakref.WeakValueDictionary()

    def copy_of(self, tensor: Tensor, layout: Layout, address: Digest | None) -> Tensor:
        """Returns a copy of a tensor with this address. Equal contents share one copy.

        If the address is not known without waiting for an accelerator, the same tensor at the same version counts as
        equal.
        """
        key: Hashable = address if isinstance(address, bytes) else _version_key(tensor, layout)
        copy = self._tensors.get(key)
        if copy is None:
            copy = self._tensors[key] = copy_exact(tensor, layout)
        return copy

    def find(self, address: bytes) -> Tensor | None:
        """Returns a copy that is still referenced, None if there is none."""
        return self._tensors.get(address)

    def add(self, address: bytes, tensor: Tensor) -> None:
        """Shares a tensor that will not be written to."""
        self._tensors[address] = tensor


def _version_key(tensor: Tensor, layout: Layout) -> Hashable:
    """Returns a key for the current contents of a tensor.

    While it is in use, no other storage gets the same address.
    """
    storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return storage, int(tensor.storage_offset()), layout, version_of(tensor)


@dataclass(eq=False, slots=True, weakref_slot=True)
class Lineage:
    """Everything needed to compute a segment again.

    Attributes:
        name: The name of the function or module, for messages.
        session: Id of the trainer's session, for messages.
        site: File and line of the call.
        program: The program of the segment, with its outputs.
        recording: The recording of the segment's forward.
        copies: The copies of tensors that the session keeps.
        durability: The option `durability` of the call.
        recipes: The recipes of the sources whose values are not kept, by the source's index.
        serial: Greater than the serials of all segments that this one follows from.
    """

    name: str
    session: str
    site: str
    program: Program
    recording: Recording
    copies: Copies
    durability: Durability
    recipes: "dict[int, Recipe]" = field(default_factory=dict)
    serial: int = field(default_factory=lambda: next(_serials))

    def find_recipes(
        self,
        edges: Sequence[tuple[int, GradientEdge]],
        recipe_of: "Callable[[int, GradientEdge], Recipe | None]",
    ) -> None:
        """Notes the recipes of the copies that `release` may drop.

        Args:
            edges: The copies whose tensors have a history, by index, with their graph edges.
            recipe_of: Returns the recipe of one of these, None if it has none.
        """
        if self.durability == "lineage":
            for index, edge in edges:
                if (recipe := recipe_of(index, edge)) is not None:
                    self.recipes[index] = recipe

    def release(self) -> None:
        """Drops copies once an uploader has the segment: those with a recipe, or all under durability "none"."""
        sources = self.recording.sources
        for index in range(len(sources)) if self.durability == "none" else self.recipes:
            if sources[index].is_copy:
                sources[index].release()

    def take_back(self) -> None:
        """Keeps sources again that were not sent yet. Call it when the worker is lost."""
        for index in self.recipes:
            source = self.recording.sources[index]
            source.retained = source.retained if source.retained is not None else source.released()

    def values(self) -> list[Tensor]:
        """Returns the values of the sources at forward, on their devices. They must not be written to.

        Raises:
            SegmentLostError: A value is not kept and cannot be rebuilt.
            StaleTensorError: A captured tensor of an earlier segment has changed since.
            CheckpointError: The recomputation of an earlier segment gave other values than its forward.
        """
        walk = _Walk(self)
        return [walk.value(source) for source in self.recording.sources]

    def outputs(self, values: list[Tensor]) -> dict[int, Tensor]:
        """Returns the outputs by position, computed on the trainer from the values of the sources."""
        return outputs_here(self.name, self.program, self.recording, values, range(len(self.program.outputs)))

    def lost(self, why: str) -> SegmentLostError:
        """Returns the error for a segment whose inputs cannot be obtained any more."""
        return SegmentLostError(
            f"segment {self.name}, called at {self.site}, is lost with its worker (session {self.session}): {why}. "
            'durability="host" keeps a copy of every input on the trainer',
            session=self.session,
            segment=self.name,
            site=self.site,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """An output of a segment, by position."""

    lineage: Lineage
    position: int


@dataclass(frozen=True, slots=True, eq=False)
class Input:
    """The value of a source of a segment."""

    lineage: Lineage
    index: int

    @property
    def source(self) -> RecordedSource:
        """The record of the source."""
        return self.lineage.recording.sources[self.index]


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A leaf of autograd's graph. Its memory belongs to the caller."""

    tensor: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """A function of tensors, each with a recipe."""

    function: Callable[..., Tensor]
    operands: "tuple[Recipe, ...]"


Recipe = Output | Input | Leaf | Op


def ends_of(recipe: Recipe) -> Iterator[Output | Input | Leaf]:
    """Yields the values that a recipe starts from."""
    if isinstance(recipe, Op):
        for operand in recipe.operands:
            yield from ends_of(operand)
    else:
        yield recipe


class _Walk:
    """Rebuilds the values of a segment's sources from values that are kept."""

    def __init__(self, lineage: Lineage) -> None:
        self._lineage = lineage
        self._values: dict[bytes, Tensor] = {}
        self._outputs: dict[Lineage, dict[int, Tensor]] = {}
        missing = self._find_missing()
        last_uses: dict[bytes | Lineage, int] = {}
        for number, input_ref in enumerate(missing):
            last_uses |= dict.fromkeys(_needs(input_ref), number)
        last_uses |= dict.fromkeys([source.address for source in lineage.recording.sources], len(missing))
        stride = 1 if len(missing) <= _FEW else math.isqrt(len(missing))
        for number, input_ref in enumerate(missing):
            rebuilt = self._rebuild(input_ref)
            self._values[input_ref.source.address] = rebuilt
            if (number + 1) % stride == 0 or number >= len(missing) - stride:  # Rule 4
                input_ref.source.retained = rebuilt
                lineage.copies.add(input_ref.source.address, rebuilt)
            for key in _needs(input_ref):
                if last_uses[key] == number:
                    self._values.pop(key, None) if isinstance(key, bytes) else self._outputs.pop(key, None)

    def value(self, source: RecordedSource) -> Tensor:
        """Returns the value of a source."""
        return source.retained if source.retained is not None else self._values[source.address]

    def _find_missing(self) -> list[Input]:
        """Returns the values to rebuild, earliest first."""
        missing: dict[bytes, Input] = {}
        stack = [Input(self._lineage, index) for index in range(len(self._lineage.recording.sources))]
        while stack:
            input_ref = stack.pop()
            source, lineage = input_ref.source, input_ref.lineage
            known = missing.get(source.address)
            if source.retained is not None or source.address in self._values:
                continue
            # Equal contents may occur in several segments. The earliest is rebuilt, as the others may depend on it.
            if known is not None and known.lineage.serial <= lineage.serial:
                continue
            recipe = lineage.recipes.get(input_ref.index)
            value = _find(source, lineage)
            if value is not None:
                self._values[source.address] = value
                continue
            if recipe is None:
                raise self._lineage.lost(f"an input of shape {list(source.layout.shape)} is not kept anywhere")
            missing[source.address] = input_ref
            for end in ends_of(recipe):
                if isinstance(end, Output):
                    stack += [Input(end.lineage, index) for index in range(len(end.lineage.recording.sources))]
                elif isinstance(end, Input):
                    stack.append(end)
        return sorted(missing.values(), key=lambda input_ref: input_ref.lineage.serial)

    def _rebuild(self, input_ref: Input) -> Tensor:
        with torch.no_grad():
            value = self._evaluate(input_ref.lineage.recipes[input_ref.index])
        rebuilt = as_it_was(value, input_ref.source, input_ref.lineage.recording)
        if rebuilt is None:
            raise self._lineage.lost(
                f"an input of shape {list(input_ref.source.layout.shape)} was computed again from earlier segments, "
                "and differs from its value in forward: it, or a tensor that it was computed from, was changed in a "
                "way that autograd does not see (NumPy, .data, no_grad)"
            )
        return rebuilt

    def _evaluate(self, recipe: Recipe) -> Tensor:
        match recipe:
            case Output(lineage, position):
                if lineage not in self._outputs:
                    self._outputs[lineage] = lineage.outputs(list(map(self.value, lineage.recording.sources)))
                return self._outputs[lineage][position]
            case Input():
                return self.value(recipe.source)
            case Leaf(tensor):
                return tensor
            case Op(function, operands):
                return function(*map(self._evaluate, operands))


def _find(source: RecordedSource, lineage: Lineage) -> Tensor | None:
    """Returns the value of a source from anywhere it is still kept (Rule 5); None if nowhere."""
    # A copy that waits to be sent is on no worker yet, and `copies` does not know its address if that is on a device.
    if (waiting := source.released()) is not None:
        return waiting
    value = lineage.copies.find(source.address)
    if value is None:
        value = lineage.copies.fetch(source.address)
    elif value.device == _device_of(source.layout, lineage.recording):
        return value
    return None if value is None else as_it_was(value, source, lineage.recording)


def _device_of(layout: Layout, recording: Recording) -> torch.device:
    """Returns the device of a source. A segment that a worker may have had is on one CUDA device at most."""
    return next(iter(recording.accelerators)) if layout.device == "cuda" else torch.device(layout.device)


def as_it_was(value: Tensor, source: RecordedSource, recording: Recording) -> Tensor | None:
    """Returns a tensor on the device and in the layout of a source; None if its contents differ from the source's.

    Args:
        value: A tensor on any device, in any layout.
        source: The source that it may be the value of.
        recording: The recording of the source's segment.
    """
    layout, device = source.layout, _device_of(source.layout, recording)
    if (value.dtype, tuple(value.shape)) != (layout.dtype, layout.shape):
        return None
    if layout_of(value) != layout or value.device != device:
        with torch.no_grad():
            value = allocate(layout, device).copy_(value)
    return value if tensor_address(layout, content_digest(value, layout)) == source.address else None


def _needs(input_ref: Input) -> Iterator[bytes | Lineage]:
    """Yields what a rebuild needs: addresses of sources, and lineages whose outputs it uses."""
    for end in ends_of(input_ref.lineage.recipes[input_ref.index]):
        if isinstance(end, Output):
            yield end.lineage
            yield from (source.address for source in end.lineage.recording.sources)
        elif isinstance(end, Input):
            yield end.source.address

"""What becomes of a segment whose worker is gone: its sources are held here, or computed again from earlier segments.

NOTE [Lineage]
1. A source of a segment that a worker has is held on the trainer, or has a recipe: how it follows from outputs of
   earlier segments. So a chain of segments keeps its first boundary. With durability "none" it may be neither.
2. A recipe is the same ops on the same values as forward, so it gives the same bits. Nobody relies on that: what is
   rebuilt has the address of what was, or is an error.
3. A lineage leads to earlier lineages and not to their frames: workers are told to release segments when they would be
   without it.
4. Backward asks for the boundaries of a chain from its end. Walking up to one leaves every k-th of n behind for those
   to come, k the root of n, and the last k: about two forwards in all, and two roots of n boundaries at a time.
5. What a worker still holds is not computed again but fetched. Nobody relies on that either: it has the address that
   was asked for or is not used, and what does not come in time is computed.
"""

import itertools
import math
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
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
"""So many boundaries are all left behind."""
_serials = itertools.count()


class Copies:
    """Copies of tensors that the trainer keeps, by content, each for as long as it is referenced.

    Args:
        fetch: Asks workers for what is not held here, within bounds. What it returns need not be what was asked for.
    """

    def __init__(self, fetch: Callable[[bytes], Tensor | None] = lambda _: None) -> None:
        self.fetch = fetch
        self._tensors: weakref.WeakValueDictionary[Hashable, Tensor] = weakref.WeakValueDictionary()

    def hold(self, tensor: Tensor, layout: Layout, address: Digest | None) -> Tensor:
        """A copy of a tensor with this address, shared by all holders of the same contents.

        Where the address is not known without waiting for an accelerator, the same tensor at the same version is taken
        to hold the same.
        """
        key: Hashable = address if isinstance(address, bytes) else _version_key(tensor, layout)
        held = self._tensors.get(key)
        if held is None:
            held = self._tensors[key] = copy_exact(tensor, layout)
        return held

    def find(self, address: bytes) -> Tensor | None:
        """A copy that is still referenced."""
        return self._tensors.get(address)

    def add(self, address: bytes, tensor: Tensor) -> None:
        """Shares a tensor that will not be written to."""
        self._tensors[address] = tensor


def _version_key(tensor: Tensor, layout: Layout) -> Hashable:
    """Names what a tensor holds now. While the name is in use, no other storage is known by the same address."""
    storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return storage, int(tensor.storage_offset()), layout, version_of(tensor)


@dataclass(eq=False, slots=True, weakref_slot=True)
class Lineage:
    """What it takes to compute a segment again.

    Attributes:
        name: The name of what was called, for messages.
        session: Names the trainer's session.
        site: File and line of the call.
        program: The program of the segment, with its outputs.
        recording: The recording of the segment's forward.
        copies: The copies of tensors that the session keeps.
        durability: The option `durability` of the call.
        recipes: The recipes of the sources whose values are not kept, by the source's index.
        serial: Greater than those of all segments it follows from.
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

    def release(self, recipe_of: "Callable[[int], Recipe | None]") -> None:
        """Lets go of the copies that can be done without, once a worker has been given them. Rule 1.

        Args:
            recipe_of: Reads the recipe of a source, if it has one.
        """
        if self.durability == "host":
            return
        for index, source in enumerate(self.recording.sources):
            if not source.is_copy:
                continue
            if self.durability == "lineage":
                recipe = None if source.is_written else recipe_of(index)
                if recipe is None:
                    continue
                self.recipes[index] = recipe
            source.kept_value = None

    def take_back(self) -> None:
        """Keeps again what has not been sent yet. Call it when the worker is lost, and its uploader with it."""
        for index in self.recipes:
            source = self.recording.sources[index]
            source.kept_value = source.kept_value if source.kept_value is not None else self.copies.find(source.address)

    def values(self) -> list[Tensor]:
        """What the sources held at forward, on their devices. Nobody may write to them.

        Raises:
            SegmentLostError: Something is not here and can't be rebuilt.
            StaleTensorError: A captured tensor of an earlier segment changed since.
            CheckpointError: An earlier segment gave other values than in its forward.
        """
        walk = _Walk(self)
        return [walk.value(source) for source in self.recording.sources]

    def outputs(self, values: list[Tensor]) -> dict[int, Tensor]:
        """The outputs by position, computed here from the values of the sources."""
        return outputs_here(self.name, self.program, self.recording, values, range(len(self.program.outputs)))

    def lost(self, why: str) -> SegmentLostError:
        """The error for a segment whose inputs cannot be obtained any more."""
        return SegmentLostError(
            f"segment {self.name}, called at {self.site}, is lost with its worker (session {self.session}): {why}. "
            'durability="host" keeps a copy of every input on the trainer',
            session=self.session,
            segment=self.name,
            site=self.site,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """What a segment returned at a position."""

    lineage: Lineage
    position: int


@dataclass(frozen=True, slots=True, eq=False)
class Input:
    """What a source of a segment held."""

    lineage: Lineage
    index: int

    @property
    def source(self) -> RecordedSource:
        """The source."""
        return self.lineage.recording.sources[self.index]


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A leaf of autograd's graph, whose memory is the caller's."""

    tensor: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """A function of tensors, each of which has a recipe."""

    function: Callable[..., Tensor]
    operands: "tuple[Recipe, ...]"


Recipe = Output | Input | Leaf | Op


def ends_of(recipe: Recipe) -> Iterator[Output | Input | Leaf]:
    """What a recipe starts from."""
    if isinstance(recipe, Op):
        for operand in recipe.operands:
            yield from ends_of(operand)
    else:
        yield recipe


class _Walk:
    """Rebuilds what a segment's sources held, from what is held."""

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
                input_ref.source.kept_value = rebuilt
                lineage.copies.add(input_ref.source.address, rebuilt)
            for key in _needs(input_ref):
                if last_uses[key] == number:
                    self._values.pop(key, None) if isinstance(key, bytes) else self._outputs.pop(key, None)

    def value(self, source: RecordedSource) -> Tensor:
        """What a source held."""
        return source.kept_value if source.kept_value is not None else self._values[source.address]

    def _find_missing(self) -> list[Input]:
        """What has to be rebuilt, earliest first."""
        missing: dict[bytes, Input] = {}
        stack = [Input(self._lineage, index) for index in range(len(self._lineage.recording.sources))]
        while stack:
            input_ref = stack.pop()
            source, lineage = input_ref.source, input_ref.lineage
            known = missing.get(source.address)
            if source.kept_value is not None or source.address in self._values:
                continue
            if known is not None and known.lineage.serial <= lineage.serial:
                continue
            recipe = lineage.recipes.get(input_ref.index)
            held = _find(source, lineage.copies) if recipe is not None else None
            if held is not None:
                self._values[source.address] = held
                continue
            if recipe is None:
                raise self._lineage.lost(f"an input of shape {list(source.layout.shape)} is kept nowhere")
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
        rebuilt = _as_it_was(value, input_ref.source)
        if rebuilt is None:
            raise self._lineage.lost(
                f"an input of shape {list(input_ref.source.layout.shape)} was computed again from earlier segments, "
                "and came out other than it was: it, or what it was computed from, was written to unseen (NumPy, "
                ".data, no_grad)"
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


def _find(source: RecordedSource, copies: Copies) -> Tensor | None:
    """What a source held, from wherever it is still held. Rule 5."""
    held = copies.find(source.address)
    if held is not None:
        return held
    fetched = copies.fetch(source.address)
    return None if fetched is None else _as_it_was(fetched, source)


def _as_it_was(value: Tensor, source: RecordedSource) -> Tensor | None:
    """A tensor in the place of what a source held, laid out as that was; None where it holds something else."""
    layout = source.layout
    if (value.dtype, tuple(value.shape)) != (layout.dtype, layout.shape):
        return None
    if layout_of(value) != layout:
        device = value.device if value.device.type == layout.device else layout.device
        with torch.no_grad():
            value = allocate(layout, device).copy_(value)
    return value if tensor_address(layout, content_digest(value, layout)) == source.address else None


def _needs(input_ref: Input) -> Iterator[bytes | Lineage]:
    """The sources, by address, and the outputs of segments, that rebuilding one takes."""
    for end in ends_of(input_ref.lineage.recipes[input_ref.index]):
        if isinstance(end, Output):
            yield end.lineage
            yield from (source.address for source in end.lineage.recording.sources)
        elif isinstance(end, Input):
            yield end.source.address

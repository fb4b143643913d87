"""What the executor's thread does: replay a segment, run its backward, or take what autograd saved in it."""

from collections.abc import Collection, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from time import time

import torch
from torch import Tensor

from backhaul_runtime.program.program import Program
from backhaul_runtime.replay.replay import Contribution, Replay
from backhaul_runtime.tensors.deferred_digest import KnownDigests
from backhaul_runtime.tensors.digest import address_of, content_digest, tensor_address
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.torch_internals.storages import storage_key
from backhaul_runtime.wire.bundle import Bundle, bundle
from backhaul_runtime.wire.tensor_stream import OutgoingTensor
from backhaul_server.worker.engine.bounds import Bounds

RESULT_BYTES = 4 << 10
"""What a result and its request take beside their lists."""

PART_BYTES, NUMBER_BYTES = 512, 64
"""What each thing in a list of a result takes, and each number of a sketch."""


@dataclass(frozen=True, slots=True)
class LiveReplay:
    """A replay that waits for its request.

    Attributes:
        replay: With its graph.
        keeps_saved: Whether it can answer a recompute.
        began_at_s: When it was made, in seconds since 1970.
        took_s: What that took.
    """

    replay: Replay
    keeps_saved: bool
    began_at_s: float
    took_s: float


@dataclass(frozen=True, slots=True)
class SegmentInputs:
    """All a run needs.

    Attributes:
        program: Checked.
        sources: On the device, not written to.
        generator_states: One per node that draws.
        wants_sketches: Sketch what autograd saves.
        kind: Equal for those whose replays take the same memory.
        bounds: Of its runs.
        known: Digests of sources from the runs of others.
    """

    program: Program
    sources: Sequence[Tensor]
    generator_states: Sequence[bytes]
    wants_sketches: bool = False
    kind: Hashable = None
    bounds: Bounds = field(default_factory=Bounds)
    known: KnownDigests | None = None

    def replay(self, *, keep_saved: bool, is_measured: bool = False) -> LiveReplay:
        """Runs the program forward. Measured, its `Replay.footprint` is found."""
        began_at_s = time()
        states = self.program.ambient_states
        try:
            with self.bounds.working(ambient_state.threads_of(states[0]) if states else torch.get_num_threads()):
                replay = Replay(
                    self.program,
                    self.sources,
                    self.generator_states,
                    keep_saved=keep_saved,
                    wants_sketches=self.wants_sketches,
                    is_measured=is_measured,
                    check=self.bounds.check,
                    known=self.known,
                )
            return LiveReplay(replay, keep_saved, began_at_s, time() - began_at_s)
        finally:
            torch.clear_autocast_cache()


@dataclass(frozen=True, slots=True)
class BackwardInputs:
    """What a backward starts from. Equal ones of a segment give equal results.

    Attributes:
        addresses: Of the gradients, with their positions in the program's outputs.
        state: Ambient settings that the trainer's backward runs under.
        wants_digests: Digest what is returned.
        summed: Sources whose contributions are wanted as their sum.
    """

    addresses: tuple[tuple[int, bytes], ...]
    state: ambient_state.State
    wants_digests: bool = False
    summed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a request is answered with.

    Attributes:
        bundle: Tensors to send: contributions by position in `sources`, or saved tensors by saved position.
        saved_digests: What the replay saved, in order.
        sources: Of each contribution, see `Contribution.source`; empty for a recompute.
        tensor_digests: Of the bundle's parcels, if they were asked for.
        saved_sketches: What the replay saved, if they were asked for.
        chained: Gradients of sources that are outputs of predecessors, by source.
        kept: Positions of contributions that were taken out of the bundle, see NOTE [Sums].
        recompute_at_s: When the replay began, in seconds since 1970.
        recompute_s: What it took.
        backward_at_s: When its backward began, in seconds since 1970; 0 for a recompute.
        backward_s: What that took.
    """

    bundle: Bundle
    saved_digests: tuple[bytes, ...]
    sources: tuple[int, ...]
    tensor_digests: tuple[bytes, ...] = ()
    saved_sketches: Sequence[tuple[float, ...]] = ()
    chained: Mapping[int, OutgoingTensor] = field(default_factory=dict)
    kept: Set[int] = frozenset()
    recompute_at_s: float = 0.0
    recompute_s: float = 0.0
    backward_at_s: float = 0.0
    backward_s: float = 0.0

    @property
    def parts(self) -> int:
        """Digests, views and gradients in it: how much there is to do to write it."""
        return len(self.saved_digests) + len(self.saved_sketches) + len(self.sources) + len(self.bundle.views)

    def kept_bytes(self, sources: Sequence[Tensor]) -> int:
        """What is kept with it: the whole memory behind its tensors, and all else in it.

        Args:
            sources: Of the segment, which the store holds.
        """
        held = {storage_key(tensor) for tensor in sources}
        found = 0
        for parcel in (*self.bundle.parcels, *self.chained.values()):
            if (key := storage_key(parcel.tensor)) not in held:
                held.add(key)
                found += parcel.tensor.untyped_storage().nbytes()
        sketched = sum(map(len, self.saved_sketches))
        parts = self.parts + len(self.chained) + len(self.bundle.parcels)
        return found + RESULT_BYTES + PART_BYTES * parts + NUMBER_BYTES * sketched


def backward(
    work: SegmentInputs,
    ready: LiveReplay | None,
    start: BackwardInputs,
    gradients: Mapping[int, Tensor],
    chained: Collection[int] = (),
) -> RunResult:
    """Runs a segment's backward.

    Args:
        work: Of the segment.
        ready: Its replay, if there is one already; used up.
        start: What it starts from.
        gradients: The tensors that `start` names, by position in the program's outputs.
        chained: Sources whose gradients are wanted as sums too.
    """
    ready = ready or work.replay(keep_saved=False)
    began_at_s = time()
    ambient_state.apply(start.state, ambient_state.capture())
    with work.bounds.working(ambient_state.threads_of(start.state)):
        contributions = ready.replay.backward(gradients)
        sums = _sums(contributions, {*start.summed, *chained})
    contributions = _summed(contributions, {source: sums[source] for source in start.summed if source in sums})
    boundaries = {i for i, source in enumerate(work.program.sources) if not source.is_leaf}
    found = [(i, c.gradient) for i, c in enumerate(contributions) if c.gradient is not None]
    sent = _addressed(bundle(found), {i for i, c in enumerate(contributions) if c.source in boundaries})
    return RunResult(
        bundle=sent,
        saved_digests=tuple(ready.replay.saved_digests),
        sources=tuple(c.source for c in contributions),
        tensor_digests=tuple(address_of(parcel.tensor) for parcel in sent.parcels) if start.wants_digests else (),
        saved_sketches=ready.replay.saved_sketches,
        chained={source: _named(OutgoingTensor.of(sums[source])) for source in chained if source in sums},
        recompute_at_s=ready.began_at_s,
        recompute_s=ready.took_s,
        backward_at_s=began_at_s,
        backward_s=time() - began_at_s,
    )


def _sums(contributions: Sequence[Contribution], wanted: Collection[int]) -> dict[int, Tensor]:
    """Adds a source's contributions in the order in which autograd adds them on the trainer."""
    found: dict[int, Tensor] = {}
    for contribution in contributions:
        source, gradient = contribution.source, contribution.gradient
        if source in wanted and gradient is not None:
            gradient = gradient.detach()
            found[source] = found[source] + gradient if source in found else gradient
    return found


def _summed(contributions: Sequence[Contribution], sums: Mapping[int, Tensor]) -> list[Contribution]:
    """The contributions, the first of a source replaced by its sum and the others taken out."""
    left = dict(sums)
    return [Contribution(c.source, left.pop(c.source, None)) if c.source in sums else c for c in contributions]


def _named(parcel: OutgoingTensor) -> OutgoingTensor:
    """The parcel with the address of its contents."""
    address = tensor_address(parcel.layout, content_digest(parcel.tensor, parcel.layout))
    return OutgoingTensor(parcel.tensor, parcel.layout, address)


def recompute(work: SegmentInputs, ready: LiveReplay | None, positions: Sequence[int]) -> RunResult:
    """Takes saved tensors of a segment, by position, in the order asked for."""
    if ready is None or not ready.keeps_saved:
        ready = work.replay(keep_saved=True)
    replay = ready.replay
    return RunResult(
        bundle=bundle([(position, replay.saved(position).unpack()) for position in positions]),
        saved_digests=tuple(replay.saved_digests),
        sources=(),
        saved_sketches=replay.saved_sketches,
        recompute_at_s=ready.began_at_s,
        recompute_s=ready.took_s,
    )


def _addressed(found: Bundle, positions: Set[int]) -> Bundle:
    """Names gradients of boundaries by their contents, so that the trainer can say "the one you sent"."""
    whole = {view.parcel for view in found.views if view.layout is None and view.position in positions}
    parcels = [_named(parcel) if i in whole else parcel for i, parcel in enumerate(found.parcels)]
    return Bundle(tuple(parcels), found.views)

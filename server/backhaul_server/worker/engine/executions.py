"""The work of the executor's thread: replay a segment, run its backward, or return what autograd saved in it."""

from collections.abc import Collection, Hashable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import time
from typing import Protocol

import torch
from torch import Tensor

from backhaul_runtime.errors import ProgramError, ReplayError, SegmentUnknownError
from backhaul_runtime.program.program import Program
from backhaul_runtime.replay.replay import Replay, sums_of, with_sums
from backhaul_runtime.tensors.deferred_digest import KnownDigests
from backhaul_runtime.tensors.digest import address_of, content_digest, digest_of_tensor, tensor_address
from backhaul_runtime.tensors.durations import Duration, wait_s
from backhaul_runtime.tensors.layout import host_bytes, layout_of, payload
from backhaul_runtime.tensors.stopwatch import Stopwatch, device_of_work
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.torch_internals.storages import storage_key
from backhaul_runtime.wire.bundle import Bundle, bundle
from backhaul_runtime.wire.tensor_batches import OutgoingTensor
from backhaul_server.worker.engine.bounds import Bounds

RESULT_BYTES = 4 << 10
"""Bytes of a result and its request without their lists."""

SHORT_OUTPUT_BYTES = 1 << 10
"""The most bytes of an output that a result has beside its tensors: a loss is one number."""

PART_BYTES, NUMBER_BYTES = 512, 64
"""Bytes of each item in a list of a result, and of each number of a projection."""


@dataclass(frozen=True, slots=True)
class LiveReplay:
    """A finished replay, whose autograd graph is alive.

    Attributes:
        replay: The replayed program with its graph and outputs.
        keeps_saved: Whether it kept the saved tensors, so that it can answer a recompute.
        began_at_s: When the replay began, in seconds since 1970.
        took: What the replay took, see NOTE [Durations].
    """

    replay: Replay
    keeps_saved: bool
    began_at_s: float
    took: Duration


class Origin(Protocol):
    """A segment whose outputs are sources of later ones.

    Attributes:
        inputs: The inputs of its executions; None once it was released.
        ready: Its replay, if one is ready.
    """

    inputs: "SegmentInputs | None"
    ready: LiveReplay | None


@dataclass(slots=True, eq=False)
class Derivation:
    """A source that the worker computes as an output of an earlier segment, instead of receiving it.

    Attributes:
        origin: The segment whose program has the source among its outputs.
        output: Position of the source among these outputs.
        address: The address that the source must have.
        value: The source, uninitialized until `is_filled`.
        is_filled: Whether `value` has its contents.
    """

    origin: Origin
    output: int
    address: bytes
    value: Tensor
    is_filled: bool = False

    def fill(self, replay: Replay) -> None:
        """Copies the output of the origin's replay. Raises ReplayError if that is another value."""
        output, layout = replay.output(self.output), layout_of(self.value)
        if (output.dtype, output.shape) == (self.value.dtype, self.value.shape):
            self.value.copy_(output)
            self.is_filled = tensor_address(layout, content_digest(self.value, layout)) == self.address
        if not self.is_filled:
            raise ReplayError(
                f"a boundary of shape {list(layout.shape)} was computed from the segment before it, and differs from "
                "the trainer's"
            )


@dataclass(frozen=True, slots=True)
class SegmentInputs:
    """The inputs of a segment's runs.

    Attributes:
        program: A decoded program that has passed all checks.
        sources: Tensors on the worker's device, one for each source of the program. Runs never write to them.
        generator_states: One state for each node that draws random numbers.
        wants_projections: Whether runs return random projections of what autograd saves.
        compares_outputs: Whether runs return digests of the program's outputs instead of saved tensors.
        kind: Equal for segments whose replays take the same memory.
        bounds: Deadline, memory limit and cancellation of the segment's runs.
        known: Digests of tensors that earlier executions have computed; None to compute all of them.
        derivations: The sources that the worker computes itself.
        successors: Derivations of later segments from outputs of this one. The event loop changes the list.
    """

    program: Program
    sources: Sequence[Tensor]
    generator_states: Sequence[bytes]
    wants_projections: bool = False
    compares_outputs: bool = False
    kind: Hashable = None
    bounds: Bounds = field(default_factory=Bounds)
    known: KnownDigests | None = None
    derivations: Sequence[Derivation] = ()
    successors: list[Derivation] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether all sources have their contents."""
        return all(derivation.is_filled for derivation in self.derivations)

    @property
    def device(self) -> torch.device:
        """The device that the executions compute on."""
        return device_of_work(self.sources)

    def replay(self, *, keep_saved: bool, is_measured: bool = False) -> LiveReplay:
        """Runs the program forward, after computing missing sources.

        With `is_measured` the replay also measures its `footprint`.

        Raises:
            ReplayError: A computed source has another value than on the trainer.
            SegmentUnknownError: The segment that a source is computed from was released.
        """
        incomplete = [] if self.is_complete else [self]
        while incomplete:
            inputs = incomplete[-1]
            derivation = next((derivation for derivation in inputs.derivations if not derivation.is_filled), None)
            if derivation is None:
                incomplete.pop()
                continue
            ready, origin = derivation.origin.ready, derivation.origin.inputs
            if ready is not None:
                derivation.fill(ready.replay)
            elif origin is None:
                raise SegmentUnknownError("a segment was released before the one that follows from its output")
            elif origin.is_complete:
                derivation.fill(replace(origin, bounds=self.bounds)._replayed(keep_saved=False).replay)
            else:
                incomplete.append(origin)
        replayed = self._replayed(keep_saved=keep_saved, is_measured=is_measured)
        for successor in tuple(self.successors):
            if not successor.is_filled:
                with suppress(ReplayError):  # the execution of the successor itself reports it
                    successor.fill(replayed.replay)
        return replayed

    def _replayed(self, *, keep_saved: bool, is_measured: bool = False) -> LiveReplay:
        began_at_s, stopwatch = time(), Stopwatch(self.device)
        states = self.program.ambient_states
        try:
            with self.bounds.working(ambient_state.threads_of(states[0]) if states else torch.get_num_threads()):
                replay = Replay(
                    self.program,
                    self.sources,
                    self.generator_states,
                    keep_saved=keep_saved,
                    wants_projections=self.wants_projections,
                    is_measured=is_measured,
                    check=self.bounds.check,
                    known=self.known,
                    compares_outputs=self.compares_outputs,
                )
            return LiveReplay(replay, keep_saved, began_at_s, stopwatch.stop())
        finally:
            torch.clear_autocast_cache()


@dataclass(frozen=True, slots=True)
class BackwardInputs:
    """The inputs of a backward. Two backwards of a segment with equal inputs have equal results.

    Attributes:
        addresses: Position of an output and address of its gradient, for each output that has one.
        state: Ambient settings under which the trainer's backward runs.
        wants_digests: Whether the result has digests of the returned tensors.
        summed: Sources for which the trainer wants the sum of the contributions instead of each.
        outputs: Positions of outputs whose bytes the result has.
        wants_contribution_digests: Whether the result has the digest of each contribution.
    """

    addresses: tuple[tuple[int, bytes], ...]
    state: ambient_state.State
    wants_digests: bool = False
    summed: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    wants_contribution_digests: bool = False


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """The result of a request.

    Attributes:
        bundle: Tensors to send: contributions by position in `sources`, or saved tensors by saved position.
        digests: Digests of the tensors that autograd saved in the replay, or of its outputs, in order.
        sources: The source of each contribution, see `Contribution.source`; empty for a recompute.
        tensor_digests: Addresses of the bundle's tensors; empty unless the trainer wanted them.
        saved_projections: Random projections of the saved tensors; empty unless the trainer wanted them.
        chained: By source, the gradients of sources that are outputs of earlier segments.
        uncollected: Positions of contributions that stay on the worker and are not in the bundle, see NOTE [Sums].
        outputs: The bytes of the outputs that the trainer wanted, in its order.
        contribution_digests: The digest of each contribution, empty for none; no digests unless they were wanted.
        recompute_at_s: When the replay began, in seconds since 1970.
        recompute_s: Seconds that the replay took.
        backward_at_s: When the backward began, in seconds since 1970; 0 for a recompute.
        backward_s: Seconds that the backward took; 0 for a recompute.
    """

    bundle: Bundle
    digests: tuple[bytes, ...]
    sources: tuple[int, ...]
    tensor_digests: tuple[bytes, ...] = ()
    saved_projections: Sequence[tuple[float, ...]] = ()
    chained: Mapping[int, OutgoingTensor] = field(default_factory=dict)
    uncollected: Set[int] = frozenset()
    outputs: tuple[bytes, ...] = ()
    contribution_digests: tuple[bytes, ...] = ()
    recompute_at_s: float = 0.0
    recompute_s: float = 0.0
    backward_at_s: float = 0.0
    backward_s: float = 0.0

    def without(self, sources: Collection[int]) -> "ExecutionResult":
        """Returns the result without the tensors that only contributions of these sources use."""
        return self.only({v.tensor_index for v in self.bundle.views if self.sources[v.position] not in sources})

    def only(self, tensors: Collection[int]) -> "ExecutionResult":
        """Returns the result with only these of the bundle's tensors, by index."""
        index_left = {index: i for i, index in enumerate(sorted(tensors))}
        left = Bundle(
            tuple(self.bundle.tensors[index] for index in index_left),
            tuple(
                replace(view, tensor_index=index_left[view.tensor_index])
                for view in self.bundle.views
                if view.tensor_index in index_left
            ),
        )
        digests = tuple(self.tensor_digests[index] for index in index_left) if self.tensor_digests else ()
        return replace(self, bundle=left, tensor_digests=digests)

    @property
    def parts(self) -> int:
        """Number of digests, projections, contributions and views, which the time to encode the result grows with."""
        return len(self.digests) + len(self.saved_projections) + len(self.sources) + len(self.bundle.views)

    def live_bytes(self, sources: Sequence[Tensor]) -> int:
        """Returns the bytes that the result keeps alive: the storages of its tensors, and its lists.

        Args:
            sources: The segment's sources. The store charges their storages already.
        """
        counted = {storage_key(tensor) for tensor in sources}
        storage_bytes = 0
        for outgoing in (*self.bundle.tensors, *self.chained.values()):
            if (key := storage_key(outgoing.tensor)) not in counted:
                counted.add(key)
                storage_bytes += outgoing.tensor.untyped_storage().nbytes()
        numbers = sum(map(len, self.saved_projections))
        parts = self.parts + len(self.chained) + len(self.bundle.tensors)
        return storage_bytes + RESULT_BYTES + PART_BYTES * parts + NUMBER_BYTES * numbers


def backward(
    work: SegmentInputs,
    ready: LiveReplay | None,
    start: BackwardInputs,
    gradients: Mapping[int, Tensor],
    chained: Collection[int] = (),
) -> ExecutionResult:
    """Runs a segment's backward. Executor's thread only.

    Args:
        work: The inputs of the segment's runs.
        ready: A replay of the segment, whose graph the backward frees; None to replay it first.
        start: The inputs of the backward.
        gradients: The tensors that `start` names, by position in the program's outputs. They are not written to.
        chained: Sources that are outputs of earlier segments; the result also has their summed gradients.
    """
    ready = ready or work.replay(keep_saved=False)
    began_at_s, stopwatch = time(), Stopwatch(work.device)
    ambient_state.apply(start.state, ambient_state.capture())
    with work.bounds.working(ambient_state.threads_of(start.state)):
        contributions = ready.replay.backward(gradients)
        sums = sums_of(contributions, {*start.summed, *chained})
    contributions = with_sums(contributions, {source: sums[source] for source in start.summed if source in sums})
    named = contributions if start.wants_contribution_digests else []
    boundaries = {i for i, source in enumerate(work.program.sources) if not source.is_leaf}
    gradients_sent = [(i, c.gradient) for i, c in enumerate(contributions) if c.gradient is not None]
    sent = _addressed(bundle(gradients_sent), {i for i, c in enumerate(contributions) if c.source in boundaries})
    result = ExecutionResult(
        bundle=sent,
        digests=tuple(ready.replay.digests),
        sources=tuple(c.source for c in contributions),
        tensor_digests=tuple(address_of(outgoing.tensor) for outgoing in sent.tensors) if start.wants_digests else (),
        saved_projections=ready.replay.saved_projections,
        chained={source: _named(OutgoingTensor.of(sums[source])) for source in chained if source in sums},
        outputs=tuple(_bytes_of(ready.replay.output(position)) for position in start.outputs),
        contribution_digests=tuple(b"" if c.gradient is None else digest_of_tensor(c.gradient) for c in named),
        recompute_at_s=ready.began_at_s,
        recompute_s=wait_s(ready.took),
    )
    took_s = wait_s(stopwatch.stop())  # the device has done the work already, as its digests were read
    # An accelerator begins a backward when the replay that was queued before it is done.
    return replace(result, backward_at_s=max(began_at_s, ready.began_at_s + result.recompute_s), backward_s=took_s)


def _bytes_of(output: Tensor) -> bytes:
    """Returns the elements of a short output in memory order. Raises ProgramError for a longer one."""
    if output.nbytes > SHORT_OUTPUT_BYTES:
        raise ProgramError(f"an output of {output.nbytes} bytes was asked for, more than {SHORT_OUTPUT_BYTES}")
    data = payload(output, layout_of(output)).cpu()  # a name of its own: `host_bytes` does not keep it alive
    return bytes(host_bytes(data))


def _named(outgoing: OutgoingTensor) -> OutgoingTensor:
    """Returns the tensor with the address of its contents."""
    address = tensor_address(outgoing.layout, content_digest(outgoing.tensor, outgoing.layout))
    return OutgoingTensor(outgoing.tensor, outgoing.layout, address)


def recompute(work: SegmentInputs, ready: LiveReplay | None, positions: Sequence[int]) -> ExecutionResult:
    """Returns saved tensors of a segment by position, in the order of the request. Executor's thread only."""
    if ready is None or not ready.keeps_saved:
        ready = work.replay(keep_saved=True)
    replay = ready.replay
    return ExecutionResult(
        bundle=bundle([(position, replay.saved(position).unpack()) for position in positions]),
        digests=tuple(replay.digests),
        sources=(),
        saved_projections=replay.saved_projections,
        recompute_at_s=ready.began_at_s,
        recompute_s=wait_s(ready.took),
    )


def _addressed(sent: Bundle, positions: Set[int]) -> Bundle:
    """Adds addresses to the gradients of boundaries, by which the trainer can name them without sending them back."""
    whole = {view.tensor_index for view in sent.views if view.layout is None and view.position in positions}
    outgoing_tensors = [_named(outgoing) if i in whole else outgoing for i, outgoing in enumerate(sent.tensors)]
    return Bundle(tuple(outgoing_tensors), sent.views)

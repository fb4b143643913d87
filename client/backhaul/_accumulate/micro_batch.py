"""The gradients of one micro-batch in an accumulation block: how they are computed, folded, and computed again."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from backhaul._accumulate.graph_parts import ChainSegment, Parts, Target
from backhaul._backward.remote_side import StoredGradient
from backhaul._worker_client.remote_segment import SavedSegment
from backhaul._worker_client.upload.uploader import Uploader
from backhaul_runtime.errors import AccumulationError
from backhaul_runtime.process.latch import Promise
from backhaul_runtime.program.custom.names import names
from backhaul_runtime.replay.replay import Contribution
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.torch_internals.private import is_referred_to

Streams = Sequence[torch.cuda.Stream]
G = TypeVar("G")
"""The streams of CUDA devices on which one thread has queued what another continues; empty without CUDA."""


@dataclass(slots=True, eq=False)
class MicroBatch:
    """A micro-batch whose gradients are not complete yet.

    `segments_left` and what follows belong to the threads of its chain.

    Attributes:
        number: The number of the micro-batch in its block, from 1.
        trainers_segments: The number of its segments that the trainer computes, also those whose activations it keeps.
        parts: The divided graph of its loss.
        state: The ambient settings under which its backward runs.
        streams: The streams on which the head was computed.
        sums: The folds so far, by where they arrive.
        size_bytes: The bytes that the trainer keeps for it.
        segments_left: The segments of the chain whose backward has not ended.
        uncollected: For each segment that is done, the worker and what stayed there, by source.
        first_gradient: The gradient with which the chain began.
        stored: The gradient of the next segment, if only its worker has it.
        last_gradient: The last gradient that the trainer had, with the position of its segment in the chain.
        outputs: The values of the outputs of a whole micro-batch, once a worker has returned them.
        ended_s: When a worker has answered for the whole of it, by the clock of `perf_counter`; 0 before.
        drawn: The rechecks of the answers that were drawn, for the caller's thread.
        ended: The last part of the chain that was queued.
        is_stopped: Whether the rest of the chain is left to the trainer.
        error: Why a part of the chain has failed.
    """

    number: int
    trainers_segments: int
    parts: Parts
    state: ambient_state.State
    streams: Streams
    sums: dict[Target, Tensor]
    size_bytes: int
    segments_left: list[ChainSegment] = field(default_factory=list)
    uncollected: list[tuple[Uploader, dict[int, Tensor]]] = field(default_factory=list)
    first_gradient: Tensor | None = None
    stored: StoredGradient | None = None
    last_gradient: tuple[int, Tensor] | None = None
    outputs: Sequence[Tensor] = ()
    ended_s: float = 0.0
    drawn: list[Callable[[], bool]] = field(default_factory=list)
    ended: Promise[None] | None = None
    is_stopped: bool = False
    error: Exception | None = None

    @property
    def is_whole(self) -> bool:
        """Whether a worker computes all of it, forward included."""
        return any(segment.frame.call.recording.is_unseen for segment in self.parts.chain)


def present_streams(loss: Tensor) -> Streams:
    """Returns the calling thread's streams that another thread would not have: all but the default ones.

    That of the loss comes last in any case, because `on_streams` makes the device of the last one the present one.
    """
    if not loss.is_cuda:
        return ()
    present = [torch.cuda.current_stream(index) for index in range(torch.cuda.device_count())]
    own = [stream for stream in present if stream != torch.cuda.default_stream(stream.device)]
    return *own, torch.cuda.current_stream(loss.device)


@contextmanager
def on_streams(streams: Streams) -> Iterator[None]:
    """Queues the block's work on these streams of their devices."""
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        yield


def differentiated(
    outputs: Sequence[Tensor] | Sequence[GradientEdge],
    gradients: Sequence[Tensor] | None,
    targets: Sequence[Target],
    parts: Parts,
) -> dict[Target, Tensor]:
    """Differentiates outputs down to targets. Returns the gradients that reach any, to which nothing else refers.

    Args:
        outputs: The outputs, or edges that lead to them.
        gradients: The gradients of the outputs; None for a loss.
        targets: Where the gradients are taken.
        parts: The graph that they belong to.
    """
    if not targets:  # which `autograd.grad` refuses; the nodes and their hooks run all the same
        torch.autograd.backward(outputs, gradients)
        return {}
    if gradients is not None and len(gradients) == 1:  # torch's hooks over several tensors overlook a lone root
        other = gradients[0].new_zeros(()).requires_grad_()
        outputs, gradients = [*outputs, get_gradient_edge(other)], [*gradients, other.detach()]
    register: Callable[[Tensor, Callable[[Tensor | None], Tensor | None]], Any] = Tensor.register_hook
    leaves = [parts.leaves[target] for target in targets if target in parts.leaves] if parts.may_reuse else []
    hooks = [register(leaf, _cloned) for leaf in leaves]  # before the same memory is written to for another leaf
    try:
        edges = [GradientEdge(*target) for target in targets]
        reached = torch.autograd.grad(outputs, edges, gradients, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    owned = dict[Target, Tensor]()
    for index, target in enumerate(targets):
        if reached[index] is not None:
            # That of anything but a leaf may be a view of memory that a hook writes to again.
            is_shared = target not in parts.leaves or is_referred_to(reached, index)
            owned[target] = reached[index].clone() if is_shared else reached[index]
    return owned


def _cloned(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.clone()


def size_bytes_of(parts: Parts, sums: Mapping[Target, Tensor], kept: int) -> int:
    """Returns the bytes that the trainer keeps for a micro-batch until it is finished.

    Args:
        parts: The graph of the micro-batch, divided.
        sums: The gradients that the head contributes.
        kept: The number of segments whose activations it keeps, about as many as the others would.
    """
    sources = [source for frame in parts.frames for source in frame.call.recording.sources if not source.is_leaf]
    inputs = {id(source.retained): source.layout.span_bytes for source in sources if source.retained is not None}
    keeping = kept * max((frame.call.log.saved_bytes for frame in parts.frames), default=0)
    return sum(inputs.values()) + sum(g.numel() * g.element_size() for g in sums.values()) + keeping


def only_contributions(micro_batch: MicroBatch, segment: ChainSegment, due: Sequence[int]) -> set[int]:
    """Returns the outputs of earlier segments whose gradients get no contributions before those of this segment.

    These contributions can be summed beforehand, because (a + b) + c is what autograd computes.

    Args:
        micro_batch: The micro-batch with the gradients so far.
        segment: The next segment of its chain.
        due: The source of each contribution.
    """
    sources: dict[Target, set[int]] = {}
    targets: dict[int, set[Target]] = {}
    for index, target in segment.contributions:
        sources.setdefault(target, set()).add(due[index])
        targets.setdefault(due[index], set()).add(target)
    known = micro_batch.sums.keys() | micro_batch.parts.leaves.keys()
    return {
        source
        for source in targets.keys() & segment.frame.consumers.watched
        for target, *others in [targets[source]]
        if not others and target not in known and len(sources[target]) == 1
    }


def uploader_of(segment: ChainSegment) -> Uploader | None:
    """Returns the uploader of the worker that stores a segment."""
    remote = segment.frame.remote
    return remote.uploader if isinstance(remote, SavedSegment) else None


@contextmanager
def under(state: ambient_state.State) -> Iterator[None]:
    """Runs under the ambient settings of a micro-batch's own `backward`."""
    with ambient_state.restored():
        ambient_state.apply(state, ambient_state.capture())
        yield


def gradients_of(segment: ChainSegment, gradient: G | None) -> dict[int, G] | None:
    """Returns what the backward of a segment gets, from the gradient of its output; None if it need not run.

    Without a gradient only custom functions contribute anything, which may get zeros instead.
    """
    if gradient is not None:
        return {0: gradient}
    program = segment.frame.program
    return {} if program is not None and program.functions else None


def on_trainer(
    segment: ChainSegment, gradients: Mapping[int, Tensor], state: ambient_state.State
) -> list[Contribution]:
    """Runs the backward of a segment in the trainer's thread, under the ambient settings of its micro-batch.

    Args:
        segment: The segment, which the trainer recomputes unless a worker that is up still stores it.
        gradients: What its backward gets, see `gradients_of`.
        state: The ambient settings under which backward runs.

    Raises:
        AccumulationError: A custom function is not what it was when the micro-batch called `backward`.
    """
    _check_function(names.changed(segment.frame.call.recording.identities))
    with under(state):
        return segment.frame.gradients(gradients, {})


def check_functions(parts: Parts) -> None:
    """Raises AccumulationError if a custom function of a segment is not what it was at `backward`."""
    for frame in parts.frames:
        _check_function(names.changed(frame.call.recording.identities))


def _check_function(changed: str) -> None:
    if changed:
        raise AccumulationError(
            f"the custom autograd function {changed}, or a value that it reads, was changed inside an accumulation "
            "block. Change it when no block is open"
        )


def plus(total: Tensor | None, gradient: Tensor) -> Tensor:
    """Adds as autograd does, which puts a sparse gradient second."""
    if total is None:
        return gradient
    return gradient + total if total.is_sparse and not gradient.is_sparse else total + gradient


def fold(sums: dict[Target, Tensor], segment: ChainSegment, contributions: Sequence[Contribution]) -> None:
    """Adds a segment's contributions to the gradients that they belong to, in autograd's order.

    Args:
        sums: The gradients of a micro-batch so far, by where they arrive. That of the segment's output is taken out.
        segment: The segment whose backward has ended.
        contributions: What its backward has returned.
    """
    sums.pop(segment.target, None)
    for index, target in segment.contributions:
        gradient = contributions[index].gradient
        if gradient is not None:
            sums[target] = plus(sums.get(target), gradient)


def recovered(micro_batch: MicroBatch, done: int) -> dict[Target, Tensor]:
    """Computes the gradient with which a chain goes on, which only a lost worker had.

    Args:
        micro_batch: The micro-batch to which the chain belongs.
        done: The number of its segments whose backward has ended.

    Returns:
        The gradient, by where it arrives.
    """
    assert micro_batch.last_gradient is not None
    position, gradient = micro_batch.last_gradient
    chain = micro_batch.parts.chain
    for segment, following in pairwise(chain[position : done + 1]):
        sums: dict[Target, Tensor] = {}
        fold(sums, segment, on_trainer(segment, {0: gradient}, micro_batch.state))
        gradient = sums[following.target]
    return {chain[done].target: gradient}


def computed_again(micro_batch: MicroBatch, lost: Set[Uploader]) -> Iterator[tuple[Tensor, Tensor]]:
    """Computes the gradients again that lost workers have kept of a micro-batch.

    Args:
        micro_batch: The micro-batch whose gradients were kept.
        lost: The uploaders of the workers that are lost.

    Yields:
        Each parameter with its gradient.
    """
    sums: dict[Target, Tensor] = {}
    if micro_batch.first_gradient is not None:
        sums[micro_batch.parts.chain[0].target] = micro_batch.first_gradient
    last = max(
        (number for number, (uploader, stayed) in enumerate(micro_batch.uncollected) if stayed and uploader in lost),
        default=-1,
    )
    for segment, (uploader, stayed) in zip(micro_batch.parts.chain[: last + 1], micro_batch.uncollected, strict=False):
        gradients = gradients_of(segment, sums.get(segment.target))
        if gradients is None:
            continue
        fold(sums, segment, on_trainer(segment, gradients, micro_batch.state))
        if uploader in lost:
            wanted = {id(parameter): parameter for parameter in stayed.values()}
            for target in {target for _, target in segment.contributions}:
                leaf = micro_batch.parts.leaves.get(target)
                if leaf is not None and id(leaf) in wanted:
                    yield leaf, sums[target]

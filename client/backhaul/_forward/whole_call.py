"""Calls of whole micro-batches: a worker gets the program with its inputs, and the trainer runs no forward."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from time import perf_counter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from backhaul._backward.frame import Frame
from backhaul._dispatch.dispatcher import Dispatcher
from backhaul._forward.awaited_tensor import Awaited, awaited
from backhaul._forward.captured_graph import GraphCall, KnownSegment
from backhaul._forward.graphs import Graphs, is_compiled_for_segments
from backhaul._forward.known_call import BegunKnownCall
from backhaul._observe.call_log import CallLog
from backhaul._torch_api.call_options import Options
from backhaul_runtime.errors import Refusal
from backhaul_runtime.record.known_program import KnownProgram
from backhaul_runtime.replay.draws import draws_of
from backhaul_runtime.torch_internals.ambient_state import is_autocast
from backhaul_runtime.torch_internals.private import DisableTorchDispatch, has_accumulation_hooks


class WholeCall(NamedTuple):
    """A call that a worker has, and that does not run here.

    Attributes:
        frame: The frame of the call, as one segment.
        leaves: The leaf behind each source of the program that takes gradients, by source.
    """

    frame: Frame
    leaves: Mapping[int, Tensor]


class WholeCalls:
    """Gives calls to workers whole. One thread uses it.

    Args:
        graphs: Captures the calls of a session.
        dispatcher: Gives them to workers.
        options: The options of the session's calls.
    """

    def __init__(self, graphs: Graphs, dispatcher: Dispatcher, options: Options) -> None:
        self._graphs, self._dispatcher = graphs, dispatcher
        self._options = replace(options, strict=False, compares_outputs=True)
        self._draws: WeakKeyDictionary[KnownProgram, Callable[[], None]] = WeakKeyDictionary()

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        of_workers: tuple[int, int],
        value_of: Callable[[WholeCall], Tensor],
        of: Awaited,
    ) -> tuple[Any, WholeCall | None]:
        """Calls a function that returns a loss, or gives the call to a worker.

        Args:
            function: The function to call.
            args: Positional arguments for the function.
            kwargs: Keyword arguments for the function.
            of_workers: The position of the call among those of the block that workers get, and their number.
            value_of: Returns the loss of a call that a worker has, perhaps after waiting.
            of: The awaited tensors of the block.

        Returns:
            What the function returns, and the call if a worker has it. Then the loss is an awaited tensor.

        Raises:
            Refusal: The call has not run, and cannot be given away.
        """
        taken: list[WholeCall] = []

        def take(call: GraphCall, segment: KnownSegment) -> Sequence[Tensor]:
            whole = self._taken(call, segment, of_workers)
            taken.append(whole)
            layout = whole.frame.uses.layouts[-1]
            loss = awaited(layout, whole.frame.call.device, lambda: value_of(whole), of)
            return [loss] * len(segment.returned)

        returned = self._graphs.unseen(function, args, kwargs, take)
        return returned, taken[0] if taken else None

    def here(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function here. One that the user has compiled runs the graph that workers run, as a segment."""
        if is_compiled_for_segments(function):
            with suppress(Refusal):  # `call` has counted the reason, as no worker gets it either
                return self._graphs.unseen(function, args, kwargs, None)
        return function(*args, **kwargs)

    def _taken(self, call: GraphCall, segment: KnownSegment, of_workers: tuple[int, int]) -> WholeCall:
        began_s = perf_counter()
        if reason := _why_not(call, segment):
            raise Refusal(reason)
        known = segment.known
        draw = self._draws_of(call, known) if known.draws_on is not None else None
        log = CallLog(self._dispatcher.journal.log(call.graph.name), self._dispatcher.telemetry)
        log.known()
        frame = BegunKnownCall(self._dispatcher, call, segment, self._options, log, of_workers).without_forward(began_s)
        if draw is not None:
            draw()
        leaves = {
            source: call.inputs[position]
            for source, position in enumerate(known.inputs)
            if known.program.sources[source].requires_grad
        }
        return WholeCall(frame, leaves)

    def _draws_of(self, call: GraphCall, known: KnownProgram) -> Callable[[], None]:
        draw = self._draws.get(known)
        if draw is None:
            assert known.draws_on is not None
            with saved_tensors_hooks(_dropped, _dropped):  # nothing of this run is kept
                draw = self._draws[known] = draws_of(call, known.draws_on)
        return draw


def _dropped(tensor: Tensor) -> Tensor:
    return tensor.new_empty(0)


def _why_not(call: GraphCall, segment: KnownSegment) -> str:
    """Returns why a call of a known segment has to run here; empty if it need not."""
    program, uses = segment.known.program, segment.uses.of_frame
    if len(program.outputs) != 1 or {*segment.returned} != {*segment.outputs} or prod(uses.layouts[-1].shape) != 1:
        return "it returns something else than one number, its loss"
    if segment.known.written:
        return "it writes to an input, as BatchNorm does to its statistics"
    if program.casts or (segment.kind.region is not None and is_autocast(segment.kind.region)):
        return "it is called in an autocast region: enter the region inside the function"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "the training is distributed, and ranks reduce gradients at other times"
    taking = [
        call.inputs[position]
        for position, source in zip(segment.known.inputs, program.sources, strict=True)
        if source.requires_grad
    ]
    with DisableTorchDispatch():
        if not all(one.is_leaf for one in taking):
            return "one of its inputs has a graph, which would need its gradient"
        if any(map(has_accumulation_hooks, taking)):
            return "a parameter has hooks, which see each gradient"
    return ""

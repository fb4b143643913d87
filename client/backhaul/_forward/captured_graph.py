"""Graphs that torch.compile has captured, and what is known of their calls."""

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from operator import attrgetter, not_
from typing import Any, NamedTuple

from torch import Tensor

from backhaul._dispatch.places import CapturedInputs
from backhaul._dispatch.prediction import EncodedProgram
from backhaul._forward.keep import EndedCall, bytes_needed
from backhaul._forward.known_uses import KnownUses, check_casts
from backhaul_runtime.errors import Refusal, UnsupportedTensorError
from backhaul_runtime.program.program import Program, is_same_program
from backhaul_runtime.record.known_program import SHARED_WRITE, VALUE_READ, KnownProgram, known_program, shares_memory
from backhaul_runtime.tensors.digest import content_digest
from backhaul_runtime.tensors.layout import Layout, copy_exact, layout_of
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.torch_internals.autocast_cache import in_region
from backhaul_runtime.torch_internals.graph_uses import structure_of
from backhaul_runtime.torch_internals.private import DisableTorchDispatch, DisableTorchFunctionAndModes, is_view
from backhaul_runtime.torch_internals.wrapper_tensors import taken_apart, without_function_modes

_AUTOGRAD = attrgetter("requires_grad", "is_leaf")

MAX_KINDS = 64
"""The most kinds of calls that are kept of a graph. With changing shapes each shape is a kind."""


class CallKind(NamedTuple):
    """What decides which ops a graph runs, see NOTE [Known programs].

    Attributes:
        key: Equal for calls of one kind as long as `layouts` live.
        layouts: The layout of each tensor among the inputs; None for other inputs.
        region: The ambient state if the call begins in an autocast region; None outside.
    """

    key: Hashable
    layouts: Sequence[Layout | None]
    region: ambient_state.State | None


CHECKED_CALLS = 64
"""One in this many calls of a kind compares the graph with its function, where Backhaul has compiled that itself."""

OTHER_OPS = "the graph that torch.compile has captured runs other ops than the function"


class OtherOpsError(Exception):
    """A captured graph has run other ops than its function would have."""


@dataclass(frozen=True, slots=True, eq=False)
class KnownSegment:
    """What the calls of one kind have in common, if a graft replaced the graph of the recorded one.

    Attributes:
        known: The program, with what saves and draws in it.
        encoded: The program as it is sent to workers.
        kind: The kind that all of these calls have.
        outputs: The positions of the program's outputs among what the graph returns, each at its first one.
        returned: For each value that the graph returns, see `pattern_of`.
        uses: Where the graphs of calls take gradients.
        packed_bytes: Bytes that autograd saves and that are not kept.
        compiled: Runs the compiled program on the graph's inputs; None if the graph runs as it is.
        structure: What the graph of each call must be, because classes of wrappers decide in each call which ops they
            run; None if only torch's functions decide.
        need_bytes: The bytes that a worker needs for the program.
    """

    known: KnownProgram
    encoded: EncodedProgram
    kind: CallKind
    outputs: tuple[int, ...]
    returned: tuple[int, ...]
    uses: KnownUses
    packed_bytes: int
    compiled: Callable[..., Any] | None = None
    structure: Hashable = None
    need_bytes: int = field(init=False)
    _calls: Iterator[int] = field(default_factory=itertools.count, init=False)

    def __post_init__(self) -> None:
        layouts = [source.layout for source in self.known.sources]
        object.__setattr__(self, "need_bytes", bytes_needed(self.known.program, layouts))

    def is_due(self) -> bool:
        """Whether the next call has to run the function that the graph was captured from. Counts the calls."""
        return next(self._calls) % CHECKED_CALLS == CHECKED_CALLS - 1

    def why_not(self, inputs: Sequence[Any]) -> str:
        """Returns why a call of the kind with these inputs has to be recorded; empty if it need not be."""
        return SHARED_WRITE if shares_memory(self.known.written, inputs) else ""


class FirstProgram(NamedTuple):
    """What the function itself has run in the first call of a kind. A second call has to run the same."""

    program: Program


Learned = KnownSegment | FirstProgram | Program | str
"""What is known of calls of a kind: the segment that they are, what their function has run in one call, or in two, or
why each has to be recorded."""


@dataclass(slots=True, eq=False)
class _Failure:
    """An unexpected error, such as one of memory, because of which nothing is known of calls of a kind yet.

    Attributes:
        reason: Type and message of the error, in words.
        pause: The number of calls after which another one tries to learn again.
        left: How many of these are left.
    """

    reason: str
    pause: int
    left: int


class CapturedGraph:
    """A graph that torch.compile has captured, with what is known of its calls. Threads may share it.

    Args:
        forward: Runs the graph on its inputs. It has no control flow.
        name: The name of the module or function, for reports.
        arguments: The positions of the inputs that were arguments of the compiled function. The others it captures.
        numbers: How often it reads the value of each input that stands for a number, by position.
        wrappers: The positions of the inputs that wrap other tensors, as quantised weights do.
        holds_functions: Whether it holds flex_attention, whose functions run under a function mode.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        name: str,
        arguments: Sequence[int],
        numbers: Mapping[int, int],
        wrappers: Sequence[int] = (),
        *,
        holds_functions: bool = False,
    ) -> None:
        self.name, self.arguments, self.wrappers = name, arguments, wrappers
        self._forward, self._numbers = forward, numbers
        self._has_exceptions = bool(wrappers) or holds_functions
        self.values_read = sum(numbers.values())
        self._learned: dict[Hashable, tuple[CallKind, Learned | _Failure]] = {}

    def run(self, inputs: Sequence[Any]) -> Any:
        """Runs the graph. It has what function modes and subclasses make of each call, so they must not see it.

        Wrappers are an exception: torch.compile leaves to them what a call means. So is a mode that an op enters.
        """
        with without_function_modes() if self._has_exceptions else DisableTorchFunctionAndModes():
            return self._forward(*inputs)

    def kind_of(self, inputs: Sequence[Any]) -> CallKind | str:
        """Returns the kind of a call that begins now, or why it has none."""
        inputs = list(inputs)
        for position in self._numbers:
            if isinstance(value := inputs[position], Tensor):
                if value.device.type != "cpu":  # its value is not a part of the kind: reading it would wait
                    return VALUE_READ
                inputs[position] = value.item()
        is_tensor = [isinstance(value, Tensor) for value in inputs]
        tensors = list(compress(inputs, is_tensor))
        if len(set(map(id, tensors))) < len(tensors):
            return "two of its inputs are the same tensor"
        try:
            layouts = list(map(layout_of, tensors))
        except UnsupportedTensorError as error:
            return f"one of its inputs is a {error.fields['reason']}"
        state, is_in_region = ambient_state.capture(), in_region()
        key = [state, is_in_region, *is_tensor, *map(id, layouts), *map(_AUTOGRAD, tensors), *map(is_view, tensors)]
        if len(tensors) == len(inputs):
            return CallKind(tuple(key), layouts, state if is_in_region else None)
        for value in compress(inputs, map(not_, is_tensor)):
            key += type(value), repr(value)  # which tells 0.0 from -0.0
        of_tensors = iter(layouts)
        of_inputs = [next(of_tensors) if one else None for one in is_tensor]
        return CallKind(tuple(key), of_inputs, state if is_in_region else None)

    def learned(self, kind: CallKind) -> Learned | None:
        """Returns what is known of calls of a kind; None if that is nothing, so that the next call has to show it."""
        _, known = self._learned.get(kind.key, (kind, None))
        if isinstance(known, _Failure):
            known.left -= 1
            return known.reason if known.left >= 0 else None
        return known

    def learn_function(self, kind: CallKind, call: "GraphCall", ended: EndedCall, packed_bytes: int) -> str:
        """Learns from a recorded call of the function that the graph was captured from. As `learn`."""

        def learn() -> Learned:
            program = _known_program(kind, call, ended, values_read=0).program
            match self.learned(kind):
                case KnownSegment() as segment:
                    if not _is_same(segment, program):
                        raise Refusal(OTHER_OPS)
                    return segment
                case FirstProgram(before):
                    if not is_same_program(before, program):
                        raise Refusal("its ops change from call to call")
                    return program
            return FirstProgram(program)

        return self.note(kind, learn)

    def learn(
        self, kind: CallKind, call: "GraphCall", expected: Program | None, ended: EndedCall, packed_bytes: int
    ) -> str:
        """Learns from a recorded call of the graph. Returns why later ones have to be recorded too; empty if not.

        Args:
            kind: The kind that the call has.
            call: The call of the graph.
            expected: The program that the function has run; None if the user has compiled it, which is then the truth.
            ended: The call, whose segment was kept.
            packed_bytes: Bytes that autograd saved and that are not kept.

        Raises:
            OtherOpsError: The graph has run another program than expected.
        """

        def segment() -> KnownSegment:
            made = _known_segment(kind, call, ended, packed_bytes)
            if not self.wrappers or ended.grafted is None:
                return made
            graph_uses, outputs, *_ = ended.grafted
            sources = graph_uses.tensors[: len(made.known.inputs)]
            return replace(made, structure=structure_of(outputs, sources))

        reason = self.note(kind, segment)
        learned = self.learned(kind)
        if expected is not None and not (isinstance(learned, KnownSegment) and _is_same(learned, expected)):
            if not reason:
                self._learned[kind.key] = kind, OTHER_OPS
            raise OtherOpsError
        return reason

    def note(self, kind: CallKind, learn: Callable[[], Learned]) -> str:
        """Notes what `learn` returns of a kind. Returns why later calls have to be recorded, as `learn` does.

        An unexpected error holds for one call, then for two, for four and so on: it may have been one of memory.
        """
        if len(self._learned) >= MAX_KINDS and kind.key not in self._learned:
            return f"its inputs or settings have changed {MAX_KINDS} times"
        try:
            self._learned[kind.key] = kind, learn()
        except Exception as error:  # no variable may refer to it: its traceback refers to the variables
            refusal, failure = Refusal.of(error), None
            if refusal.cause is not None:
                _, before = self._learned.get(kind.key, (kind, None))
                pause = 2 * before.pause if isinstance(before, _Failure) else 1
                failure = _Failure(refusal.reason, pause, pause)
            self._learned[kind.key] = kind, failure or refusal.reason
            return refusal.reason
        return ""


class GraphCall(CapturedInputs):
    """A call of a captured graph with these inputs. It is called with those of them that are arguments.

    Args:
        graph: The graph that the call runs.
        given: The inputs of the graph, in their order.

    Attributes:
        inputs: The inputs of the graph, but of each wrapper only what it is without its tensors. These tensors follow
            at the end, so a worker never gets a wrapper.
    """

    def __init__(self, graph: CapturedGraph, given: Sequence[Any]) -> None:
        self.graph, self._given = graph, given
        self.inputs = inputs = list(given)
        self.arguments = [inputs[position] for position in graph.arguments]
        for position in graph.wrappers:
            if (parts := taken_apart(inputs[position])) is not None:
                inputs[position] = parts[0]
                inputs += parts[1]
                self.arguments += parts[1] if position in graph.arguments else []
        captured = next((id(v) for i, v in enumerate(inputs) if isinstance(v, Tensor) and i not in graph.arguments), 0)
        self.site = id(graph), captured
        self.__qualname__ = graph.name

    def __call__(self, *arguments: Any) -> Any:
        """Runs the graph."""
        return self.graph.run(self._given)

    def run(self, segment: KnownSegment) -> Any:
        """Runs the graph as calls of the segment's kind run it."""
        return self() if segment.compiled is None else segment.compiled(*self.inputs)


def tensors_of(values: Sequence[Any]) -> list[Tensor]:
    """Returns the tensors among values."""
    return [value for value in values if isinstance(value, Tensor)]


def undoing_writes(inputs: Sequence[Any]) -> Callable[[], None]:
    """Returns a function that gives the inputs of a graph the contents again that they have now."""
    tensors = tensors_of(inputs)
    with DisableTorchDispatch():
        copies = [copy_exact(tensor.detach(), layout_of(tensor)) for tensor in tensors]

    def undo() -> None:
        with DisableTorchDispatch():
            for tensor, copy in zip(tensors, copies, strict=True):
                layout = layout_of(tensor)
                if content_digest(tensor.detach(), layout) != content_digest(copy, layout):
                    tensor.data.copy_(copy)  # without a new version: the call is about to write as well

    return undo


def _known_program(kind: CallKind, call: GraphCall, ended: EndedCall, values_read: int) -> KnownProgram:
    if ended.grafted is None:
        raise Refusal("the graph of its inside stays on the trainer")
    if ended.recorder.has_new_hooks:
        raise Refusal("it registers a hook")
    if kind.region is not None:
        check_casts(ended.grafted[2], kind.region)
    tensors = [None if layout is None else value for value, layout in zip(call.inputs, kind.layouts, strict=True)]
    return known_program(ended.recorder, ended.grafted[2], tensors, tensors_of(call.arguments), values_read)


def _known_segment(kind: CallKind, call: GraphCall, ended: EndedCall, packed_bytes: int) -> KnownSegment:
    known = _known_program(kind, call, ended, call.graph.values_read)
    assert ended.grafted is not None
    graph_uses, outputs, _, uses = ended.grafted
    returned = [id(value) for value in ended.returned[0]]
    first_sequence = ended.recorder.call.known.first_sequence
    return KnownSegment(
        known,
        EncodedProgram.of(known.program),
        kind,
        tuple(returned.index(id(output)) for output in outputs),
        pattern_of(ended.returned[0], call.inputs),
        KnownUses.of_recorded(known.program, uses, graph_uses, outputs, first_sequence),
        packed_bytes,
    )


def _is_same(segment: KnownSegment, expected: Program) -> bool:
    """Whether a graph runs the program of its function. It may return the same tensors in another order."""
    given = segment.known.program
    if {*given.outputs} != {*expected.outputs}:
        return False
    return is_same_program(replace(given, outputs=()), replace(expected, outputs=()))


def pattern_of(returned: Sequence[Any], inputs: Sequence[Any]) -> tuple[int, ...]:
    """Returns for each returned value the first position at which it is returned; below 0 for one of the inputs."""
    first = dict(zip(map(id, inputs), range(-len(inputs), 0), strict=True))
    return tuple([first.setdefault(id(v), i) if isinstance(v, Tensor) else i for i, v in enumerate(returned)])

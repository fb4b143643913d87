"""Where the graph of a known call uses its sources, and the casts of them that autocast shares with other code.

NOTE [Known uses]
1. Calls of one kind run the same ops, so their graphs have the same nodes in the same order, but for casts: whether a
   weight is cast in the call, or was cast before it, depends on other code in the same autocast region.
2. When a call ends, autocast's cache holds each weight that the call has cast, unless the call was in no region: then
   the cache was empty before. The sequence number of a cast's node tells whether the call has made it.
3. Calls that agree in this, and in the number of their nodes, have the same graph. The first one of a kind that
   differs is looked through as a recorded call is. That also shows whether its uses are those that the worker knows.
4. What the cache holds must be what ops would cast now. `CastWatch` tells where it is not. If a call turns autocast on
   inside a region with other settings, or empties the cache, it is recorded.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from backhaul._backward.frame import Uses
from backhaul._forward.graft_plan import GraftStage, graft_plan
from backhaul._forward.graph_cut import GraphUses, uses_of_known
from backhaul_runtime.errors import Refusal
from backhaul_runtime.program.program import Program
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.torch_internals.autocast_cache import cached_casts
from backhaul_runtime.torch_internals.private import sequence_number, sequence_of

MAX_GRAPHS = 64
"""The most graphs that are kept of a kind of calls. More than a few need weights that other code casts now and then."""

OTHER_CASTS = "autocast has cast other weights for it than in the recorded call of the same kind"


class UsesInGraph(NamedTuple):
    """What a graft needs to know of a graph.

    Attributes:
        plan: The grafts, with the sequence numbers of one call.
        output_sequence: The sequence number of the node of the first output in that call.
    """

    plan: Sequence[GraftStage]
    output_sequence: int


def check_casts(program: Program, region: ambient_state.State) -> None:
    """Raises Refusal for a program of a call in an autocast region for which Rule 4 does not hold.

    Args:
        program: The program of the call.
        region: The ambient state in which the call began.
    """
    if not all(ambient_state.casts_alike(state, region) for state in program.ambient_states):
        raise Refusal("it turns autocast on inside a region with other settings")
    if any(node.fresh_casts for node in program.nodes):
        raise Refusal("autocast's cache was emptied inside it")


@dataclass(frozen=True, slots=True, eq=False)
class KnownUses:
    """The uses in each graph that calls of a kind have had. Threads may share it.

    Attributes:
        program: The program that the calls run.
        of_frame: What a frame needs to know of the uses; the same for all of these graphs.
        watched: The sources of which autocast's cache has held a cast when a call ended; None if no op is cast.
    """

    program: Program
    of_frame: Uses
    watched: tuple[int, ...] | None
    _graphs: dict[Hashable, UsesInGraph] = field(default_factory=dict, init=False)

    @classmethod
    def of_recorded(
        cls,
        program: Program,
        of_frame: Uses,
        graph_uses: GraphUses,
        outputs: Sequence[Tensor],
        first_sequence: int,
    ) -> "KnownUses":
        """Returns what the recorded call shows. Call it while the caller is where that call ended.

        Args:
            program: The program of the call.
            of_frame: What its frame knows of the uses.
            graph_uses: The uses that were found in its graph.
            outputs: The outputs of the program, before the graft.
            first_sequence: The number of the first autograd node that the call could make.

        Raises:
            Refusal: The cache holds a cast without a history.
        """
        if not any(map(ambient_state.is_autocast, program.ambient_states)):
            return cls.of_only_graph(program, of_frame, graph_uses, outputs)
        graph = _planned(graph_uses, outputs, is_cast=True)
        sources = graph_uses.tensors[: len(program.sources)]
        watched = tuple(index for index, cast in enumerate(cached_casts(sources)) if cast is not None)
        known = cls(program, of_frame, watched)
        pattern, _ = known._pattern(sources, graph.output_sequence, first_sequence)
        known._graphs[pattern] = graph
        return known

    @classmethod
    def of_only_graph(
        cls, program: Program, of_frame: Uses, graph_uses: GraphUses, outputs: Sequence[Tensor]
    ) -> "KnownUses":
        """Returns what a call shows that shares no casts with other code, with arguments as `of_recorded`."""
        known = cls(program, of_frame, None)
        known._graphs[()] = _planned(graph_uses, outputs, is_cast=False)
        return known

    def of_call(
        self, outputs: Sequence[Tensor], sources: Sequence[Tensor], first_sequence: int
    ) -> tuple[UsesInGraph, list[Tensor]]:
        """Returns the uses in the graph of a call that has ended, and the casts that it shares with other code.

        Args:
            outputs: The outputs of the program.
            sources: The caller's object behind each source.
            first_sequence: The number of the first autograd node that the call could make.

        Raises:
            Refusal: The uses are others than those of the recorded call.
        """
        if self.watched is None:
            return self._graphs[()], []
        pattern, casts = self._pattern(sources, sequence_of(outputs[0]), first_sequence)
        if (graph := self._graphs.get(pattern)) is None:
            with torch.enable_grad():
                edges = [get_gradient_edge(source) if source.requires_grad else None for source in sources]
            graph_uses = uses_of_known(outputs, sources, edges, first_sequence)
            is_staged = len(graph_uses.stages) > 1
            is_same = (graph_uses.casts, is_staged) == (self.program.casts, self.of_frame.is_staged)
            if not is_same or [*map(len, graph_uses.uses)] != [*self.of_frame.counts]:
                raise Refusal(OTHER_CASTS)
            graph = _planned(graph_uses, outputs, is_cast=True)
            if len(self._graphs) < MAX_GRAPHS:
                self._graphs[pattern] = graph
        return graph, casts

    def _pattern(
        self, sources: Sequence[Tensor], output_sequence: int, first_sequence: int
    ) -> tuple[Hashable, list[Tensor]]:
        """Returns what tells graphs apart (Rule 3), and the casts of `Program.casts`, of which none may be missing."""
        assert self.watched is not None
        casts = dict(zip(self.watched, cached_casts([sources[index] for index in self.watched]), strict=True))
        shared = [cast for index in self.program.casts if (cast := casts.get(index)) is not None]
        layouts = self.of_frame.layouts[len(self.program.sources) :]
        # Without a history, as after a use under no_grad, a cast hides that its weight takes gradients.
        if (
            len(shared) < len(self.program.casts)
            or any(cast is not None and cast.grad_fn is None for cast in casts.values())
            or any(cast.dtype is not layout.dtype for cast, layout in zip(shared, layouts, strict=False))
        ):
            raise Refusal(OTHER_CASTS)
        nodes = [None if cast is None else cast.grad_fn for cast in casts.values()]
        made = [None if node is None else sequence_number(node) >= first_sequence for node in nodes]
        return (output_sequence - first_sequence, tuple(made)), shared


def _planned(graph_uses: GraphUses, outputs: Sequence[Tensor], *, is_cast: bool) -> UsesInGraph:
    # The order of contributions to an input may be visible in a later call that is not visible in this one.
    in_order = is_cast or len([used for used in graph_uses.uses if used]) > 1
    return UsesInGraph(
        graft_plan(graph_uses.tensors, graph_uses.uses, graph_uses.stages, in_order=in_order),
        sequence_of(outputs[0]),
    )

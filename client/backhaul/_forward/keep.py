"""Decides where a call that has ended is recomputed, and keeps what its backward needs instead of activations."""

import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

import backhaul_runtime
from backhaul._backward.checkpointed_call import CheckpointedCall
from backhaul._backward.frame import Frame, RecordedSegment, Uses
from backhaul._backward.handles import HandleTable, awaited
from backhaul._backward.lineage import Lineage, Recipe
from backhaul._backward.local_recompute import ReplayOptions
from backhaul._backward.recipes import mark_given, mark_returned, recipe_of
from backhaul._backward.remote_side import RemoteSegment
from backhaul._dispatch.dispatcher import Dispatcher
from backhaul._dispatch.prediction import PendingCall
from backhaul._evidence.evidence import CallEvidence
from backhaul._forward.graft import graft, origin_of
from backhaul._forward.graft_plan import graft_plan
from backhaul._forward.graph_cut import GraphUses, find_graph_uses, named
from backhaul._forward.reference_counts import has_other_references
from backhaul._forward.saved_tensor_hooks import SavedTensorHooks
from backhaul._torch_api.selective import Selection
from backhaul_runtime.errors import NotRemoteError, Refusal
from backhaul_runtime.program.program import Program
from backhaul_runtime.record.recorder import Recorder
from backhaul_runtime.record.recording import RecordedSource
from backhaul_runtime.tensors.durations import Duration
from backhaul_runtime.tensors.layout import Layout, layout_of, unsupported_reason
from backhaul_runtime.torch_internals.ambient_state import is_autocast
from backhaul_runtime.torch_internals.private import (
    container_node,
    pytree,
    version_of,
)


class Graft(NamedTuple):
    """A graft replaces the graph of the segment's inside, and backward requests gradients."""

    uses: GraphUses


class KeepInside(NamedTuple):
    """The graph of the segment's inside stays, and backward requests activations."""

    reason: str


class Local(NamedTuple):
    """The graph of the segment's inside stays, and no worker gets the segment.

    Attributes:
        reason: Why no worker gets the segment.
        keeps_activations: Whether the trainer keeps activations that no program can express.
    """

    reason: str
    keeps_activations: bool


@dataclass(frozen=True, slots=True, eq=False)
class BegunCall:
    """A call that is about to run.

    Attributes:
        call: The call, with its recording.
        arguments: The tensors among its arguments.
        recorder: The recorder of the call.
        pack: The hook for what autograd saves in the call.
        table: Makes the handles of the call's saved tensors.
        context: The context to run the function in.
        replay_options: The options for a recomputation on the trainer.
        selection: The selective-checkpoint policy of the call; None if it has none.
        pending: The object that `Dispatcher.begin` returned for the call; None if `begin` failed.
    """

    call: CheckpointedCall
    arguments: list[Tensor]
    recorder: Recorder
    pack: SavedTensorHooks
    table: HandleTable
    context: AbstractContextManager[Any]
    replay_options: ReplayOptions
    selection: Selection | None
    pending: PendingCall | None


class EndedCall:
    """A call that has ended, before it is decided what is kept of it.

    Args:
        dispatcher: Gives the segment to a worker.
        begun: The call as it began.
        returned: A list with the return value of the call as its only item.
        forward: What the call took.

    Attributes:
        call: The call, with its recording.
        handles: The handles of the call's saved tensors.
        grafted: The uses, outputs and program of a call whose graph was replaced, and what the frame knows of the uses;
            None for any other.
    """

    def __init__(self, dispatcher: Dispatcher, begun: BegunCall, returned: list[Any], forward: Duration) -> None:
        self.dispatcher, self.returned, self.forward = dispatcher, returned, forward
        self.recorder, self.pending, self.handles = begun.recorder, begun.pending, begun.table.handles
        self.call = begun.call
        if begun.pack.has_kept_region:
            self.call = replace(begun.call, inside_reason="regions of it keep their activations")
        self.grafted: tuple[GraphUses, list[Tensor], Program, Uses] | None = None
        self._begun = begun

    def frame(self, **decided: Any) -> Frame:
        """Returns the frame of the call, from what was decided of it."""
        begun = self._begun
        return Frame(
            self.call,
            self.handles,
            replay_options=replace(begun.replay_options, trace=self.recorder.trace),
            arguments=versions_of(begun.arguments),
            is_mutated=begun.selection is not None and begun.selection.is_mutated,
            **decided,
        )


def versions_of(arguments: Sequence[Tensor]) -> list[tuple[weakref.ref[Tensor], int]]:
    """Returns the arguments of a call that must not change before backward, with their versions."""
    return [(weakref.ref(one), version_of(one)) for one in arguments if not _is_copied(one)]


def _is_copied(argument: Tensor) -> bool:
    """Whether backward takes an argument's value from a copy, so that the caller may write to it, as into a cache.

    A write to an argument that takes a gradient is an error in torch, whatever backward would compute.
    """
    return not argument.requires_grad and unsupported_reason(argument) is None


def decide(
    recorder: Recorder,
    call: CheckpointedCall,
    edges: Sequence[GradientEdge | None],
    outputs: list[Tensor],
    tensors: list[Tensor],
    *,
    is_referenced: bool,
) -> Graft | KeepInside | Local:
    """Decides where a segment is recomputed and what stays of its graph. A pure function.

    Args:
        recorder: The recorder of the call, which has ended.
        call: The call that was recorded.
        edges: The graph edge of each source; None for a source without gradient.
        outputs: The tensors that the call created and returned and that require gradients.
        tensors: All tensors that the call returned.
        is_referenced: Whether something besides the return value refers to an output.
    """
    if call.recording.refusal is not None:
        return Local(named(call.recording.refusal, outputs, recorder.call.known.first_sequence), keeps_activations=True)
    if call.local_reason:
        return Local(call.local_reason, keeps_activations=False)
    if call.inside_reason:
        return KeepInside(call.inside_reason)
    changeable = recorder.custom.arguments.changeable
    if changeable:  # the graph's own node sees such a change, a worker's would not
        return KeepInside(f"a custom function takes a {changeable}, which may change before backward")
    try:
        return Graft(find_graph_uses(recorder, edges, outputs, tensors, is_referenced=is_referenced))
    except Refusal as refusal:
        return KeepInside(refusal.reason)


def keep(ended: EndedCall) -> tuple[Frame, Any]:
    """Decides where the segment will be recomputed, and builds its frame.

    After an unexpected error, the trainer recomputes the segment.

    Returns:
        The frame, and the value for the caller, whose outputs lead to the frame.

    Raises:
        NotRemoteError: Under `strict`, if the trainer would have to recompute the segment.
    """
    try:
        return _keep(ended)
    except NotRemoteError:
        raise
    except Exception as error:  # no variable may refer to it: its traceback refers to the variables
        return _kept_here(ended, Refusal.of(error)), ended.returned[0]


def _kept_here(ended: EndedCall, refusal: Refusal) -> Frame:
    call = ended.call
    call.check_strict(refusal.reason, refusal.cause)
    call.log.fallback(refusal.reason)
    evidence_of(ended.dispatcher, call, None, refusal.reason)
    ended.grafted = None
    lineage = lineage_of(ended.dispatcher, call, ended.recorder.call.builder.program())
    return ended.frame(program=lineage.program, lineage=lineage, local_reason=refusal.reason)


def lineage_of(dispatcher: Dispatcher, call: CheckpointedCall, program: Program) -> Lineage:
    """Returns the lineage of a call that ends now, without recipes."""
    return Lineage(
        call.name,
        dispatcher.journal.session,
        _call_site(),
        program,
        call.recording,
        dispatcher.copies,
        call.options.durability,
    )


def _keep(ended: EndedCall) -> tuple[Frame, Any]:
    """Does what `keep` says, and lets unexpected errors pass."""
    call, recorder, returned = ended.call, ended.recorder, ended.returned

    def is_output(tensor: Tensor) -> bool:  # what only passes through keeps the history that it has
        return tensor.requires_grad and not recorder.call.known.passes_through(tensor)

    is_referenced = has_other_references(returned, is_output)  # first, while no other variable refers to an output
    tensors = list({id(leaf): leaf for leaf in pytree.tree_leaves(returned[0]) if isinstance(leaf, Tensor)}.values())
    outputs = [tensor for tensor in tensors if is_output(tensor)]
    sources, edges = recorder.call.memory.sources.tensors, recorder.call.memory.sources.edges()
    decision = decide(recorder, call, edges, outputs, tensors, is_referenced=is_referenced)
    if isinstance(decision, Graft):
        # One node replaces the graph of the inside, and its backward starts from the outputs: the program returns them.
        graph_uses = decision.uses
        program = recorder.finish(outputs, graph_uses.casts)
        made = (*graph_uses.tensors[len(call.recording.sources) :], *outputs)
        layouts = [*[source.layout for source in call.recording.sources], *map(layout_of, made)]
        uses = Uses([len(of_one) for of_one in graph_uses.uses], layouts, len(graph_uses.stages) > 1)
        ended.grafted = graph_uses, outputs, program, uses
    else:
        # Backward asks for what autograd saved, so the program may end with the last op that saved something.
        uses = Uses()
        program = recorder.finish(early_stop=call.options.early_stop)
        if isinstance(decision, Local) and decision.keeps_activations:
            call.check_strict(decision.reason, call.recording.failure)
            call.log.kept(decision.reason)
        # Backward can ask for nothing: all that autograd saved is kept by the caller, or has died with its graph.
        if not (program.saved_count and awaited(ended.handles)):
            return _kept_whole(ended, decision), returned[0]
        del edges[len(call.recording.sources) :]  # drops what was recorded after the refusal
    histories = _histories_of(call.recording.sources, edges)
    predecessors = predecessors_of(histories, uses) if isinstance(decision, Graft) else []
    remote, local_reason = None, _local_reason(decision)
    if not local_reason:  # else the program may be only the part before a refusal
        assert ended.pending is not None
        need_bytes = bytes_needed(program, [source.layout for source in call.recording.sources])
        segment = RecordedSegment(call, program, need_bytes, sources, uses, predecessors)
        remote, program, local_reason = offer(ended.dispatcher, segment, ended.pending, ended.forward)
    if remote is not None:
        call.log.taken(decision.reason if isinstance(decision, KeepInside) else "")
    lineage = lineage_of(ended.dispatcher, call, program)
    note_sources(lineage, call, sources, histories, is_remote=remote is not None)
    frame = ended.frame(
        program=program,
        lineage=lineage,
        uses=uses,
        remote=remote,
        local_reason=local_reason,
        evidence=evidence_of(ended.dispatcher, call, program, _local_reason(decision), uses),
    )
    if not isinstance(decision, Graft):
        whole = None if call.recording.refusal is not None else recorder.whole(program, outputs)
        if whole is not None:  # a later segment that was lost can then have its source computed again from here
            lineage.program = whole
            mark_returned(lineage, outputs)
        value = returned[0]
    else:
        casts = any(map(is_autocast, program.ambient_states))
        plan = graft_plan(graph_uses.tensors, graph_uses.uses, graph_uses.stages, in_order=casts)
        grafted = graft(frame, outputs, graph_uses.tensors, plan)
        note_grafted(frame, grafted, sources, predecessors)
        value = _replaced(returned[0], dict(zip(map(id, outputs), grafted, strict=True)))
    if remote is not None:  # last, because after an error the trainer recomputes from the copies that this drops
        lineage.release()
    return frame, value


def _kept_whole(ended: EndedCall, decision: Graft | KeepInside | Local) -> Frame:
    """Returns the frame of a call of which nothing can have to be recomputed."""
    if isinstance(decision, Local):
        evidence_of(ended.dispatcher, ended.call, None, decision.reason)
    return ended.frame(local_reason=_local_reason(decision))


def evidence_of(
    dispatcher: Dispatcher,
    call: CheckpointedCall,
    program: Program | None,
    why_missing: str = "",
    uses: Uses = Uses(),  # noqa: B008  it is frozen
) -> CallEvidence | None:
    """Records a call that has ended and still has all its sources, if its step is recorded. See `Evidence.call`."""
    if dispatcher.evidence is None:
        return None
    of_graft = list(zip(uses.counts, uses.layouts, strict=True))  # a graft has an output at least
    return dispatcher.evidence.call(call.name, call.recording, program, why_missing, of_graft or None)


def bytes_needed(program: Program, sources: Sequence[Layout]) -> int:
    """Returns the bytes that a worker needs for a segment whose sources have these layouts."""
    stored = sum(layout.span_bytes for layout in sources)
    return stored + program.execution_bytes([layout.gradient_bytes for layout in sources])


Predecessors = Sequence[tuple[int, Frame, int]]

Histories = Sequence[tuple[int, GradientEdge]]
"""The sources that take gradients and of which a segment has copies, by index, with their graph edges."""


def _histories_of(sources: Sequence[RecordedSource], edges: Sequence[GradientEdge | None]) -> Histories:
    both = enumerate(zip(sources, edges, strict=True))
    return [(index, edge) for index, (source, edge) in both if edge is not None and source.is_copy]


def predecessors_of(histories: Histories, uses: Uses) -> Predecessors:
    """Returns the segments whose outputs are sources of a segment, as in `RecordedSegment`.

    Each stage of a staged segment returns a part of a boundary's gradient, so none of them shows it complete.
    """
    if uses.is_staged:
        return []
    return [
        (index, *before)
        for index, edge in histories
        if (before := origin_of(edge)) is not None  # only a segment's output has an origin
    ]


def note_sources(
    lineage: Lineage,
    call: CheckpointedCall,
    sources: Sequence[Tensor],
    histories: Histories,
    *,
    is_remote: bool,
) -> None:
    """Notes where the sources of a segment come from, and marks their nodes.

    Args:
        lineage: The lineage of the segment.
        call: The call of the segment.
        sources: The caller's object behind each source.
        histories: Those of them that have one.
        is_remote: Whether a worker has the segment: only then may a recipe of a source stand for a copy of it.
    """
    unchanged = [(index, edge) for index, edge in histories if not call.recording.sources[index].is_written]
    if is_remote:
        lineage.find_recipes(unchanged, partial(_recipe, call, sources))
    mark_given(lineage, sources, unchanged)


def note_grafted(
    frame: Frame, grafted: Sequence[Tensor], sources: Sequence[Tensor], predecessors: Predecessors
) -> None:
    """Notes the outputs that a graft returns, and watches the boundaries that the segment has used."""
    assert frame.lineage is not None
    mark_returned(frame.lineage, grafted)
    frame.consumers.watch((source, sources[source]) for source, *_ in predecessors)


def offer(
    dispatcher: Dispatcher, segment: RecordedSegment, pending: PendingCall, forward: Duration | None
) -> tuple[RemoteSegment | None, Program, str]:
    """Offers a segment to a worker. Returns its remote side, its program, and why no worker takes it, if none does."""
    try:
        return *dispatcher.save(segment, pending, forward), ""
    except Exception as error:  # no variable may refer to it: its traceback refers to the variables
        return None, segment.program, _not_taken(segment.call, Refusal.of(error))


def _not_taken(call: CheckpointedCall, refusal: Refusal) -> str:
    call.check_strict(refusal.reason, refusal.cause)
    note = call.log.on_trainer if refusal.is_chosen else call.log.fallback
    note(refusal.reason, is_said=refusal.is_said)
    return refusal.reason


def _local_reason(decision: Graft | KeepInside | Local) -> str:
    return decision.reason if isinstance(decision, Local) else ""


def _recipe(call: CheckpointedCall, sources: Sequence[Tensor], index: int, edge: GradientEdge) -> Recipe | None:
    """Returns how a source follows from earlier segments; None if autograd's graph does not show it."""
    return recipe_of(sources[index], call.recording.sources[index], edge)


def _call_site() -> str:
    """Returns the file and line of the innermost code that is neither ours nor torch's."""
    at = sys._getframe()
    while at.f_back is not None and _is_internal(at.f_code.co_filename):
        at = at.f_back
    return f"{at.f_code.co_filename}:{at.f_lineno}"


@lru_cache(maxsize=1024)
def _is_internal(file: str) -> bool:
    return file.startswith(_INTERNAL)


_FOLDERS = Path(torch.__file__).parent, Path(__file__).parents[1], Path(backhaul_runtime.__file__).parent
_INTERNAL = (*(str(folder) + os.sep for folder in _FOLDERS), "<eval_with_key>")  # the name of captured graphs


def _replaced(value: Any, grafted: Mapping[int, Tensor]) -> Any:
    """Replaces tensors in a return value. Containers without such tensors stay the same objects."""
    if pytree.tree_is_leaf(value):
        return grafted.get(id(value), value)
    node = container_node(value)
    children, context = node.flatten_fn(value)
    replaced = [_replaced(child, grafted) for child in children]
    if all(new is old for new, old in zip(replaced, children, strict=True)):
        return value
    return node.unflatten_fn(replaced, context)

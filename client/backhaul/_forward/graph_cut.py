"""Decides whether a graft can replace the graph of a checkpointed call, and finds what receives its gradients."""

import gc
from collections import Counter
from collections.abc import Sequence, Set
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge

from backhaul._forward.reference_counts import unreferenced_leaves
from backhaul_runtime.errors import Refusal
from backhaul_runtime.program.program import FLEX_ATTENTION, ResultRef
from backhaul_runtime.record.recorder import Recorder
from backhaul_runtime.record.saved_tensors import FUNCTION_SAVES
from backhaul_runtime.torch_internals.autocast_cache import cached_casts
from backhaul_runtime.torch_internals.graph_uses import (
    BackwardStage,
    Target,
    Use,
    custom_function,
    find_casts,
    find_stages,
    find_uses,
)
from backhaul_runtime.torch_internals.storages import storage_key


class GraphUses(NamedTuple):
    """What receives gradients from a segment.

    Attributes:
        tensors: The caller's object behind each source, then the casts of sources that autocast shares with other code.
        casts: The indices of the sources of these casts.
        uses: For each of the tensors, then for each output, the places where the call used it; see `find_uses`.
        stages: The stages of backward, see `find_stages`.
    """

    tensors: list[Tensor]
    casts: tuple[int, ...]
    uses: list[list[Use]]
    stages: list[BackwardStage]


def find_graph_uses(
    recorder: Recorder,
    edges: Sequence[GradientEdge | None],
    outputs: list[Tensor],
    tensors: list[Tensor],
    *,
    is_referenced: bool,
) -> GraphUses:
    """Finds what receives gradients from a segment. Raises Refusal if the graph of the segment's inside must stay.

    Args:
        recorder: The recorder of the call, which has ended.
        edges: Where gradients of its sources arrive; None for a source that takes none.
        outputs: The tensors that the call created and returned and that require gradients.
        tensors: All tensors that the call returned.
        is_referenced: Whether something besides the return value refers to an output.
    """
    call = recorder.call
    if reason := why_not_cut(recorder, outputs):
        raise Refusal(reason)
    if not call.recording.saved:  # a replay would spare no memory, but cost time
        raise Refusal("autograd saves nothing in it")
    used = _used(
        outputs,
        call.memory.sources.tensors,
        edges,
        call.known.first_sequence,
        call.known.function_nodes,
        used_autocast=call.states.used_autocast,
    )
    if any(output.grad_fn is None for output in outputs):  # a leaf, whose gradient belongs into its own .grad
        raise Refusal("it returns a tensor whose requires_grad it turned on")
    if not any(used.uses[: len(used.taking)]):  # the outputs of a graft without inputs would take none
        raise Refusal("no gradient leaves it through what it returns")
    if call.memory.sources.rewrites_autograd():  # a source then leads into the inside, which a graft removes
        raise Refusal("it changes what tensors from outside depend on")
    # A later write to one of them changes the history of the other, and the grafted output has lost that relation.
    if share_storage(recorder, outputs, tensors):
        raise Refusal("an output shares memory with an input, a captured tensor or another output")
    # Whoever holds the tensor may run backward through the graph of the inside, which grafting would have removed.
    unreferenced = unreferenced_leaves(outputs, call.known.first_sequence) if call.builder.made_leaves else []
    has_outlived = is_referenced or recorder.custom.outlived([*outputs, *unreferenced])
    # torch compiles around flex_attention at each recorded call, and leaves objects in cycles that refer to its inputs.
    if has_outlived and not is_referenced and any(node.op == FLEX_ATTENTION for node in recorder.call.builder.nodes):
        gc.collect()
        has_outlived = recorder.custom.outlived([*outputs, *unreferenced])
    if has_outlived:
        raise Refusal(
            "a tensor made inside is held elsewhere when it returns, as by a key-value cache (use_cache=True)"
        )
    return used.in_stages(outputs)


def uses_of_known(
    outputs: Sequence[Tensor],
    sources: Sequence[Tensor],
    edges: Sequence[GradientEdge | None],
    first_sequence: int,
) -> GraphUses:
    """Returns what receives gradients from a call of a known program that ran under autocast, as `find_graph_uses`.

    Args:
        outputs: The outputs of the program.
        sources: The caller's object behind each source.
        edges: Where gradients of the sources arrive.
        first_sequence: The number of the first autograd node that the call could make.
    """
    return _used(outputs, sources, edges, first_sequence, frozenset(), used_autocast=True).in_stages(outputs)


class _Used(NamedTuple):
    """As `GraphUses`, with the targets of sources and casts in the place of the stages."""

    taking: list[Tensor]
    casts: list[int]
    uses: list[list[Use]]
    targets: dict[Target, int]

    def in_stages(self, outputs: Sequence[Tensor]) -> GraphUses:
        stages = find_stages(outputs, self.targets, self.uses)
        return GraphUses(self.taking, tuple(self.casts), self.uses, stages)


def _used(
    outputs: Sequence[Tensor],
    sources: Sequence[Tensor],
    edges: Sequence[GradientEdge | None],
    first_sequence: int,
    function_nodes: Set[type],
    *,
    used_autocast: bool,
) -> _Used:
    targets = {(edge.node, edge.output_nr): i for i, edge in enumerate(edges) if edge is not None}
    taking, casts = list(sources), list[int]()
    # Autocast may share one cast of a weight with segments outside. Gradients have to arrive at this cast, because
    # autograd adds them up in its dtype and converts the sum once.
    if used_autocast:
        made = find_casts(outputs, targets, first_sequence)
        cached = cached_casts([taking[source] for source in made])
        for (source, edges_of_cast), cast in zip(made.items(), cached, strict=True):
            if cast is not None and cast.grad_fn is not None and (cast.grad_fn, cast.output_nr) in edges_of_cast:
                targets[cast.grad_fn, cast.output_nr] = len(taking)
                taking.append(cast)
                casts.append(source)
    uses = find_uses(outputs, targets, first_sequence, len(taking), function_nodes)
    return _Used(taking, casts, uses, targets)


def why_not_cut(recorder: Recorder, outputs: Sequence[Tensor]) -> str:
    """Returns why the call's graph cannot be replaced by a node with these outputs; empty if it can."""
    if recorder.recording.refusal is not None:
        return recorder.recording.refusal
    if recorder.has_new_hooks:
        return "a hook was registered inside the function"
    if not all(isinstance(recorder.call.known.ref_of(output), ResultRef) for output in outputs):
        return "no recorded op returned one of its outputs"
    if recorder.call.memory.interior.has_unwritten(outputs):
        return "an output lies in memory that no op wrote (NumPy, or a custom kernel)"
    return ""


def share_storage(recorder: Recorder, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> bool:
    """Whether any of `outputs` lies in the storage of a source or of another of `tensors`, which include them."""
    counts = Counter(storage_key(tensor) for tensor in tensors)
    keys = [storage_key(output) for output in outputs]
    return any(counts[key] > 1 or recorder.call.memory.sources.at(key) for key in keys)


def named(refusal: str, outputs: list[Tensor], first_sequence: int) -> str:
    """Adds the name of the custom function to a refusal about one, if the graph has it."""
    name = custom_function(outputs, first_sequence) if refusal is FUNCTION_SAVES else ""
    return f"the custom autograd function {name}" if name else refusal

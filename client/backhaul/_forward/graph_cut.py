"""Where the graph of a checkpointed call can be cut off: what takes gradients from it, or why its inside stays."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge

from backhaul_runtime.errors import Refusal
from backhaul_runtime.record.recorder import FUNCTION_SAVES, Recorder
from backhaul_runtime.torch_internals.autocast_cache import cached_casts
from backhaul_runtime.torch_internals.graph_uses import (
    BackwardStage,
    Use,
    custom_function,
    find_casts,
    find_stages,
    find_uses,
)


class GraphUses(NamedTuple):
    """What takes gradients from a segment.

    Attributes:
        tensors: The caller's object behind each source, then the casts of sources that autocast shares.
        casts: The sources that these are of.
        uses: For each of the tensors, then for each output, where the call used it; see `find_uses`.
        stages: As `find_stages` gives them.
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
    is_held: bool,
) -> GraphUses:
    """Finds what takes gradients from a segment. Raises Refusal where the graph of its inside has to stay.

    Args:
        recorder: Recorded the call, which has ended.
        edges: Where gradients of its sources arrive; None for a source that takes none.
        outputs: What it returned and made, where that requires a gradient.
        tensors: All that it returned.
        is_held: Whether something besides the return value refers to an output.
    """
    if reason := recorder.why_not_cut(outputs):
        raise Refusal(reason)
    if not recorder.recording.saved:
        raise Refusal("autograd saves nothing in it")
    targets = {(edge.node, edge.output_nr): i for i, edge in enumerate(edges) if edge is not None}
    taking, casts = list(recorder.sources.tensors), list[int]()
    if recorder.used_autocast:
        made = find_casts(outputs, targets, recorder.first_sequence)
        cached = cached_casts([taking[source] for source in made])
        for (source, edges_of_cast), cast in zip(made.items(), cached, strict=True):
            if cast is not None and cast.grad_fn is not None and (cast.grad_fn, cast.output_nr) in edges_of_cast:
                targets[cast.grad_fn, cast.output_nr] = len(taking)
                taking.append(cast)
                casts.append(source)
    uses = find_uses(outputs, targets, recorder.first_sequence, len(taking))
    if not any(uses[: len(taking)]) or any(output.grad_fn is None for output in outputs):
        raise Refusal("no gradient leaves it through what it returns")
    if recorder.sources.rewrites_autograd():
        raise Refusal("it changes what tensors from outside depend on")
    if recorder.shares_storage(outputs, tensors):
        raise Refusal("an output shares memory with an input, a captured tensor or another output")
    if is_held or recorder.outlived(outputs):
        raise Refusal(
            "a tensor made inside is held elsewhere when it returns, as by a key-value cache (use_cache=True)"
        )
    return GraphUses(taking, tuple(casts), uses, find_stages(outputs, targets, uses))


def named(refusal: str, outputs: list[Tensor], first_sequence: int) -> str:
    """A refusal, with the name of the custom function that it is about if the graph has it."""
    name = custom_function(outputs, first_sequence) if refusal is FUNCTION_SAVES else ""
    return f"the custom autograd function {name}" if name else refusal

"""Learns what calls of a captured graph are when Inductor compiles their program. See NOTE [Compiled programs]."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from backhaul._backward.frame import Uses
from backhaul._backward.local_recompute import nesting
from backhaul._dispatch.prediction import EncodedProgram
from backhaul._forward.captured_graph import (
    CallKind,
    GraphCall,
    KnownSegment,
    pattern_of,
    tensors_of,
)
from backhaul._forward.graph_cut import GraphUses, share_storage, why_not_cut
from backhaul._forward.known_uses import KnownUses
from backhaul_runtime.errors import Refusal
from backhaul_runtime.program.op_list import allowed_ops
from backhaul_runtime.program.op_rules import rules, written_tensors
from backhaul_runtime.program.program import Compilation
from backhaul_runtime.record.known_program import KnownProgram, KnownSave, known_program
from backhaul_runtime.record.recorder import Recorder
from backhaul_runtime.record.recording import SavedTensor
from backhaul_runtime.replay.compiled_programs import (
    CompiledFunction,
    compile_program,
    device_of,
    functions,
    undefined_saves_of,
    why_not_compiled,
)
from backhaul_runtime.tensors.layout import layout_of
from backhaul_runtime.torch_internals.composite_ops import is_composed
from backhaul_runtime.torch_internals.generators import generators_in_use, restoring
from backhaul_runtime.torch_internals.graph_uses import find_stages, find_uses
from backhaul_runtime.torch_internals.inductor import facts
from backhaul_runtime.torch_internals.private import DisableTorchFunctionAndModes, OpOverload, next_sequence_number
from backhaul_runtime.torch_internals.storages import storage_key

logger = logging.getLogger("backhaul")

SAVED_BY = "inductor"
"""Stands for an op in what autograd saves of a compiled program."""


def compiled_segment(call: GraphCall, kind: CallKind) -> KnownSegment:
    """Compiles the program of a call that begins now. Returns the segment of its kind.

    Runs the graph once to record its ops, and the compiled program once to see what autograd saves. Both runs leave
    nothing behind: they write to no tensor from outside, and generators are as they were.

    Args:
        call: The call, which has not run yet.
        kind: The kind that the call has.

    Raises:
        Refusal: Calls of this kind keep their activations, for this reason.
    """
    began, graph, inputs = perf_counter(), call.graph, call.inputs
    restore, before = restoring(generators_in_use()), nesting.active
    nesting.active = True
    try:
        with torch.enable_grad():
            recorder = _ReadingRecorder([], allowed_ops(), lambda tensor, *_: tensor.detach())
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor), recorder:
                returned = list(call())
            outputs = _outputs(recorder, returned, inputs)
            known = _known(recorder, outputs, kind, call)
            sources = [inputs[position] for position in known.inputs]
            function = compile_program(known.program, device_of(sources))
            segment = _segment(known, function, recorder, kind, inputs, returned, outputs, sources)
    finally:
        nesting.active = before
        restore()
    logger.info("Inductor has compiled %s in %.1f s.", graph.name, perf_counter() - began)
    return segment


class _ReadingRecorder(Recorder):  # type: ignore[no-untyped-call]
    """A recorder of a run that is repeated. Raises Refusal before an op that would write to memory from outside."""

    def around(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As `Recorder.around`, for an op of the list that writes at most to what this run has made."""
        if any(tensor not in self.call.memory.interior for tensor in written_tensors(rules(op), args, kwargs)):
            raise Refusal(f"{op} writes to memory from outside")
        if rules(op).leaves_traces and str(op) not in allowed_ops() and not is_composed(op):
            raise Refusal(f"{op} is no op of torch's own")
        return super().around(op, args, kwargs)

    def around_function(self, function: type, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Raises Refusal."""
        raise Refusal("it runs custom functions")


def _outputs(recorder: Recorder, returned: Sequence[Any], inputs: Sequence[Any]) -> list[Tensor]:
    """Returns the tensors that the graph has made and returned, each once. Raises Refusal for one without gradient."""
    given = {id(value) for value in inputs}
    made = list({id(v): v for v in returned if isinstance(v, Tensor) and id(v) not in given}.values())
    if recorder.recording.refusal is not None:
        raise Refusal(recorder.recording.refusal)
    if not made or not all(output.requires_grad for output in made):
        raise Refusal("it returns a tensor without gradient, which a compiled program does not")
    if reason := why_not_cut(recorder, made):
        raise Refusal(reason)
    if share_storage(recorder, made, [*made, *tensors_of(inputs)]):
        raise Refusal("an output shares memory with an input, a captured tensor or another output")
    return made


def _known(recorder: Recorder, outputs: Sequence[Tensor], kind: CallKind, call: GraphCall) -> KnownProgram:
    program = recorder.finish(outputs)
    if reason := why_not_compiled(program):
        raise Refusal(reason)
    tensors = [None if layout is None else value for value, layout in zip(call.inputs, kind.layouts, strict=True)]
    known = known_program(recorder, program, tensors, tensors_of(call.arguments), call.graph.values_read)
    layouts = tuple(source.layout for source in known.sources)
    compilation = Compilation(layouts, tuple(sorted(facts(device_of(tensors_of(call.inputs))).items())))
    return replace(known, program=replace(known.program, compilation=compilation))


def _segment(
    known: KnownProgram,
    function: CompiledFunction,
    recorder: Recorder,
    kind: CallKind,
    inputs: Sequence[Any],
    returned: Sequence[Any],
    recorded: Sequence[Tensor],
    sources: Sequence[Tensor],
) -> KnownSegment:
    saved, storages, packed_bytes = list[SavedTensor](), [storage_key(source) for source in sources], 0
    is_undefined = undefined_saves_of(known.program)

    def pack(tensor: Tensor) -> Tensor:
        nonlocal packed_bytes
        key = storage_key(tensor)
        source = storages.index(key) if key in storages else -1
        packed_bytes += tensor.untyped_storage().nbytes() if source < 0 else 0
        saved.append(
            SavedTensor(
                b"",
                SAVED_BY,
                layout_of(tensor),
                source,
                int(tensor.storage_offset()),
                source < 0 and is_undefined(tensor),
            )
        )
        return tensor

    first = next_sequence_number()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), DisableTorchFunctionAndModes():
        outputs = list(function(sources))
    if len({output.grad_fn for output in outputs}) != 1:
        raise Refusal("it returns a view of another tensor that it returns")
    edges = [get_gradient_edge(source) if source.requires_grad else None for source in sources]
    targets = {(edge.node, edge.output_nr): i for i, edge in enumerate(edges) if edge is not None}
    uses = find_uses(outputs, targets, first, len(sources), {type(outputs[0].grad_fn)})
    stages = find_stages(outputs, targets, uses)
    program = replace(known.program, saved_count=len(saved), saved_bytes=packed_bytes)
    functions[program] = function
    known = replace(
        known,
        program=program,
        is_cast=False,  # it casts weights for itself
        saves=tuple(KnownSave.of(i, one, len(program.nodes), recorder.recording) for i, one in enumerate(saved)),
    )
    pool = {id(value): index for index, value in enumerate([*recorded, *inputs]) if isinstance(value, Tensor)}
    indices = [pool.get(id(value), -1) for value in returned]
    constants = [None if isinstance(value, Tensor) else value for value in returned]

    def forward(*values: Any) -> tuple[Any, ...]:
        with DisableTorchFunctionAndModes():
            results = function([values[position] for position in known.inputs])
        given = [*results, *values]
        return tuple([given[i] if i >= 0 else constant for i, constant in zip(indices, constants, strict=True)])

    assert program.compilation is not None
    layouts = [*program.compilation.layouts, *map(layout_of, outputs)]
    of_frame = Uses([len(of_one) for of_one in uses], layouts, len(stages) > 1)
    graph_uses = GraphUses(list(sources), (), uses, stages)
    return KnownSegment(
        known,
        EncodedProgram.of(program),
        kind,
        tuple(indices.index(number) for number in range(len(outputs))),
        pattern_of(returned, inputs),
        KnownUses.of_only_graph(program, of_frame, graph_uses, outputs),
        packed_bytes,
        forward,
    )

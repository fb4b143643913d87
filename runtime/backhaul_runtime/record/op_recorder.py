"""Records ops: what a node needs of the arguments before an op runs, and of the results afterwards."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from backhaul_runtime.errors import Refusal
from backhaul_runtime.program.op_rules import (
    ABSOLUTE,
    CHECKED_WHEN_RECORDED,
    GEOMETRY,
    UNWRITTEN_RESULTS,
    OpRules,
    rules,
    tensors_in,
    written_tensors,
)
from backhaul_runtime.program.program import (
    CONSTANTS,
    FLEX_ATTENTION,
    GeneratorRef,
    NestedProgram,
    Node,
    Ref,
    SourceRef,
)
from backhaul_runtime.program.undefined_saves import (
    PARTLY_UNDEFINED,
    RECURRENT,
    UNDEFINED_SAVES,
    draws_beside_generators,
    undefined_saves,
)
from backhaul_runtime.program.unsafe_arguments import check_values
from backhaul_runtime.record.custom.custom_functions import CustomFunctions
from backhaul_runtime.record.memory_writes import prepare_write
from backhaul_runtime.record.nested_programs import scratch_bytes
from backhaul_runtime.record.running_call import RunningCall
from backhaul_runtime.replay.recorded_choices import DrawRecorder
from backhaul_runtime.tensors.digest import read_digest
from backhaul_runtime.tensors.layout import copy_exact
from backhaul_runtime.torch_internals.private import HigherOrderOperator, OpOverload, is_plain, is_thin

INDEX = "aten.index.Tensor"
MASKS = torch.bool, torch.uint8
"""The dtypes of indices that are masks."""


class OpRecorder:
    """Makes a node of each op of a call. An op that no program can hold sets the recording's refusal.

    Args:
        call: The call that runs.
        allowed: Names of the ops that a program may hold.
        custom: Records what is special about ops of libraries that workers run beside those.
    """

    def __init__(self, call: RunningCall, allowed: frozenset[str], custom: CustomFunctions) -> None:
        self._call = call
        self._allowed = allowed
        self._custom = custom

    def before(
        self, op: OpOverload | HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Node | None:
        """Returns the node of an op that is about to run; None if no node is recorded for it."""
        recording = self._call.recording
        op_rules = recording.guarded(rules, op)
        if op_rules is None:
            return None
        self._call.op.begin(op_rules.name)  # whatever fails afterwards, hooks know which op saves a tensor
        node = recording.guarded(self._begin, op, op_rules, args, kwargs)
        if op_rules.written:
            recording.guarded(self._prepare_writes, op_rules, args, kwargs)
        return node

    def _begin(self, op: Any, op_rules: OpRules, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node | None:
        call = self._call
        call.memory.contents.forget()
        if op_rules.name in UNDEFINED_SAVES:
            call.op.reads = read_digest(tensors_in((args, tuple(kwargs.values()))))
        elif op_rules.name in PARTLY_UNDEFINED:
            call.op.is_undefined = undefined_saves(op, args, kwargs)
        if call.recording.refusal is not None:
            return None
        call.choices.begin(op_rules, args, kwargs)
        if not op_rules.leaves_traces:
            call.values_given += 1
            return None
        return self._node(op, op_rules, args, kwargs)

    def _node(self, op: Any, op_rules: OpRules, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        call = self._call
        if op_rules.is_collective:  # a replay would wait for the other ranks for ever
            raise Refusal(f"the collective {op_rules.name}, in which the other ranks take part only once")
        # An op of another library. The value check then covers what it reads and keeps, see OpaqueCheck.
        is_opaque = op_rules.name not in self._allowed and op_rules.name != FLEX_ATTENTION
        if is_opaque:
            self._custom.check_op(op_rules.name)
        # In a tensor from outside it could read memory that was not sent.
        if op_rules.name in ABSOLUTE and args[0] not in call.memory.interior:
            raise Refusal(f"{op_rules.name} takes an offset in the storage of a tensor from outside")
        if op_rules.name == INDEX and any(one is not None and one.dtype in MASKS for one in args[1]):
            call.selects_by_masks = True
        if op_rules.name in RECURRENT and draws_beside_generators(op, args, kwargs):
            raise Refusal(
                f"{op_rules.name} has dropout between its layers, which cuDNN does not draw from the generator"
            )
        call.states.capture()
        call.memory.interior.check_reads(op_rules, args, kwargs)
        if op_rules.draws or is_opaque:  # nobody knows whether an op of another library draws
            call.generators.begin(args, kwargs)
        # A worker checks these arguments by their values and would refuse the segment when it is too late to keep it.
        if op_rules.name in CHECKED_WHEN_RECORDED:
            try:
                check_values(op_rules.name, op, args, kwargs)
            except ValueError as error:
                raise Refusal(f"a worker does not run this call of {op_rules.name}: {error}") from None
        if op_rules.name in GEOMETRY:  # values that become sizes, of which autograd saves none
            args = self._with_geometry(GEOMETRY[op_rules.name], args)
        of_op = self._argument
        node = Node(
            op=op_rules.name,
            args=tuple([of_op(value) for value in args]),
            kwargs=tuple([(name, of_op(value)) for name, value in kwargs.items()]),
            ambient=call.states.present,
            result_bytes=(),
            draws=False,
            fresh_casts=call.states.has_fresh_casts(),
        )
        if is_opaque:
            self._custom.begin_op(op_rules.name)
        if op_rules.draws and not call.choices.are_recorded:  # recorded draws are sent instead of the state
            call.generators.add(node, continues=call.generators.continues(args, kwargs))
        return node

    def _argument(self, value: Any) -> Any:
        """Returns an argument as a program holds it. Raises Refusal if no program can hold it."""
        if isinstance(value, Tensor):
            if is_plain(type(value)) or is_thin(type(value)):
                return self._ref(value)
            return self._custom.arguments.composite(value)
        if type(value) is torch.device and value.type == "cuda" and value.index is None:
            return torch.device("cuda", torch.cuda.current_device())  # another one may be current in backward
        if value is None or type(value) in CONSTANTS or isinstance(value, NestedProgram):
            return value
        if isinstance(value, (list, tuple)):
            return tuple([self._argument(item) for item in value])
        if isinstance(value, torch.Generator):
            return GeneratorRef()
        raise Refusal(f"an argument of type {type(value).__name__} to {self._call.op.name}")

    def _ref(self, tensor: Tensor) -> Ref:
        self._call.op.tensors.append(tensor)
        return self._call.known.use(tensor)

    def _with_geometry(self, position: int, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the arguments of an op with a copy of one, which becomes a source, if the call computed its values.

        Args:
            position: The position of an argument whose values become sizes and offsets, see `GEOMETRY`.
            args: The positional arguments of the op.
        """
        value = args[position]
        ref = self._ref(value) if isinstance(value, Tensor) else None
        if ref is None or (isinstance(ref, SourceRef) and not self._call.recording.sources[ref.index].is_written):
            return args
        return (*args[:position], copy_exact(value), *args[position + 1 :])

    def _prepare_writes(self, op_rules: OpRules, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor in written_tensors(op_rules, args, kwargs):
            prepare_write(self._call, tensor)

    def after(
        self,
        op: OpOverload,
        node: Node | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        returned: Any,
        draws: DrawRecorder | None,
    ) -> None:
        """Records an op that has run. Raises an exception if it can't be recorded.

        Args:
            op: The op that has run.
            node: The node that `before` has returned for it.
            args: The positional arguments of the op.
            kwargs: The keyword arguments of the op.
            returned: The value that the op has returned.
            draws: The recorder of its draws; None if they are not recorded.
        """
        call, results = self._call, tensors_in(returned)
        try:
            sizes = call.memory.interior.add_results(results)
        except NotImplementedError:  # torch's, for a tensor without a storage
            raise Refusal("an op returns a tensor that has no storage, such as a sparse one") from None
        if node is None or call.recording.refusal:
            self._custom.drop()
            return
        call.known.add_results(results, written_tensors(rules(op), args, kwargs))
        if node.op in UNWRITTEN_RESULTS:
            call.memory.interior.add_unwritten(results)
        node.result_bytes = sizes
        if self._custom.is_checking:
            if not node.draws and call.generators.has_drawn(args, kwargs):  # though it has no tag that says so
                call.generators.add(node)
            self._custom.end_check(node.op, results)
        call.choices.end(op, node, args, kwargs, results, draws)
        if node.draws:
            call.generators.end(args, kwargs)
        call.builder.add(node)

    def after_attention(
        self, op: HigherOrderOperator, node: Node | None, args: tuple[Any, ...], returned: Sequence[Tensor]
    ) -> None:
        """Does what `after` does for flex_attention, whose node in autograd's graph is that of a custom function."""
        call, results = self._call, tensors_in(returned)
        sizes = call.memory.interior.add_results(results)
        if node is None or call.recording.refusal:
            return
        call.choices.give_up(Refusal("flex_attention decides by numbers that no other op shows"))
        call.known.add_results(results)
        call.known.function_nodes.update(type(one.grad_fn) for one in results if one.grad_fn is not None)
        node.result_bytes = sizes
        call.memory.interior.note_scratch(scratch_bytes(args))
        call.builder.add(node)

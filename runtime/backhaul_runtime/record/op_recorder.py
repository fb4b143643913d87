"""Records ops: what a node needs of the arguments before an op runs, and of the results afterwards."""

from typing import Any

from backhaul_runtime.errors import Refusal
from backhaul_runtime.program.names import JoinedNames, names
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
from backhaul_runtime.program.program import Node
from backhaul_runtime.program.undefined_saves import (
    PARTLY_UNDEFINED,
    RECURRENT,
    UNDEFINED_SAVES,
    draws_beside_generators,
    undefined_saves,
)
from backhaul_runtime.program.unsafe_arguments import check_values
from backhaul_runtime.record.running_call import RunningCall
from backhaul_runtime.replay.recorded_choices import DrawRecorder
from backhaul_runtime.tensors.digest import read_digest
from backhaul_runtime.torch_internals.private import OpOverload


class OpRecorder:
    """Makes a node of each op of a call. An op that no program can hold sets the recording's refusal.

    Args:
        call: The call that runs.
        allowed: Names of the ops that a program may hold.
        allows: The ops of libraries that workers run beside those.
    """

    def __init__(self, call: RunningCall, allowed: frozenset[str], allows: JoinedNames) -> None:
        self._call = call
        self._allowed = allowed
        self._allows = allows

    def before(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node | None:
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

    def _begin(self, op: OpOverload, op_rules: OpRules, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node | None:
        call = self._call
        call.contents.forget()
        if op_rules.name in UNDEFINED_SAVES:
            call.op.reads = read_digest(tensors_in((args, tuple(kwargs.values()))))
        elif op_rules.name in PARTLY_UNDEFINED:
            call.op.is_undefined = undefined_saves(op, args, kwargs)
        if call.recording.refusal is not None:
            return None
        call.choices.begin(op_rules, args, kwargs)
        return self._node(op, op_rules, args, kwargs) if op_rules.leaves_traces else None

    def _node(self, op: OpOverload, op_rules: OpRules, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        call = self._call
        if op_rules.is_collective:  # a replay would wait for the other ranks for ever
            raise Refusal(f"the collective {op_rules.name}, in which the other ranks take part only once")
        # An op of another library. The value check then covers what it reads and keeps, see OpaqueCheck.
        is_opaque = op_rules.name not in self._allowed
        if is_opaque and (reason := self._allows.why_not_op(op_rules.name)):
            raise Refusal(reason)
        # In a tensor from outside it could read memory that was not sent.
        if op_rules.name in ABSOLUTE and args[0] not in call.interior:
            raise Refusal(f"{op_rules.name} takes an offset in the storage of a tensor from outside")
        if op_rules.name in RECURRENT and draws_beside_generators(op, args, kwargs):
            raise Refusal(
                f"{op_rules.name} has dropout between its layers, which cuDNN does not draw from the generator"
            )
        call.states.capture()
        call.interior.check_reads(op_rules, args, kwargs)
        if op_rules.draws or is_opaque:  # nobody knows whether an op of another library draws
            call.generators.begin(args, kwargs)
        # A worker checks these arguments by their values and would refuse the segment when it is too late to keep it.
        if op_rules.name in CHECKED_WHEN_RECORDED:
            try:
                check_values(op_rules.name, op, args, kwargs)
            except ValueError as error:
                raise Refusal(f"a worker does not run this call of {op_rules.name}: {error}") from None
        if op_rules.name in GEOMETRY:  # values that become sizes, of which autograd saves none
            args = call.arguments.with_geometry(GEOMETRY[op_rules.name], args)
        of_op = call.arguments.of_op
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
            names.ops.add(op_rules.name)
            call.opaque.begin()
        if op_rules.draws and not call.choices.are_recorded:  # recorded draws are sent instead of the state
            call.generators.add(node, continues=call.generators.continues(args, kwargs))
        return node

    def _prepare_writes(self, op_rules: OpRules, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor in written_tensors(op_rules, args, kwargs):
            self._call.writes.prepare(tensor)

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
        sizes = call.interior.add_results(results)
        if node is None or call.recording.refusal:
            call.opaque.drop()
            return
        call.known.add_results(results, written_tensors(rules(op), args, kwargs))
        if node.op in UNWRITTEN_RESULTS:
            call.interior.add_unwritten(results)
        node.result_bytes = sizes
        if call.opaque.is_checking:
            if not node.draws and call.generators.has_drawn(args, kwargs):  # though it has no tag that says so
                call.generators.add(node)
            call.opaque.end(node.op, results)
        call.choices.end(op, node, args, kwargs, results, draws)
        if node.draws:
            call.generators.end(args, kwargs)
        call.builder.add(node)

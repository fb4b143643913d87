"""Records custom autograd functions, each as one node: NOTE [What the recorder relies on], Rule 5."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from backhaul_runtime.errors import Refusal
from backhaul_runtime.program.class_names import name_of_class, plain_name
from backhaul_runtime.program.code_identity import identity_of_class
from backhaul_runtime.program.names import names
from backhaul_runtime.program.op_rules import tensors_in
from backhaul_runtime.program.program import Node
from backhaul_runtime.record.function_watch import FunctionWatch
from backhaul_runtime.record.running_call import RunningCall
from backhaul_runtime.torch_internals.private import backward_class, is_plain
from backhaul_runtime.torch_internals.storages import storage_key


class FunctionRecorder:
    """Makes a node of each custom autograd function of a call that workers run. The ops inside it are not recorded.

    Args:
        call: The call that runs.
    """

    def __init__(self, call: RunningCall) -> None:
        self._call = call

    def before(self, function: type, args: tuple[Any, ...]) -> Node | str:
        """Returns the node of a function that is about to run, or the reason why it is not recorded as one."""
        call = self._call
        reason = call.recording.guarded(self._reason_against, function)
        node = call.recording.guarded(self._begin, function, args) if reason == "" else None
        if node is not None:
            return node
        call.op.end()
        call.opaque.drop()
        return reason or str(call.recording.refusal)

    def _reason_against(self, function: type) -> str:
        return self._call.recording.refusal or self._call.functions.reason_against(function)

    def _begin(self, function: type, args: tuple[Any, ...]) -> Node:
        call, name = self._call, name_of_class(function)
        call.op.begin(name)
        call.contents.forget()
        call.states.capture()
        if call.interior.has_unwritten(tensors_in(args)):
            raise Refusal(f"the custom autograd function {plain_name(function)} gets memory that no op wrote")
        arguments = tuple([call.arguments.of_function(value) for value in args])
        _check_attributes(function, call.op.tensors)
        call.opaque.begin()
        if name not in call.recording.identities:
            names.functions[name] = function
            call.recording.identities[name] = identity_of_class(function).digest()
        call.generators.begin_function(args)
        fresh_casts = call.states.has_fresh_casts()
        return Node(name, arguments, (), call.states.present, (), draws=False, fresh_casts=fresh_casts)

    def watch(self, function: type) -> FunctionWatch:
        """Returns what watches a function that has a node. Run the function inside it."""
        opaque = self._call.opaque
        if opaque.watch is None:
            opaque.watch = FunctionWatch(self._may_write, self._call.recording.refuse)
        opaque.watch.begin(plain_name(function))
        return opaque.watch

    def _may_write(self, tensor: Tensor) -> None:
        self._call.recording.guarded(self._prepare_write, tensor)

    def _prepare_write(self, tensor: Tensor) -> None:
        """Prepares for a write of the function to a tensor that it has not made."""
        op = self._call.op
        if all(storage_key(given) != storage_key(tensor) for given in op.tensors):
            raise Refusal(f"{op.name} writes to a tensor that is not among its arguments")
        self._call.writes.prepare(tensor)

    def after(self, node: Node, args: tuple[Any, ...], returned: Any, watch: FunctionWatch) -> None:
        """Records a function that has run: what it has returned, drawn and kept.

        Args:
            node: The node that `before` has returned for it.
            args: The arguments of the function.
            returned: The value that the function has returned.
            watch: The object that has watched it.
        """
        self._call.recording.guarded(self._end, node, args, returned, watch)

    def _end(self, node: Node, args: tuple[Any, ...], returned: Any, watch: FunctionWatch) -> None:
        call = self._call
        call.interior.note_scratch(watch.made_bytes)
        if call.recording.refusal is not None:
            call.opaque.drop()
            return
        results, function = tensors_in(returned), names.functions[node.op]
        made_by = {type(result.grad_fn) for result in results if result.grad_fn is not None}
        if not made_by <= {backward_class(function)}:
            raise Refusal(f"the custom autograd function {plain_name(function)} returns a view or another's result")
        if not all(is_plain(type(result)) for result in results):
            raise Refusal(f"the custom autograd function {plain_name(function)} returns a tensor subclass")
        if identity_of_class(function).digest() != call.recording.identities[node.op]:
            what = f"the custom autograd function {plain_name(function)}"
            raise Refusal(f"{what}, or a value that it reads, was changed by the call")
        call.generators.end_function(node, plain_name(function), args, draws=watch.draws)
        call.known.add_results(results)
        node.result_bytes = call.interior.add_results(results)
        call.opaque.end(node.op, results)
        call.builder.add(node)


def _check_attributes(function: type, tensors: Iterable[Tensor]) -> None:
    """Raises Refusal if the code of a custom function names an attribute of a tensor, as programs hold none of these.

    Args:
        function: The custom autograd function that gets the tensors.
        tensors: The tensors among its arguments. Those of a class of their own have an adapter.
    """
    for tensor in tensors:
        attributes = set(vars(tensor)) if is_plain(type(tensor)) else set()
        if attributes and (named := min(attributes & identity_of_class(function).names, default="")):
            what = f"the custom autograd function {plain_name(function)}"
            raise Refusal(f"{what} may read the attribute {named} of a tensor, which no program holds")

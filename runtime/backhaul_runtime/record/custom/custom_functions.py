"""What recording does with custom autograd functions, and with ops of other libraries: what `--allow` needs."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from backhaul_runtime.errors import Refusal
from backhaul_runtime.program.custom.class_names import name_of_class, plain_name
from backhaul_runtime.program.custom.code_identity import identity_of_class
from backhaul_runtime.program.custom.names import JoinedNames, names
from backhaul_runtime.program.op_rules import tensors_in
from backhaul_runtime.program.program import Node
from backhaul_runtime.record.custom.context_tensors import ContextTensors
from backhaul_runtime.record.custom.function_watch import FunctionWatch
from backhaul_runtime.record.custom.object_arguments import ObjectArguments
from backhaul_runtime.record.memory_writes import prepare_write
from backhaul_runtime.record.recording import SavedTensor
from backhaul_runtime.record.running_call import RunningCall
from backhaul_runtime.replay.custom.opaque_check import CHECKED, OpaqueCheck
from backhaul_runtime.torch_internals.graph_uses import is_custom
from backhaul_runtime.torch_internals.pre_dispatch import notice_backwards
from backhaul_runtime.torch_internals.private import (
    backward_class,
    is_plain,
    saves_tensors,
    without_saved_tensor_hooks,
)
from backhaul_runtime.torch_internals.storages import storage_key


class CustomFunctions:
    """The custom autograd functions of a call, and its nodes whose insides torch does not describe.

    A function that a worker allows is one node; the ops inside it are not recorded. Such a node, and that of an op of
    another library, is checked as a whole, see `OpaqueCheck`.

    Args:
        call: The call that runs.
        allows: What workers run beside torch's own ops.

    Attributes:
        arguments: Takes the arguments of functions apart, and objects among those of ops.
        refused: Why the function that runs is not recorded as a node; empty if no such function runs.
    """

    def __init__(self, call: RunningCall, allows: JoinedNames) -> None:
        self.arguments = ObjectArguments(call, allows)
        self.refused = ""
        self._call = call
        self._allows = allows
        self._why_not: dict[type, str] = {}
        self._contexts = ContextTensors()
        self._saved: list[StorageWeakRef] = []  # of what recorded functions have saved, if it was made inside
        self._check: OpaqueCheck | None = None  # of the node that is being recorded, if it is checked as a whole
        self._watch: FunctionWatch | None = None  # of the function that runs, or has run last

    def begin(self, function: type, args: tuple[Any, ...]) -> Node | str:
        """Returns the node of a function that is about to run, or the reason why it is not recorded as one.

        A function with a node has to run in `within`.
        """
        reason = self._call.recording.guarded(self._reason_against, function)
        node = self._call.recording.guarded(self._node, function, args) if reason == "" else None
        if node is not None:
            return node
        self._call.op.end()
        self.drop()
        return reason or str(self._call.recording.refusal)

    def _reason_against(self, function: type) -> str:
        if function not in self._why_not:
            self._why_not[function] = self._allows.why_not_function(function)
        return self._call.recording.refusal or self._why_not[function]

    def _node(self, function: type, args: tuple[Any, ...]) -> Node:
        call, name = self._call, name_of_class(function)
        call.op.begin(name)
        call.memory.contents.forget()
        call.states.capture()
        if call.memory.interior.has_unwritten(tensors_in(args)):
            raise Refusal(f"the custom autograd function {plain_name(function)} gets memory that no op wrote")
        arguments = tuple([self.arguments.of_function(value) for value in args])
        _check_attributes(function, call.op.tensors)
        self._begin_check()
        if name not in call.recording.identities:
            names.functions[name] = function
            call.recording.identities[name] = identity_of_class(function).digest()
            notice_backwards(backward_class(function))  # before it saves anything
        call.generators.begin_function(args)
        fresh_casts = call.states.has_fresh_casts()
        if self._watch is None:
            self._watch = FunctionWatch(self._may_write, call.recording.refuse)
        self._watch.begin(plain_name(function))
        return Node(name, arguments, (), call.states.present, (), draws=False, fresh_casts=fresh_casts)

    def run(self, run: Callable[[], Any]) -> Any:
        """Runs a function for which `begin` has returned a node, and returns what it returns."""
        assert self._watch is not None
        with self._watch.within():
            return run()

    def _may_write(self, tensor: Tensor) -> None:
        self._call.recording.guarded(self._prepare_write, tensor)

    def _prepare_write(self, tensor: Tensor) -> None:
        """Prepares for a write of the function to a tensor that it has not made."""
        op = self._call.op
        if all(storage_key(given) != storage_key(tensor) for given in op.tensors):
            raise Refusal(f"{op.name} writes to a tensor that is not among its arguments")
        prepare_write(self._call, tensor)

    def end(self, node: Node, args: tuple[Any, ...], returned: Any) -> None:
        """Records a function that has run: what it has returned, drawn and kept.

        Args:
            node: The node that `begin` has returned for it.
            args: The arguments of the function.
            returned: The value that the function has returned.
        """
        self._call.recording.guarded(self._end, node, args, returned)

    def _end(self, node: Node, args: tuple[Any, ...], returned: Any) -> None:
        call, watch = self._call, self._watch
        assert watch is not None
        call.memory.interior.note_scratch(watch.made_bytes)
        if call.recording.refusal is not None:
            self.drop()
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
        node.result_bytes = call.memory.interior.add_results(results)
        self.end_check(node.op, results)
        call.builder.add(node)

    def run_refused(self, function: type, run: Callable[[], Any], reason: str) -> Any:
        """Runs a function that is not recorded as a node, for this reason. What it saves stays with autograd.

        It runs without a hook: an unpack hook could not return the same object, with its class, attributes, version and
        storage, because torch makes another one of whatever it returns.
        """
        states, outer = self._call.states, self.refused
        outer_states, states.hookless, self.refused = states.hookless, reason, reason
        try:
            with without_saved_tensor_hooks(states.pack):
                returned = run()
        finally:
            states.hookless, self.refused = outer_states, outer
            self._call.known.refused_nodes[backward_class(function)] = reason
        if saves_tensors(tensors_in(returned), backward_class(function)):
            self._call.recording.refuse(reason)  # a replay would not reach what it has saved
        return returned

    def check_op(self, name: str) -> None:
        """Raises Refusal if no worker runs an op of another library, given by its name."""
        if reason := self._allows.why_not_op(name):
            raise Refusal(reason)

    def begin_op(self, name: str) -> None:
        """Begins the check of such an op, whose arguments are recorded already."""
        names.ops.add(name)
        self._begin_check()

    def _begin_check(self) -> None:
        """Begins the check of the node that is about to run, of whose arguments the tensors are known."""
        call = self._call
        call.choices.give_up(Refusal(f"what {call.op.name} draws or decides can't be recorded for other hardware"))
        self._check = OpaqueCheck(call.memory.contents.digest)
        self._check.add(call.op.tensors)
        call.memory.contents.forget()  # a kernel outside torch may write to an argument without a new version

    @property
    def is_checking(self) -> bool:
        """Whether the node that is being recorded is checked as a whole."""
        return self._check is not None

    def end_check(self, name: str, results: Sequence[Tensor]) -> None:
        """Adds results and contexts to the check, and the check to the tensors that autograd saved.

        Args:
            name: The name of the op or function that has run.
            results: The tensors that it has returned.
        """
        check, self._check = self._check, None
        assert check is not None
        for result in results:
            if is_custom(result.grad_fn):
                self._call.known.function_nodes.add(type(result.grad_fn))
        check.add(results)
        check.add_contexts(results)
        for tensor in check.tensors:
            self._contexts.add(tensor)
            if is_plain(type(tensor)):
                self._check_own(name, tensor)
        self._call.builder.note_save()
        saved = SavedTensor(check.digest(), f"{name} (all that it read and kept)", CHECKED, -1, 0)
        self._call.saved.append(saved)

    def drop(self) -> None:
        """Ends the check without a result, as the op or function is not recorded."""
        self._check = None

    def note_saved(self, tensor: Tensor, *, is_hidden: bool) -> None:
        """Notes a tensor that a function saves and that lies in no source. Raises Refusal if it is of others.

        Args:
            tensor: What autograd is about to save.
            is_hidden: Whether no op has returned its memory.
        """
        self._saved.append(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
        if is_hidden:
            self._check_own(self._call.op.name, tensor)

    def _check_own(self, name: str, tensor: Tensor) -> None:
        """Raises Refusal if a custom function keeps a tensor that is neither its own nor an argument of anything.

        Its backward may read it after others have changed it, or write to it.

        Args:
            name: The name of the op or function that keeps the tensor.
            tensor: A tensor that autograd saves, or that is on the context.
        """
        memory, watch = self._call.memory, self._watch
        function = names.functions[name] if name in self._call.recording.identities else None
        if function is None or watch is None or watch.has_made(tensor) or tensor in memory.interior:
            return
        key = storage_key(tensor)
        compared = identity_of_class(function).tensors
        if not memory.sources.at(key) and key not in map(storage_key, compared):
            raise Refusal(
                f"the custom autograd function {plain_name(function)} keeps a tensor that is not among its arguments"
            )

    def outlived(self, outputs: Sequence[Tensor]) -> bool:
        """Whether something beside outputs and contexts refers to the inside of the call, as an auxiliary loss may.

        Whoever refers to memory that a function has saved would see what a backward writes there.
        Call it once the call has ended and the caller holds no reference to its inside.
        """
        if self._call.known.outlived(outputs, self._contexts.is_only_holder):
            return True
        known = {*map(storage_key, outputs), *self._contexts.storages()}
        return any(not storage.expired() and storage.cdata not in known for storage in self._saved)  # type: ignore[no-untyped-call]

    def end_call(self) -> None:
        """Drops what refers to the call: a cycle would keep its inside alive."""
        self._watch = None


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

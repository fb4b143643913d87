"""Records every op of a running call without changing what the call does.

NOTE [What the recorder relies on]
1. The recorder identifies a tensor by the address of its TensorImpl, and a storage by its own address. Weak references
   prevent torch from reusing an address during the recording. They keep no tensor data alive.
2. The recorder never raises an exception into the call. If something can't be recorded, it sets `refusal`, and the call
   continues.
3. After a refusal, the ops recorded before it still form a program. The tensors that autograd saved in those ops can be
   recomputed, and those that it saves later stay on the trainer. So the recorder still copies the sources of that
   program before an op writes to them.
4. The tensors that autograd saves in an op count as recorded only once the op itself is recorded, because recording an
   op may fail after the op has run.
5. A custom autograd function that a worker allows is one node: the ops inside it are not recorded. Of those that no
   worker allows, the ops are recorded. The call is refused if such a function saves a tensor, or if an op uses a
   differentiable one that it has returned.
"""

from collections.abc import Callable, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from backhaul_runtime.errors import Refusal, UnsupportedTensorError
from backhaul_runtime.program.class_names import name_of_class, plain_name
from backhaul_runtime.program.code_identity import identity_of_class
from backhaul_runtime.program.names import JoinedNames, names
from backhaul_runtime.program.op_rules import (
    ABSOLUTE,
    CHECKED_WHEN_RECORDED,
    GEOMETRY,
    MAKES_LEAF,
    READS_ONLY_SHAPES,
    UNDEFINED_SAVES,
    UNWRITTEN_RESULTS,
    OpRules,
    rules,
    tensors_in,
    written_tensors,
)
from backhaul_runtime.program.op_trace import describe_op
from backhaul_runtime.program.program import (
    GeneratorRef,
    Node,
    Program,
    Ref,
    ResultRef,
    Source,
    SourceRef,
)
from backhaul_runtime.program.unsafe_arguments import check_values
from backhaul_runtime.record.context_tensors import ContextTensors
from backhaul_runtime.record.function_arguments import CONSTANTS, FunctionArguments, check_attributes
from backhaul_runtime.record.function_watch import FunctionWatch
from backhaul_runtime.record.recording import Recording, SavedTensor
from backhaul_runtime.record.sources import Hold, SourceLedger
from backhaul_runtime.replay.opaque_check import CHECKED, OpaqueCheck
from backhaul_runtime.replay.recorded_choices import ChoiceRecorder, DrawRecorder
from backhaul_runtime.tensors.deferred_digest import ContentDigests, Digest, digest_of
from backhaul_runtime.tensors.digest import read_digest, saved_digest, tensor_address
from backhaul_runtime.tensors.layout import Layout, copy_exact, layout_of, unsupported_reason
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.torch_internals.autocast_cache import CASTS
from backhaul_runtime.torch_internals.generators import default_generator, drawing_device
from backhaul_runtime.torch_internals.graph_uses import is_custom, is_module_hook, name_of
from backhaul_runtime.torch_internals.pre_dispatch import PreDispatchMode
from backhaul_runtime.torch_internals.private import (
    DisablePythonDispatcher,
    DisableTorchDispatch,
    DisableTorchFunction,
    OpOverload,
    WeakTensorRef,
    backward_class,
    base_of,
    identity_of,
    is_differentiable_view,
    is_plain,
    is_thin,
    next_sequence_number,
    sequence_number,
    top_saved_tensor_hooks,
    version_of,
)
from backhaul_runtime.torch_internals.storages import StorageLedger, storage_key

T = TypeVar("T")


@dataclass(slots=True)
class _Known:
    """A tensor that an op took or returned, with its properties then. A change that no op made is refused."""

    ref: Ref
    impl: WeakTensorRef  # Rule 1
    data_ptr: int
    requires_grad: bool
    has_no_history: bool  # a view made under no_grad: it requires a gradient but has no node


def _draws_from_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an op that draws does so from the CPU's default generator, whose state has 5 KiB."""
    is_own = any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))
    return not is_own and drawing_device(args, kwargs).type == "cpu"


class FixedDigests:
    """Digests of parameters that must not change for some time. Any number of threads may use it."""

    def __init__(self) -> None:
        # With each a reference to its storage, which prevents that torch uses the storage's address again.
        self._digests: dict[tuple[Any, ...], tuple[Digest, StorageWeakRef]] = {}

    def get(self, key: tuple[Any, ...]) -> Digest | None:
        """Returns the digest of the contents with this key; None if it is unknown."""
        known = self._digests.get(key)
        return None if known is None else known[0]

    def add(self, parameter: Tensor, key: tuple[Any, ...], digest: Digest) -> None:
        """Notes the digest of a parameter."""
        self._digests[key] = digest, StorageWeakRef(parameter.untyped_storage())  # type: ignore[no-untyped-call]


def _contents_key(tensor: Tensor, layout: Layout) -> tuple[Any, ...]:
    """Returns a key for the bytes of a tensor, not for the view: a weight and its transpose have one digest."""
    start = int(tensor.storage_offset()) * layout.dtype.itemsize
    return storage_key(tensor), start, layout.span_bytes, layout.memory_order, version_of(tensor)


class Recorder(PreDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records a call. Enter it around the call, then call `finish`. Not thread-safe.

    Args:
        arguments: The tensors passed to the call. They are copied at first use, because the caller may change them.
        allowed: Names of the ops that a program may hold.
        hold: Makes copies of tensors that may change before backward.
        pack: The pack hook that calls `note_saved`. Ops under any other hook are refused. None to check no hooks.
        op_ended: Called after each op, with whether the op is part of the program (Rule 4).
        traces: Whether to describe each op in `trace`.
        pins: Whether to record what a replay on other hardware needs, see NOTE [Recorded choices].
        fixed: Digests of parameters that keep their values while calls share this object; None to compute all digests.
        allows: What workers run beside the ops in `allowed`.

    Attributes:
        recording: The recording. It may outlive the recorder.
        sources: The sources of the call. They live as long as the recorder.
        trace: A readable line for each op; None unless `traces` is set.
        own_s: Seconds of the call that recording has taken so far.
    """

    def __init__(
        self,
        arguments: Sequence[Tensor],
        allowed: frozenset[str],
        hold: Hold,
        pack: Callable[[Tensor], object] | None = None,
        op_ended: Callable[[bool], None] = lambda _: None,
        *,
        traces: bool = False,
        pins: bool = False,
        fixed: "FixedDigests | None" = None,
        allows: JoinedNames = JoinedNames(),  # noqa: B008  it never changes
    ) -> None:
        super().__init__()
        self.recording = Recording(has_recorded_choices=pins)
        self.trace: list[str] | None = [] if traces else None
        self.own_s = 0.0
        self.sources = SourceLedger(self.recording.sources, arguments, hold)
        self._allowed = allowed
        self._pack = pack
        self._op_ended = op_ended
        self._allows = allows
        self._why_not: dict[type, str] = {}
        self._refused_function = ""  # why the custom function that runs is not recorded as a node
        self._refused_nodes: dict[type, str] = {}  # why functions are not recorded, by the class of their nodes
        self._check: OpaqueCheck | None = None  # of the op or function that runs, if no list of torch's ops has it
        self._given: list[Tensor] = []  # the tensors among the arguments of the op or function that runs
        self._classes: set[type] = set()  # of the autograd nodes that recorded custom functions have made
        self._watch: FunctionWatch | None = None
        self._arguments = FunctionArguments(allows)
        self._on_contexts = ContextTensors()
        self._scratch_bytes = 0
        self._nodes: list[Node] = []
        self._states: dict[ambient_state.State, int] = {}
        self._state: tuple[ambient_state.State, int] = (), 0  # of the last op; the next one usually has the same
        self._known: dict[int, _Known] = {}
        self._interior = StorageLedger()
        self._unwritten: set[int] = set()
        self._op = ""
        self._reads: bytes | None = None
        self._drawn_from = b""  # state of the generator before the op that runs
        self._cpu_drawn_from = b""  # state of the CPU's default generator before the custom function that runs
        self._drawn_to = b""  # state of the CPU's default generator after the last recorded draw from it
        self._cleared = self._cleared_before_op = ambient_state.cleared_casts()  # that of the last recorded node
        self._contents: dict[tuple[Any, ...], Digest] = {}
        self._digests = ContentDigests()
        self._fixed = fixed
        self._hidden = StorageLedger()
        self._hidden_bytes: dict[int, int] = {}  # by key, for storages that autograd saves and no op returns
        self._saving_nodes = 0  # number of nodes up to the last one that saved a tensor
        self._recorded_saves = self._recorded_sources = 0  # saved tensors and sources of the nodes recorded so far
        self._left_out: tuple[Node, ...] = ()
        self._pins = ChoiceRecorder() if pins else None
        self.first_sequence = next_sequence_number()
        self._first_hook = RemovableHandle.next_id

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        # Both refer to the recorder's owner: keeping them would make a cycle that keeps the inside of the call alive.
        self._pack = None
        self._op_ended = lambda _: None
        self._watch = None

    def around(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an op and records it. Arguments are read before the op runs, results afterwards."""
        began = perf_counter()
        with DisableTorchDispatch():  # dispatch modes of the user must not see the recorder's own ops
            node = self._before(op, args, kwargs)
        draws = DrawRecorder() if node is not None and self._pins is not None and rules(op).draws else None
        self.own_s += perf_counter() - began
        try:
            with draws or nullcontext():
                returned = op(*args, **kwargs)
        except BaseException:
            self._forget_op()
            raise
        finally:
            self._op, self._reads = "", None
            self._given.clear()
        began = perf_counter()
        with DisableTorchDispatch():
            self._guarded(self._after, op, node, args, kwargs, returned, draws)
            self._op_ended(not self.has_lost_track)
        if self.trace is not None:
            self.trace.append(describe_op(op, args, kwargs, returned))
        self.own_s += perf_counter() - began
        return returned

    def around_function(self, function: type, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Runs a custom autograd function, and records it as one node (Rule 5)."""
        began = perf_counter()
        with DisableTorchDispatch(), DisableTorchFunction():
            reason = self._guarded(self._reason_against, function)
            node = self._guarded(self._function_node, function, args) if reason == "" else None
        self.own_s += perf_counter() - began
        if node is None:
            self._op, self._check = "", None
            self._given.clear()
            return self._around_refused(reason or str(self.recording.refusal), function, run)
        watch = self._watch = self._watch or FunctionWatch(self._function_may_write, self.refuse)
        watch.begin(plain_name(function))
        try:
            with watch.within():
                returned = run()
        except BaseException:
            self._forget_op()
            raise
        finally:
            self._op = ""
            self._given.clear()
        began = perf_counter()
        with DisableTorchDispatch(), DisableTorchFunction():
            self._scratch_bytes = max(self._scratch_bytes, watch.made_bytes)
            self._guarded(self._function_ended, node, args, returned, watch.draws)
            self._op_ended(not self.has_lost_track)
        if self.trace is not None:
            self.trace.append(describe_op(node.op, args, {}, returned))
        self.own_s += perf_counter() - began
        return returned

    def _reason_against(self, function: type) -> str:
        if self.recording.refusal is not None:
            return self.recording.refusal
        if function not in self._why_not:
            self._why_not[function] = self._allows.why_not_function(function)
        return self._why_not[function]

    def _around_refused(self, reason: str, function: Any, run: Callable[[], Any]) -> Any:
        outer, self._refused_function = self._refused_function, reason
        try:
            return run()
        finally:
            self._refused_function = outer
            self._refused_nodes[backward_class(function)] = reason

    def _forget_op(self) -> None:
        """Removes what was recorded of an op that raised an exception. The function may catch it and continue."""
        self._check = None
        if self.recording.refusal is None:
            del self.recording.saved[self._recorded_saves :]
            del self.recording.generator_states[sum(node.draws for node in self._nodes) :]

    @property
    def op(self) -> str:
        """The name of the op that runs, empty between ops."""
        return self._op

    @property
    def changeable_argument(self) -> str:
        """The name of a type of objects that custom functions took and that may change before backward, or empty."""
        return self._arguments.changeable

    @property
    def used_autocast(self) -> bool:
        """Whether an op ran under autocast."""
        return any(map(ambient_state.is_autocast, self._states))

    @property
    def made_leaves(self) -> bool:
        """Whether the function turned on `requires_grad` of a tensor that it made."""
        return any(node.op == MAKES_LEAF for node in self._nodes)

    @property
    def has_lost_track(self) -> bool:
        """Whether tensors that autograd saves from now on can't be recomputed from the recorded ops (Rule 3)."""
        return self.recording.refusal is not None

    @property
    def function_nodes(self) -> Set[type]:
        """The classes of the autograd nodes that recorded custom functions have made."""
        return self._classes

    def refuse(self, reason: str) -> None:
        """Sets the reason why this call can't be a program. If one is set already, it stays."""
        if self.recording.refusal is None:
            self.recording.refusal = reason

    def _before(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node | None:
        node = self._guarded(self._begin, op, args, kwargs)
        self._guarded(self._save_before_writes, op, args, kwargs)
        return node

    def _guarded(self, step: Callable[..., T], *args: Any) -> T | None:
        """Returns the result of a step of recording, or None if it failed, after setting the refusal (Rule 2)."""
        try:
            return step(*args)
        except Exception as error:
            self.refuse(Refusal.of(error).reason)
            return None

    def _begin(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node | None:
        op_rules = rules(op)
        self._op = op_rules.name
        self._contents.clear()
        self._given.clear()
        if op_rules.name in UNDEFINED_SAVES:
            self._reads = read_digest(tensors_in((args, tuple(kwargs.values()))))
        if self.recording.refusal is not None:
            return None
        if self._pins is not None:
            try:
                self._pins.begin(op_rules, tensors_in((args, tuple(kwargs.values()))))
            except Refusal as refusal:
                self._give_up_choices(refusal)
        return self._node(op, op_rules, args, kwargs) if op_rules.leaves_traces else None

    def _node(self, op: OpOverload, op_rules: OpRules, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        if op_rules.is_collective:
            raise Refusal(f"the collective {op_rules.name}, in which the other ranks take part only once")
        is_opaque = op_rules.name not in self._allowed
        if is_opaque and (reason := self._allows.why_not_op(op_rules.name)):
            raise Refusal(reason)
        if op_rules.name in ABSOLUTE and args[0] not in self._interior:
            raise Refusal(f"{op_rules.name} takes an offset in the storage of a tensor from outside")
        self._check_surroundings()
        # Nothing recorded says what an op reads from memory that no op wrote, so a replay would read other values.
        if op_rules.reads_values and op_rules.name not in READS_ONLY_SHAPES and self._unwritten:
            self._check_reads(op_rules, args, kwargs)
        self._drawn_from = self._generator_state(args, kwargs) if op_rules.draws or is_opaque else b""
        if op_rules.name in CHECKED_WHEN_RECORDED:
            try:
                check_values(op_rules.name, op, args, kwargs)
            except ValueError as error:
                raise Refusal(f"a worker does not run this call of {op_rules.name}: {error}") from None
        if op_rules.name in GEOMETRY:
            args = self._with_geometry(GEOMETRY[op_rules.name], args)
        node = Node(
            op=op_rules.name,
            args=tuple([self._argument(value) for value in args]),
            kwargs=tuple([(name, self._argument(value)) for name, value in kwargs.items()]),
            ambient=self._state[1],
            result_bytes=(),
            draws=op_rules.draws and self._pins is None,
            fresh_casts=self._has_fresh_casts(),
        )
        if is_opaque:
            names.ops.add(op_rules.name)
            node.draws = op_rules.draws
            self._begin_check(op_rules.name)
        if node.draws:
            self._note_state(continues=self._drawn_from == self._drawn_to and _draws_from_cpu(args, kwargs))
        return node

    def _with_geometry(self, position: int, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the arguments with a copy of one of them, which becomes a source, if the call computed its values."""
        value = args[position]
        ref = self._ref(value) if isinstance(value, Tensor) else None
        if ref is None or (isinstance(ref, SourceRef) and not self.recording.sources[ref.index].is_written):
            return args
        return (*args[:position], copy_exact(value), *args[position + 1 :])

    def _check_surroundings(self) -> None:
        """Notes the state that a node runs under. Raises Refusal if no replay can have it."""
        hooks = top_saved_tensor_hooks(True)
        # A replay packs with our hooks, so backward would get what those hooks would have changed.
        if self._pack is not None and (hooks is None or hooks[0] is not self._pack):
            raise Refusal("the function uses saved-tensor hooks of its own")
        if torch.is_inference_mode_enabled():
            raise Refusal("inference mode is on inside the function")
        state = ambient_state.capture()
        if state != self._state[0]:
            self._state = state, self._states.setdefault(state, len(self._states))

    def _begin_check(self, name: str) -> None:
        """Begins the check of a node whose op or function is not torch's: of its arguments, before it runs."""
        if self._pins is not None:
            self._give_up_choices(Refusal(f"what {name} draws or decides can't be recorded for other hardware"))
        self._check = OpaqueCheck(self._content)
        self._check.add(self._given)
        self._contents.clear()  # a kernel outside torch may write to an argument without a new version

    def _end_check(self, name: str, results: list[Tensor]) -> None:
        """Adds the results and contexts to the check of a node, and the check to the tensors that autograd saved."""
        check, self._check = self._check, None
        if check is None:
            return
        for result in results:
            if is_custom(result.grad_fn):
                self._classes.add(type(result.grad_fn))
        check.add(results)
        check.add_contexts(results)
        for tensor in check.tensors:
            self._on_contexts.add(tensor)
            if is_plain(type(tensor)):
                self._check_kept(name, tensor)
        self._saving_nodes = len(self._nodes) + 1
        self.recording.saved.append(SavedTensor(check.digest(), f"{name} (all that it read and kept)", CHECKED, -1, 0))

    def _function_node(self, function: type, args: tuple[Any, ...]) -> Node:
        name = name_of_class(function)
        self._op = name
        self._contents.clear()
        self._check_surroundings()
        if self._unwritten and any(storage_key(t) in self._unwritten for t in tensors_in(args)):
            raise Refusal(f"the custom autograd function {plain_name(function)} gets memory that no op wrote")
        self._given.clear()
        arguments = tuple([self._arguments.part(value, self._ref) for value in args])
        check_attributes(function, self._given)
        self._begin_check(name)
        if name not in self.recording.identities:
            names.functions[name] = function
            self.recording.identities[name] = identity_of_class(function).digest()
        self._drawn_from = self._generator_state(args, {})
        self._cpu_drawn_from = self._drawn_from if _draws_from_cpu(args, {}) else self._generator_state((), {})
        return Node(name, arguments, (), self._state[1], (), draws=False, fresh_casts=self._has_fresh_casts())

    def _function_may_write(self, tensor: Tensor) -> None:
        self._guarded(self._function_writes, tensor)

    def _function_writes(self, tensor: Tensor) -> None:
        """Notes that a custom function is about to write to a tensor that it has not made."""
        if all(storage_key(given) != storage_key(tensor) for given in self._given):
            raise Refusal(f"{self._op} writes to a tensor that is not among its arguments")
        self._save_before_write(tensor)

    def _function_ended(self, node: Node, args: tuple[Any, ...], returned: Any, draws: bool) -> None:
        """Records what a custom function has returned and drawn."""
        if self.recording.refusal is not None:
            self._check = None
            return
        results = tensors_in(returned)
        custom = {type(result.grad_fn) for result in results if result.grad_fn is not None}
        function = names.functions[node.op]
        if not custom <= {backward_class(function)}:
            raise Refusal(f"the custom autograd function {plain_name(function)} returns a view or another's result")
        if not all(is_plain(type(result)) for result in results):
            raise Refusal(f"the custom autograd function {plain_name(function)} returns a tensor subclass")
        if identity_of_class(function).digest() != self.recording.identities[node.op]:
            what = f"the custom autograd function {plain_name(function)}"
            raise Refusal(f"{what}, or a value that it reads, was changed by the call")
        drawn_to, is_cpu = self._generator_state(args, {}), _draws_from_cpu(args, {})
        if not is_cpu and self._generator_state((), {}) != self._cpu_drawn_from:
            raise Refusal(f"the custom autograd function {plain_name(function)} draws from two generators")
        if draws or drawn_to != self._drawn_from:
            node.draws = True
            self._note_state(continues=self._drawn_from == self._drawn_to and is_cpu)
            self._drawn_to = drawn_to if is_cpu else self._drawn_to
        self._know_results(results)
        node.result_bytes = self._result_sizes(results)
        self._end_check(node.op, results)
        self._append(node)

    def _check_kept(self, name: str, tensor: Tensor) -> None:
        """Raises Refusal if a custom function keeps a tensor that is neither its own nor an argument of anything.

        Its backward may read it after others have changed it, or write to it.
        """
        function = names.functions[name] if name in self.recording.identities else None
        if function is None or self._watch is None or self._watch.has_made(tensor) or tensor in self._interior:
            return
        key = storage_key(tensor)
        compared = identity_of_class(function).tensors
        if not self.sources.at(key) and key not in map(storage_key, compared):
            raise Refusal(
                f"the custom autograd function {plain_name(function)} keeps a tensor that is not among its arguments"
            )

    def _give_up_choices(self, refusal: Refusal) -> None:
        """Marks the call as one that workers with other hardware can't recompute. The trainer still can."""
        self._pins = None
        self.recording.has_recorded_choices, self.recording.unrecorded_choices = False, refusal.reason

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if is_plain(type(value)) or is_thin(type(value)):
                return self._ref(value)
            return self._arguments.composite(value, self._ref)
        if value is None or type(value) in CONSTANTS:
            return value
        if isinstance(value, (list, tuple)):
            return tuple([self._argument(item) for item in value])
        if isinstance(value, torch.Generator):
            return GeneratorRef()
        raise Refusal(f"an argument of type {type(value).__name__} to {self._op}")

    def _ref(self, tensor: Tensor) -> Ref:
        self._given.append(tensor)
        known = self._known.get(identity_of(tensor))
        if known is None:
            return self._source(tensor)
        # The reference leads a replay to the result of the op that made the tensor, which is no longer its memory.
        if known.data_ptr != tensor.data_ptr():
            raise Refusal("the memory of a tensor was replaced inside the function (.data =, resize_, set_)")
        if known.requires_grad != tensor.requires_grad or known.has_no_history:
            self._check_history(tensor, known)
        return known.ref

    def _check_history(self, tensor: Tensor, known: _Known) -> None:
        node = tensor.grad_fn
        # Only a write by an op gives a tensor a history. Otherwise the function has changed the flag itself, which no
        # op shows to a replay.
        if known.requires_grad != tensor.requires_grad and (known.requires_grad or node is None):
            if known.requires_grad or not isinstance(known.ref, ResultRef):
                raise Refusal("requires_grad of a tensor from outside was changed, or turned off, inside the function")
            # The function made a leaf, and no op before this one can have seen it as one.
            args = (known.ref, True)
            self._nodes.append(Node(MAKES_LEAF, args, (), self._state[1], result_bytes=(0,), draws=False))
            known.requires_grad, known.has_no_history = True, False
        if node is None:
            return
        made = self._nodes[known.ref.node] if isinstance(known.ref, ResultRef) else None
        if is_module_hook(node) and made is not None and made.op == "aten.view_as.default":
            # The function passes on what it gets, by a `view_as` that was recorded without gradients. Its hooks run on
            # the trainer, as `decide` keeps the graph of a custom function.
            state = ambient_state.with_grad(tuple(self._states)[made.ambient])
            made.ambient = self._states.setdefault(state, len(self._states))
        elif is_custom(node) and type(node) not in self._classes:
            what = f"the custom autograd function {name_of(node).removesuffix('Backward')}"
            raise Refusal(self._refused_nodes.get(type(node), what))
        # An op wrote a differentiable value to a view of the tensor, which gave the tensor a history.
        known.requires_grad, known.has_no_history = True, False

    def _source(self, tensor: Tensor) -> SourceRef:
        try:
            layout = layout_of(tensor)
        except UnsupportedTensorError as error:
            raise Refusal(error.fields["reason"]) from None
        # A replay would give such a tensor the contents that it has now, and lose its connection to the op's result.
        if tensor in self._interior:
            raise Refusal("an alias of an interior tensor that no op made (.data, NumPy)")
        # Each thread numbers its nodes itself, so an argument made by another thread may have a larger number.
        made = None if tensor.is_leaf or self.sources.is_argument(tensor) else tensor.grad_fn
        if made is not None and sequence_number(made) >= self.first_sequence:
            raise Refusal(f"a differentiable tensor that no recorded op made ({name_of(made)})")
        content = self._content(tensor, layout)
        if self._fixed is not None and isinstance(tensor, nn.Parameter) and not self.sources.is_argument(tensor):
            self._fixed.add(tensor, _contents_key(tensor, layout), content)
        address = digest_of(tensor_address, layout, content)
        if CASTS.has_stale_cast(tensor, address):
            raise Refusal(
                "autocast's cache holds a cast of a weight from before the weight changed, or of another region's dtype"
            )
        known = self.sources.alias_of(tensor, layout, address)
        if known is not None:
            ref = SourceRef(known)
            self._know(tensor, ref)
            return ref
        ref = SourceRef(self.sources.add(tensor, layout, address, is_part=self._arguments.is_in_object))
        self._know(tensor, ref)
        return ref

    def _know(self, tensor: Tensor, ref: Ref) -> None:
        requires_grad = tensor.requires_grad
        has_no_history = requires_grad and not torch.is_grad_enabled() and isinstance(ref, ResultRef)
        self._known[identity_of(tensor)] = _Known(
            ref, WeakTensorRef(tensor), tensor.data_ptr(), requires_grad, has_no_history
        )

    def _content(self, tensor: Tensor, layout: Layout) -> Digest:
        """Returns the digest of a tensor's contents. Within an op it is computed once for equal memory and version."""
        key = _contents_key(tensor, layout)
        digest = self._contents.get(key)
        if digest is None and self._fixed is not None:
            digest = self._fixed.get(key)
        if digest is None:
            with DisablePythonDispatcher(), DisableTorchDispatch():
                digest = self._contents[key] = self._digests.take(tensor, layout)
        return digest

    def _check_reads(self, op_rules: OpRules, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        written = {identity_of(tensor) for tensor in written_tensors(op_rules, args, kwargs)}
        for position, value in enumerate((*args, *kwargs.values())):
            if position in op_rules.views:
                continue
            for item in tensors_in(value):
                if identity_of(item) not in written and storage_key(item) in self._unwritten:
                    raise Refusal(f"{op_rules.name} reads memory that no op wrote (NumPy, or a custom kernel)")

    def _generator_state(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        generator = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)), None)
        generator = generator or default_generator(drawing_device(args, kwargs))
        return generator.get_state().numpy().tobytes()

    def _note_state(self, *, continues: bool) -> None:
        """Records the state before the present op, and whether the draw before has left the generator in it."""
        number = len(self.recording.generator_states)
        self.recording.continuing.add(number) if continues else self.recording.continuing.discard(number)
        self.recording.generator_states.append(self._drawn_from)

    def _save_before_writes(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor in written_tensors(rules(op), args, kwargs):
            self._save_before_write(tensor)

    def _save_before_write(self, tensor: Tensor) -> None:
        reason = unsupported_reason(tensor)
        if tensor.layout is not torch.strided or (reason and tensor not in self._interior):
            raise Refusal(f"an op writes to a {reason}")
        key = storage_key(tensor)
        if self.recording.refusal is not None:  # Rule 3
            for index in self.sources.at(key):
                self.sources.note_write(index)
            return
        self._unwritten.discard(key)
        if tensor in self._interior:
            return
        # An argument in this memory that no op has used yet must become a source before its contents change.
        for argument in self.sources.arguments:
            plain = identity_of(argument) not in self._known and unsupported_reason(argument) is None
            if plain and storage_key(argument) == key:
                self._source(argument)
        if not self.sources.at(key):
            self._source(tensor)
        indices = self.sources.at(key)
        # A replay gives each source memory of its own, so the write would not reach the others.
        if len(indices) > 1:
            self.refuse("an op writes to memory that two sources share")
        for index in indices:
            self.sources.note_write(index)
            # Autograd gives the base and its other views a new history, which no node of this call could replace.
            takes_gradients = self.recording.sources[index].requires_grad and torch.is_grad_enabled()
            if takes_gradients and is_differentiable_view(self.sources.tensors[index]):
                self.refuse("an op writes to a differentiable view of a tensor from outside")

    def _after(
        self,
        op: OpOverload,
        node: Node | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        returned: Any,
        draws: DrawRecorder | None,
    ) -> None:
        results = tensors_in(returned)
        sizes = self._result_sizes(results)
        if node is None or self.recording.refusal:
            self._check = None
            return
        self._know_results(results)
        for tensor in written_tensors(rules(op), args, kwargs):
            self._know(tensor, self._known[identity_of(tensor)].ref)
        if node.op in UNWRITTEN_RESULTS:
            self._unwritten.update(storage_key(result) for result in results if result.numel())
        node.result_bytes = sizes
        if self._check is not None and not node.draws and self._generator_state(args, kwargs) != self._drawn_from:
            node.draws = True  # though it has no tag that says so
            self._note_state(continues=False)
        self._end_check(node.op, results)
        if self._pins is not None:
            self._pin(self._pins, op, node, tensors_in((args, tuple(kwargs.values()))), results, draws)
        if node.draws and _draws_from_cpu(args, kwargs):
            self._drawn_to = self._generator_state((), {})
        self._append(node)

    def _result_sizes(self, results: list[Tensor]) -> tuple[int, ...]:
        sizes = [0 if self.sources.at(storage_key(r)) else self._interior.add(r) for r in results]
        for result in results:
            self._hidden_bytes.pop(storage_key(result), None)
        return tuple(sizes)

    def _know_results(self, results: list[Tensor]) -> None:
        for output, result in enumerate(results):
            known = self._known.get(identity_of(result))
            self._know(result, ResultRef(len(self._nodes), output) if known is None else known.ref)

    def _has_fresh_casts(self) -> bool:
        """Whether the casts of weights that the last node has seen were dropped since."""
        self._cleared_before_op = ambient_state.cleared_casts()
        return self._cleared_before_op != self._cleared

    def _append(self, node: Node) -> None:
        self._nodes.append(node)
        self._cleared = self._cleared_before_op  # not before, because an op that fails is not recorded
        self._recorded_saves, self._recorded_sources = len(self.recording.saved), len(self.recording.sources)

    def _pin(
        self,
        pins: ChoiceRecorder,
        op: OpOverload,
        node: Node,
        read: list[Tensor],
        results: list[Tensor],
        draws: DrawRecorder | None,
    ) -> None:
        """Adds a node's draws and decisions as sources, or gives them up if they can't be derived from its results."""
        try:
            noted = pins.noted(op, read, results, draws)
        except Refusal as refusal:
            if rules(op).draws:  # without its recorded draws, a replay of the node needs the generator's state
                node.draws = True
                self._note_state(continues=False)
            self._give_up_choices(refusal)
        else:
            node.given = tuple(map(self.sources.add_given, noted))

    def note_saved(self, tensor: Tensor) -> None:
        """Records a tensor that autograd saves. The pack hook calls it, in the thread of the call."""
        if not self._op:
            self.refuse(self._refused_function or FUNCTION_SAVES)
        began = perf_counter()
        try:
            self._note_saved(tensor)
        except Exception as error:  # Rule 2
            self.refuse(Refusal.of(error).reason)
            kind = Layout(tensor.dtype, () if tensor.is_nested else tuple(tensor.shape), (), device=tensor.device.type)
            self.recording.saved.append(SavedTensor(b"", self._op, kind, -1, 0))
        self.own_s += perf_counter() - began

    def _note_saved(self, tensor: Tensor) -> None:
        try:
            layout = layout_of(tensor)
        except UnsupportedTensorError as error:
            raise Refusal(f"autograd saves a {error.fields['reason']}") from None
        content = self._content(tensor, layout) if self._reads is None else self._reads
        source = next(iter(self.sources.at(storage_key(tensor))), -1)
        is_hidden = source < 0 and tensor not in self._interior and tensor not in self._hidden
        if is_hidden:
            self._check_kept(self._op, tensor)
            self._hidden_bytes[storage_key(tensor)] = self._hidden.add(tensor)
        if self.recording.refusal is None:
            self._saving_nodes = len(self._nodes) + 1
        digest, offset = digest_of(saved_digest, layout, content), int(tensor.storage_offset())
        saved = SavedTensor(digest, self._op, layout, source, offset, self._reads is not None)
        if self._pins is not None:
            is_fixed = source >= 0 and not self.recording.sources[source].is_written
            with DisablePythonDispatcher(), DisableTorchDispatch():
                saved.sketch = self._pins.saved(
                    tensor, is_hidden=is_hidden, is_undefined=saved.is_undefined, is_fixed=is_fixed
                )
        self.recording.saved.append(saved)

    def ref_of(self, tensor: Tensor) -> Ref | None:
        """Returns the reference to a tensor, or None for a tensor that no recorded op took or returned."""
        known = self._known.get(identity_of(tensor))
        return None if known is None else known.ref

    def passes_through(self, tensor: Tensor) -> bool:
        """Whether a tensor that the call returned is an argument or a captured tensor with an unchanged history."""
        ref = self.ref_of(tensor)
        if ref is None:
            return self.sources.is_argument(tensor)
        return isinstance(ref, SourceRef) and not self.sources.is_rewritten(ref.index)

    def outlived(self, outputs: Sequence[Tensor]) -> bool:
        """Whether a differentiable result that is no output is still referenced, as an auxiliary loss may be.

        Call it once the call has ended and the caller holds no reference to its inside.
        """
        expected = {identity_of(t) for output in outputs for t in (output, base_of(output)) if t is not None}
        return any(
            isinstance(known.ref, ResultRef)
            and known.requires_grad
            and not known.impl.expired()
            and not self._on_contexts.is_only_holder(cdata)
            for cdata, known in self._known.items()
            if cdata not in expected
        )

    @property
    def has_new_hooks(self) -> bool:
        """Whether any hook was registered since the call began."""
        return bool(RemovableHandle.next_id != self._first_hook)

    def has_unwritten(self, outputs: Sequence[Tensor]) -> bool:
        """Whether an output lies in memory that no op has written."""
        return bool(self._unwritten) and any(storage_key(output) in self._unwritten for output in outputs)

    def finish(self, outputs: Sequence[Tensor] = (), casts: Sequence[int] = (), *, early_stop: bool = False) -> Program:
        """Returns the program of the call, which has ended. After a refusal it covers the ops before it (Rule 3).

        Call it once: it removes the nodes and sources that the program leaves out.

        Args:
            outputs: The tensors whose gradients backward will start from.
            casts: Indices of the sources with shared casts, see `Program.casts`.
            early_stop: Whether to leave out the ops after the last one that saved a tensor. Always so after a refusal.
        """
        if self.recording.refusal is not None:
            early_stop = True
            self.sources.cut(self._recorded_sources if self._recorded_saves else 0)
        if early_stop:
            self._left_out = tuple(self._nodes[self._saving_nodes :])
            del self._nodes[self._saving_nodes :]
            del self.recording.generator_states[sum(node.draws for node in self._nodes) :]
        return self._program(
            tuple([ref for output in outputs if (ref := self.ref_of(output)) is not None]), tuple(casts)
        )

    def whole(self, program: Program, outputs: Sequence[Tensor]) -> Program | None:
        """Returns the program of `finish` with the ops that `early_stop` left out, and with outputs.

        Args:
            program: A program that is equal to the result of `finish`.
            outputs: Tensors that the call returned.

        Returns:
            The whole program, or None if it can't compute the outputs.
        """
        refs = tuple([ref for output in outputs if (ref := self.ref_of(output)) is not None])
        draws = any(node.draws for node in self._left_out)  # their generator states were left out, too
        if len(refs) < len(outputs) or draws or self.has_unwritten(outputs):
            return None
        return replace(program, nodes=program.nodes + self._left_out, outputs=refs)

    def so_far(self) -> Program:
        """Returns the ops recorded so far as a program without outputs. The call may still run."""
        return self._program(())

    def _program(self, outputs: tuple[Ref, ...], casts: tuple[int, ...] = ()) -> Program:
        return Program(
            sources=tuple(
                Source(source.requires_grad, source.is_leaf, source.is_written) for source in self.recording.sources
            ),
            nodes=tuple(self._nodes),
            ambient_states=tuple(self._states),
            outputs=outputs,
            saved_count=self._recorded_saves,
            saved_bytes=sum(self._hidden_bytes.values()) + self._scratch_bytes,
            casts=casts,
            types=tuple(self._arguments.types),
        )


FUNCTION_SAVES = "a custom autograd function saves a tensor"
"""A refusal without the function's name: when the function saves tensors, the graph has no node of it yet."""

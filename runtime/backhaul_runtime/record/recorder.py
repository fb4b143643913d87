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
6. An op that a library has composed of other ops is recorded as these, which run at the same place. So a worker needs
   nothing of the library.
7. flex_attention is one node. The functions that it takes are recorded by a mode of their own, on single numbers.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Any

from torch import Tensor

from backhaul_runtime.program.custom.names import JoinedNames
from backhaul_runtime.program.op_trace import describe_op
from backhaul_runtime.program.program import Program
from backhaul_runtime.record.call_memory import Overwritten
from backhaul_runtime.record.contents import FixedDigests
from backhaul_runtime.record.custom.custom_functions import CustomFunctions
from backhaul_runtime.record.nested_programs import attention_arguments
from backhaul_runtime.record.op_recorder import OpRecorder
from backhaul_runtime.record.running_call import RunningCall
from backhaul_runtime.record.saved_tensors import SavedTensorRecorder
from backhaul_runtime.record.sources import MakeCopy
from backhaul_runtime.torch_internals.composite_ops import is_composed
from backhaul_runtime.torch_internals.flex_attention import registered_hooks
from backhaul_runtime.torch_internals.pre_dispatch import PreDispatchMode
from backhaul_runtime.torch_internals.private import (
    DisableTorchDispatch,
    DisableTorchFunction,
    HigherOrderOperator,
    OpOverload,
)


class Recorder(PreDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records a call. Enter it around the call, then call `finish`. Not thread-safe.

    It sees ops, custom functions and saved tensors, and passes each to a recorder of its own.

    Args:
        arguments: The tensors passed to the call. They are copied at first use, because the caller may change them.
        allowed: Names of the ops that a program may hold.
        make_copy: Makes copies of tensors that may change before backward.
        pack: The pack hook that calls `note_saved`. Ops under any other hook are refused. None to check no hooks.
        op_ended: Called after each op, with whether the op is part of the program (Rule 4).
        overwritten: Called before a write to the memory of saved tensors.
        traces: Whether to describe each op in `trace`.
        records_choices: Whether to record what a replay on other hardware needs, see NOTE [Recorded choices].
        fixed: Digests of parameters that keep their values while calls share this object; None to compute all digests.
        allows: What workers run beside the ops in `allowed`.

    Attributes:
        recording: The recording. It may outlive the recorder.
        call: What is kept of the call. It lives as long as the recorder.
        custom: What is recorded of its custom functions.
        trace: A readable line for each op; None unless `traces` is set.
        own_s: Seconds of the call that recording has taken so far.
    """

    def __init__(
        self,
        arguments: Sequence[Tensor],
        allowed: frozenset[str],
        make_copy: MakeCopy,
        pack: Callable[[Tensor], object] | None = None,
        op_ended: Callable[[bool], None] = lambda _: None,
        overwritten: Overwritten = lambda *_: None,
        *,
        traces: bool = False,
        records_choices: bool = False,
        fixed: FixedDigests | None = None,
        allows: JoinedNames = JoinedNames(),  # noqa: B008  it never changes
    ) -> None:
        super().__init__()
        self.call = RunningCall(arguments, make_copy, pack, fixed, has_recorded_choices=records_choices)
        self.custom = CustomFunctions(self.call, allows)
        self.recording = self.call.recording
        self._ops = OpRecorder(self.call, allowed, self.custom)
        self._saved = SavedTensorRecorder(self.call, self.custom)
        self._op_ended, self.call.memory.overwritten = op_ended, overwritten
        self._first_hook = registered_hooks()
        self.trace: list[str] | None = [] if traces else None
        self.own_s = 0.0

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        # These refer to the caller: a cycle would keep the inside of the call alive.
        self._op_ended, self.call.memory.overwritten, self.call.states.pack = lambda _: None, lambda *_: None, None
        self.custom.end_call()

    def around(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an op and records it. Arguments are read before the op runs, results afterwards."""
        if is_composed(op):  # Rule 6
            with self.within():
                return op.decompose(*args, **kwargs)
        began, call = perf_counter(), self.call
        with DisableTorchDispatch():  # dispatch modes of the user must not see the recorder's own ops
            node = self._ops.before(op, args, kwargs)
        draws = self.recording.guarded(call.choices.draws_of, op) if node is not None else None
        self.own_s += perf_counter() - began
        try:
            with draws or nullcontext():
                returned = op(*args, **kwargs)
        except BaseException:
            self._forget_op()
            raise
        finally:
            call.op.end()
        began = perf_counter()
        with DisableTorchDispatch():
            self.recording.guarded(self._ops.after, op, node, args, kwargs, returned, draws)
            self._op_ended(self.recording.refusal is None)  # Rule 3
        if self.trace is not None:
            self.trace.append(self.recording.guarded(describe_op, op, args, kwargs, returned) or str(op))
        self.own_s += perf_counter() - began
        return returned

    def around_higher_order(
        self, name: str, op: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Runs a higher-order op. Records flex_attention as one node, with nested programs (Rule 7)."""
        began, call = perf_counter(), self.call
        given = None
        if name != "flex_attention" or kwargs:
            self.refuse(f"the higher-order op {name}")
        else:
            given = self.recording.guarded(attention_arguments, args)
        with DisableTorchDispatch():
            node = None if given is None else self._ops.before(op, given, {})
        self.own_s += perf_counter() - began
        try:
            returned = run()
        except BaseException:
            self._forget_op()
            raise
        finally:
            call.op.end()
        began = perf_counter()
        if given is not None:
            with DisableTorchDispatch():
                self.recording.guarded(self._ops.after_attention, op, node, given, returned)
        self._op_ended(self.recording.refusal is None)
        if self.trace is not None:
            self.trace.append(self.recording.guarded(describe_op, name, args, {}, returned) or name)
        self.own_s += perf_counter() - began
        return returned

    def around_function(self, function: type, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Runs a custom autograd function, and records it as one node (Rule 5)."""
        began = perf_counter()
        with DisableTorchDispatch(), DisableTorchFunction():
            node = self.custom.begin(function, args)
        self.own_s += perf_counter() - began
        if isinstance(node, str):
            return self.custom.run_refused(function, run, node)
        try:
            returned = self.custom.run(run)
        except BaseException:
            self._forget_op()
            raise
        finally:
            self.call.op.end()
        began = perf_counter()
        with DisableTorchDispatch(), DisableTorchFunction():
            self.custom.end(node, args, returned)
            self._op_ended(self.recording.refusal is None)
        if self.trace is not None:
            self.trace.append(self.recording.guarded(describe_op, node.op, args, {}, returned) or node.op)
        self.own_s += perf_counter() - began
        return returned

    def _forget_op(self) -> None:
        """Removes what was recorded of an op or function that raised an exception."""
        self.custom.drop()
        self.recording.guarded(self.call.builder.forget_op)

    def refuse(self, reason: str) -> None:
        """Sets the reason why this call can't be a program. If one is set already, it stays."""
        self.recording.refuse(reason)

    def note_saved(self, tensor: Tensor) -> None:
        """Records a tensor that autograd saves. The pack hook calls it, in the thread of the call."""
        began = perf_counter()
        self._saved.add(tensor)
        self.own_s += perf_counter() - began

    @property
    def has_new_hooks(self) -> bool:
        """Whether any hook was registered since the call began."""
        return registered_hooks() != self._first_hook

    def finish(self, outputs: Sequence[Tensor] = (), casts: Sequence[int] = (), *, early_stop: bool = False) -> Program:
        """Returns the program of the call, which has ended. After a refusal it covers the ops before it (Rule 3).

        Call it once: it removes the nodes and sources that the program leaves out.

        Args:
            outputs: The tensors whose gradients backward will start from.
            casts: Indices of the sources with shared casts, see `Program.casts`.
            early_stop: Whether to leave out the ops after the last one that saved a tensor. Always so after a refusal.
        """
        return self.call.builder.finish(self.call.known.refs_of(outputs), tuple(casts), early_stop=early_stop)

    def whole(self, program: Program, outputs: Sequence[Tensor]) -> Program | None:
        """Returns the program of `finish` with the ops that `early_stop` left out, and with outputs.

        Args:
            program: A program that is equal to the result of `finish`.
            outputs: Tensors that the call returned.

        Returns:
            The whole program, or None if it can't compute the outputs.
        """
        refs = self.call.known.refs_of(outputs)
        if len(refs) < len(outputs) or self.call.memory.interior.has_unwritten(outputs):
            return None
        return self.call.builder.whole(program, refs)

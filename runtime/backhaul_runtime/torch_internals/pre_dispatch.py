"""A mode that sees every op above autograd and autocast, and runs it unchanged.

NOTE [PreDispatch]
1. At torch's PreDispatch key, composite ops (linear, layer_norm, scaled_dot_product_attention) are still single ops.
   So a replay of them builds the same autograd graph as forward. Torch admits only subclasses of ProxyTorchDispatchMode
   at this key; the tracing of that class is not used.
2. Ops run with the Python dispatcher off. If it were on, torch would substitute decompositions, whose results differ in
   bits.
3. Torch keeps one stack of such modes per process, though each thread has its own switch for it. Two threads in a mode
   would pop each other's. So the stack is replaced by one that each thread has for itself.
4. Torch's own path from an op to its mode costs more than all that the mode does. So the first call of an op stores a
   shorter path in the op's dispatch cache, where torch looks first.
5. An op inside a vmap is not passed to `around`. It goes on below the PreDispatch key with the mode still on the stack.
   Then vmap translates it to ops on plain tensors, and runs these outside of its level, where they reach the mode.
6. While one thread looks a path up that the cache lacks, another may store one. Torch raises an error then, so its
   method is replaced by one that takes what is there.
7. A custom autograd function is no op. All calls of its `apply` reach `_FunctionBase.apply`, also if code has bound
   `apply` before, so a method of the same name in a class between them sees every call.
8. Autograd runs the nodes of an accelerator in a thread of the device, which inherits the caller's switch but not its
   stack. A backward inside of a mode therefore runs in the thread that calls it, where the mode sees its ops.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch._library.utils import handle_dispatch_mode
from torch._ops import HigherOrderOperator, OpOverload, _higher_order_ops
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily, _push_mode

from backhaul_runtime.torch_internals.private import is_in_vmap


class PreDispatchMode(ProxyTorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes every op of the thread that enters it to `around`, until it is left. Subclasses override `around`."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)  # type: ignore[no-untyped-call]
        self._mode_key = torch._C._TorchDispatchModeKey.PROXY
        self.tracer: Any = SimpleNamespace(enable_thunkify=False)  # torch reads it from every ProxyTorchDispatchMode
        self._dispatcher: Any = None
        self._was_multithreaded = True
        _register_higher_order_ops(type(self))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler at the first op

    def __enter__(self) -> Self:
        stale = _stack.get(_OURS)
        if isinstance(stale, PreDispatchMode):  # Ctrl-C has kept it from being left
            stale.__exit__(None, None, None)
        self._was_multithreaded = torch._C._is_multithreading_enabled()
        self._dispatcher = torch._C._EnablePythonDispatcher()
        try:
            self._dispatcher.__enter__()
            torch._C._set_multithreading_enabled(False)  # Rule 8
            # Not torch's __enter__: it notes in a variable of the process which modes are entered (Rule 3).
            _push_mode(self)
            return self
        except BaseException:  # Ctrl-C
            self._leave()
            raise

    def __exit__(self, *exception: Any) -> None:
        self._leave()

    def _leave(self) -> None:
        """Undoes `__enter__`, which Ctrl-C may have cut short, or an op's return to the mode."""
        try:
            _stack.set(_OURS, None)
        finally:
            torch._C._dispatch_tls_set_dispatch_key_included(_KEY, _stack.get(_OTHERS) is not None)
            torch._C._set_multithreading_enabled(self._was_multithreaded)
            self._dispatcher.__exit__(None, None, None)

    def __torch_dispatch__(
        self, op: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Passes an op to `around`, with the Python dispatcher off (Rule 2)."""
        op._dispatch_cache[_KEY] = partial(_dispatched, op)  # Rule 4
        if is_in_vmap():
            return self._again(op, args, kwargs or {})
        with torch._C._DisablePythonDispatcher():
            return self.around(op, args, kwargs or {})

    def _again(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an op of a vmap with the mode back on the stack, from which torch has taken it for this call."""
        _stack.set(_OURS, self)
        try:
            with _included([_KEY], True):
                return _through_vmap(op, args, kwargs)
        finally:
            _stack.set(_OURS, None)

    def around(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the op and returns what it returned."""
        raise NotImplementedError

    def around_function(self, function: type, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Calls `run`, which applies a custom autograd function, and returns what it returned (Rule 7)."""
        return run()

    @contextmanager
    def within(self) -> Iterator[None]:
        """Takes the place of the mode that the thread is in, if any, until it is left."""
        before, was_on = _stack.get(_OURS), torch._C._dispatch_tls_is_dispatch_key_included(_KEY)
        with (
            nullcontext() if was_on else torch._C._EnablePythonDispatcher(),
            torch.autograd.set_multithreading_enabled(False),
        ):
            _stack.set(_OURS, self)
            torch._C._dispatch_tls_set_dispatch_key_included(_KEY, True)
            try:
                yield
            finally:
                _stack.set(_OURS, before)
                torch._C._dispatch_tls_set_dispatch_key_included(_KEY, was_on)

    def around_higher_order(
        self, name: str, op: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Calls `run`, which runs a higher-order op unseen by the mode, and returns what it returned."""
        self.refuse(f"the higher-order op {name}")
        return run()

    def refuse(self, reason: str) -> None:
        """Called for what the mode does not see, with the reason as a text."""
        raise NotImplementedError


class _OwnStack(threading.local, torch._ops._ModeStackStateForPreDispatch):
    """A stack of modes for each thread, with the interface of torch's stack for the process (Rule 3)."""


_KEY = torch._C.DispatchKey.PreDispatch
_OURS, _OTHERS = 0, 1  # the stack has one place for proxy modes and one for functional modes
_stack: Any = _OwnStack()  # type: ignore[no-untyped-call]
torch._ops._mode_stack_state_for_pre_dispatch = _stack


def _dispatched(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Runs an op through the mode on the stack, and takes the mode off the stack meanwhile, as torch does (Rule 4)."""
    if torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python):  # dispatch modes are disabled
        return op._op_dk(_KEY, *args, **kwargs)
    mode = _stack.get(_OURS)
    if not isinstance(mode, PreDispatchMode) or _stack.get(_OTHERS) is not None:
        with _pop_mode_temporarily(_KEY) as other:
            return handle_dispatch_mode(other, op, *args, **kwargs)  # type: ignore[no-untyped-call]
    if is_in_vmap():
        return _through_vmap(op, args, kwargs)
    _stack.set(_OURS, None)
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, False)
    try:
        with torch._C._DisablePythonDispatcher():
            return mode.around(op, args, kwargs)
    finally:
        _stack.set(_OURS, mode)
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, True)


def _through_vmap(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an op of a vmap so that the ops on plain tensors to which vmap translates it reach the mode (Rule 5)."""
    is_included = torch._C._dispatch_tls_is_dispatch_key_included
    if is_included(_VMAP_ENTRY) and not torch._C._dispatch_tls_is_dispatch_key_excluded(_VMAP_ENTRY):
        # Here vmap notes which keys are included, and includes the same keys for the ops on plain tensors.
        return op._op_dk(_VMAP_ENTRY, *args, **kwargs)
    keys = [key for key in (_KEY, torch._C.DispatchKey.PythonDispatcher) if is_included(key)]
    with _included(keys, False):
        return op(*args, **kwargs)


_VMAP_ENTRY = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode


@contextmanager
def _included(keys: Sequence[Any], is_included: bool) -> Iterator[None]:
    """Includes keys in this thread's dispatch of ops, or excludes them, until it is left."""
    for key in keys:
        torch._C._dispatch_tls_set_dispatch_key_included(key, is_included)
    try:
        yield
    finally:
        for key in keys:
            torch._C._dispatch_tls_set_dispatch_key_included(key, not is_included)


_registered: set[tuple[str, type[PreDispatchMode]]] = set()
_counts: dict[type[PreDispatchMode], int] = {}  # of the higher-order ops when a class was registered last


def _register_higher_order_ops(mode: type[PreDispatchMode]) -> None:
    """Registers a rule for `mode` with each higher-order op. Such an op raises an exception for modes without one."""
    if _counts.get(mode) == len(_higher_order_ops):
        return
    _counts[mode] = len(_higher_order_ops)
    for name, op in list(_higher_order_ops.items()):
        if (name, mode) not in _registered:
            _registered.add((name, mode))
            op.python_key_table.setdefault(mode, _higher_order_rule(name, op))


def _higher_order_rule(name: str, op: HigherOrderOperator) -> Callable[..., Any]:
    def rule(mode: PreDispatchMode, *args: Any, **kwargs: Any) -> Any:
        with torch._C._DisablePythonDispatcher():
            return mode.around_higher_order(name, op, args, kwargs, partial(op, *args, **kwargs))

    return rule


@contextmanager
def unobserved() -> Iterator[None]:
    """Takes the thread out of the mode that it is in, if any, until it is left: the mode sees no op and no function."""
    before, was_on = _stack.get(_OURS), torch._C._dispatch_tls_is_dispatch_key_included(_KEY)
    _stack.set(_OURS, None)
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, False)
    try:
        with torch._C._DisablePythonDispatcher():
            yield
    finally:
        _stack.set(_OURS, before)
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, was_on)


_look_up: Any = OpOverload._get_dispatch


def _looked_up(op: Any, key: Any) -> Any:
    """Returns the path from an op at a dispatch key, also if another thread has just stored one (Rule 6)."""
    try:
        return _look_up(op, key)
    except AssertionError:
        if key not in op._dispatch_cache:
            raise
        return op._dispatch_cache[key]


OpOverload._get_dispatch = _looked_up  # type: ignore[assignment, method-assign]


_apply_function: Any = torch._C._FunctionBase.__dict__["apply"]


def _applied(cls: type, *args: Any, **kwargs: Any) -> Any:
    """Passes the call of a custom autograd function to the mode of the thread, if it is in one (Rule 7)."""
    apply = _apply_function.__get__(None, cls)
    mode = _stack.get(_OURS)
    if not isinstance(mode, PreDispatchMode) or is_in_vmap():
        return apply(*args, **kwargs)
    if kwargs:
        mode.refuse(f"the custom autograd function {cls.__name__} has keyword arguments")
    return mode.around_function(cls, args, partial(apply, *args, **kwargs))


torch.autograd.function._SingleLevelFunction.apply = classmethod(_applied)  # type: ignore[attr-defined]


_apply_backward: Any = torch.autograd.function.BackwardCFunction.apply
BACKWARD_MODE = "_backhaul_backward_mode"
"""The attribute of a node that `observe_backward` sets."""


def observe_backward(node: Any, around: Callable[[tuple[Any, ...]], AbstractContextManager[Any]]) -> None:
    """Runs the backward of one custom autograd function inside a context manager.

    Args:
        node: The function's node in the graph.
        around: Returns the context manager, from the gradients that the backward gets.
    """
    setattr(node, BACKWARD_MODE, around)
    notice_backwards(type(node))


def notice_backwards(node_class: Any) -> None:
    """Makes the backwards of one custom autograd function, given by the class of its nodes, known to `after_backward`.

    Those of other functions run as torch runs them.
    """
    node_class.apply = _backward_applied


def after_backward(check: Callable[[], object]) -> None:
    """Calls `check` when the custom backward that runs in this thread has ended without an exception, if one is known.

    Of backwards inside of each other it is the innermost one.
    """
    if _running.checks:
        _running.checks[-1].append(check)


class _RunningBackwards(threading.local):
    """The custom backwards that a thread runs, from outside to inside, each as the list of checks that follow it."""

    def __init__(self) -> None:
        self.checks: list[list[Callable[[], object]]] = []


_running = _RunningBackwards()


def _backward_applied(node: Any, *args: Any) -> Any:
    around = getattr(node, BACKWARD_MODE, None)
    checks: list[Callable[[], object]] = []
    _running.checks.append(checks)
    try:
        with nullcontext() if around is None else around(args):
            returned = _apply_backward(node, *args)
    finally:
        _running.checks.pop()
    for check in checks:
        check()
    return returned

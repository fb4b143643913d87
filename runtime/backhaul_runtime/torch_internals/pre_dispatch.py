"""A mode that sees every op above autograd and autocast, and runs it untouched.

NOTE [PreDispatch]
1. Torch's PreDispatch key is where composite ops (linear, layer_norm, scaled_dot_product_attention) are still whole, so
   a replay makes autograd's graph itself. Torch admits only subclasses of ProxyTorchDispatchMode there; none of that
   class's tracing is used.
2. Ops run with the Python dispatcher off. On, torch would swap in decompositions, and other bits.
3. Torch keeps the stack of such modes once for the process, though each thread has its own switch for it: two threads
   in a mode would pop each other's. So the stack is made each thread's own.
4. Torch's way from an op to its mode is longer than ours from there on. So an op that came that way leaves a shorter
   one behind it, where torch looks first.
"""

import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch._library.utils import handle_dispatch_mode
from torch._ops import HigherOrderOperator, OpOverload, _higher_order_ops
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _pop_mode_temporarily, _push_mode


class PreDispatchMode(ProxyTorchDispatchMode):  # type: ignore[no-untyped-call]
    """Enter it around code whose ops are to go through `around`."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)  # type: ignore[no-untyped-call]
        self._mode_key = torch._C._TorchDispatchModeKey.PROXY
        self.tracer: Any = SimpleNamespace(enable_thunkify=False)  # torch asks any mode of our class for it
        self._dispatcher: Any = None
        _register_higher_order_ops(type(self))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler at the first op

    def __enter__(self) -> Self:
        self._dispatcher = torch._C._EnablePythonDispatcher()
        self._dispatcher.__enter__()
        _push_mode(self)  # not torch's __enter__: its notes of who is in a mode are the process's too (Rule 3)
        return self

    def __exit__(self, *exception: Any) -> None:
        _pop_mode(torch._C.DispatchKey.PreDispatch)
        self._dispatcher.__exit__(*exception)

    def __torch_dispatch__(
        self, op: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Hands an op to `around` (Rule 2)."""
        op._dispatch_cache[_KEY] = partial(_dispatched, op)  # Rule 4
        with torch._C._DisablePythonDispatcher():
            return self.around(op, args, kwargs or {})

    def around(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the op and returns what it returned."""
        raise NotImplementedError

    def refuse(self, reason: str) -> None:
        """Called for an op that the mode cannot look into, with the reason."""
        raise NotImplementedError


class _OwnStack(threading.local, torch._ops._ModeStackStateForPreDispatch):
    """Rule 3."""


_KEY = torch._C.DispatchKey.PreDispatch
_OURS, _OTHERS = 0, 1  # places in the stack
_stack: Any = _OwnStack()  # type: ignore[no-untyped-call]
torch._ops._mode_stack_state_for_pre_dispatch = _stack


def _dispatched(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Rule 4. As torch does it, the mode is away for the time."""
    if torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python):  # no mode may see the op
        return op._op_dk(_KEY, *args, **kwargs)
    mode = _stack.get(_OURS)
    if not isinstance(mode, PreDispatchMode) or _stack.get(_OTHERS) is not None:
        with _pop_mode_temporarily(_KEY) as other:
            return handle_dispatch_mode(other, op, *args, **kwargs)  # type: ignore[no-untyped-call]
    _stack.set(_OURS, None)
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, False)
    try:
        with torch._C._DisablePythonDispatcher():
            return mode.around(op, args, kwargs)
    finally:
        _stack.set(_OURS, mode)
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, True)


_registered: set[tuple[str, type[PreDispatchMode]]] = set()


def _register_higher_order_ops(mode: type[PreDispatchMode]) -> None:
    """Higher-order ops ask each mode for a rule of its own and raise where there is none: ours refuses and lets run."""
    for name, op in list(_higher_order_ops.items()):
        if (name, mode) not in _registered:
            _registered.add((name, mode))
            op.python_key_table.setdefault(mode, _higher_order_rule(name, op))


def _higher_order_rule(name: str, op: HigherOrderOperator) -> Callable[..., Any]:
    def rule(mode: PreDispatchMode, *args: Any, **kwargs: Any) -> Any:
        mode.refuse(f"the higher-order op {name}")
        with torch._C._DisablePythonDispatcher():
            return op(*args, **kwargs)

    return rule

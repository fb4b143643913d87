"""Watches a custom autograd function while it runs, so that one node can stand for it.

The ops inside it are not recorded. But some of them matter to what is recorded around the function: those that write to
memory from outside, that communicate, or that build a graph of their own. And a replay draws only from torch's default
generators what forward has drawn, and its default device is the CPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from backhaul_runtime.program.op_rules import rules, tensors_in, written_tensors
from backhaul_runtime.torch_internals.default_device import watched_default_device
from backhaul_runtime.torch_internals.generators import states_outside_torch
from backhaul_runtime.torch_internals.pre_dispatch import PreDispatchMode
from backhaul_runtime.torch_internals.private import DisableTorchDispatch, OpOverload
from backhaul_runtime.torch_internals.storages import StorageLedger


class FunctionWatch(PreDispatchMode):  # type: ignore[no-untyped-call]
    """Passes on every op of a custom autograd function. Call `begin`, then enter it with `within`.

    Args:
        writes: Called with each tensor from outside that an op is about to write to.
        refuse: Called with the reason why no node can stand for the function.

    Attributes:
        draws: Whether an op has drawn random numbers, perhaps from a generator that is restored afterwards.
        made_bytes: Bytes of all memory that the ops have made.
    """

    def __init__(self, writes: Callable[[Tensor], object], refuse: Callable[[str], None]) -> None:
        super().__init__()
        self._writes, self._note_refusal = writes, refuse
        self.begin("")

    def begin(self, name: str) -> None:
        """Begins to watch the next function, given by its name for reasons."""
        self._name = name
        self._made = StorageLedger()
        self.made_bytes = 0
        self.draws = self._has_written = False

    @contextmanager
    def within(self) -> Iterator[None]:
        """Watches a function while it runs, see `PreDispatchMode.within`."""
        before = states_outside_torch()
        try:
            with watched_default_device(self._refuse_default_device), super().within():
                yield
        except BaseException:
            if self._has_written:  # no node stands for a function that raised an exception, so a replay does not write
                self._note_refusal(f"the custom autograd function {self._name} fails after a write to an argument")
            raise
        if states_outside_torch() != before:
            self._note_refusal(f"the custom autograd function {self._name} draws random numbers outside of torch")

    def _refuse_default_device(self) -> None:
        self._note_refusal(f"the custom autograd function {self._name} makes a tensor on the default device")

    def has_made(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory that an op inside the function has made."""
        return tensor in self._made

    def around(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an op, after noting what it writes to."""
        op_rules = rules(op)
        self.draws |= op_rules.draws
        if op_rules.draws and any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
            self._note_refusal(f"the custom autograd function {self._name} draws from a generator of its own")
        if op_rules.written or op_rules.is_collective or torch.is_grad_enabled():
            with DisableTorchDispatch():
                if op_rules.is_collective:
                    self._note_refusal(f"the custom autograd function {self._name} communicates with other ranks")
                elif torch.is_grad_enabled():
                    self._note_refusal(f"the custom autograd function {self._name} takes gradients inside its forward")
                for tensor in written_tensors(op_rules, args, kwargs):
                    if tensor not in self._made:
                        self._has_written = True
                        self._writes(tensor)
        returned = op(*args, **kwargs)
        for result in tensors_in(returned):
            if result.layout is torch.strided:
                self.made_bytes += self._made.add(result)
        return returned

    def refuse(self, reason: str) -> None:
        """Notes a higher-order op inside the function."""
        self._note_refusal(f"the custom autograd function {self._name} calls {reason}")

"""Keeps custom autograd functions from writing to lent memory: NOTE [Lent memory] in `replay`."""

from collections.abc import Collection
from typing import Any

from backhaul_runtime.errors import ProgramError, ReplayError
from backhaul_runtime.program.op_rules import rules, written_tensors
from backhaul_runtime.torch_internals.pre_dispatch import PreDispatchMode
from backhaul_runtime.torch_internals.private import OpOverload
from backhaul_runtime.torch_internals.storages import storage_key


class LentMemoryGuard(PreDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the ops of one custom function of a program on a worker. Enter it with `within`.

    Args:
        name: The name of the function, for messages.
        lent: Keys of the storages that no op may write to.
    """

    def __init__(self, name: str, lent: Collection[int]) -> None:
        super().__init__()
        self._name = name
        self._lent = lent

    def around(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an op. Raises ProgramError for a write to lent memory, and ReplayError for a collective."""
        op_rules = rules(op)
        if op_rules.is_collective:
            raise ReplayError(f"{self._name} communicates with other ranks", op=self._name)
        for tensor in written_tensors(op_rules, args, kwargs):
            if storage_key(tensor) in self._lent:
                raise ProgramError(
                    f"{self._name} would write into a source that the program does not declare as written",
                    op=self._name,
                )
        return op(*args, **kwargs)

    def refuse(self, reason: str) -> None:
        """Does nothing: a higher-order op inside a function is the function's own matter."""

"""What a replay does with custom autograd functions and with ops of other libraries: what `--allow` needs."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from backhaul_runtime.errors import BackhaulError, ReplayError
from backhaul_runtime.program.custom.names import names
from backhaul_runtime.program.op_rules import tensors_in
from backhaul_runtime.program.program import Program
from backhaul_runtime.replay.custom.function_backwards import FunctionBackwards
from backhaul_runtime.replay.custom.lent_memory_guard import LentMemoryGuard
from backhaul_runtime.replay.custom.opaque_check import OpaqueCheck
from backhaul_runtime.replay.saved_tensors import SavedTensorPacker
from backhaul_runtime.torch_internals.graph_uses import is_custom
from backhaul_runtime.torch_internals.private import DisableTorchDispatch, DisableTorchFunction


class CustomExecution:
    """The functions of one replay, and its nodes that are checked as a whole, see `OpaqueCheck`.

    Args:
        program: The program that is replayed.
        packing: Gets the digests of these checks among those of saved tensors.
        lent: Keys of the storages of sources, which the program may not write to.
        is_own: Whether this process recorded the program.

    Attributes:
        node_classes: The classes of the autograd nodes that the functions have made.
    """

    def __init__(self, program: Program, packing: SavedTensorPacker, lent: Collection[int], *, is_own: bool) -> None:
        self.node_classes: set[type] = set()
        self._functions = program.functions
        self._packing = packing
        self._lent = lent
        self._is_own = is_own
        self._nodes: list[tuple[str, Node]] = []  # each with the name of its function

    def run(self, name: str, args: Sequence[Any]) -> list[Tensor]:
        """Runs a custom autograd function from this process's own table of names."""
        function = names.function(name)
        try:
            with self._around(name):
                return tensors_in(function.apply(*args))
        except BackhaulError:
            raise
        except Exception as error:
            if self._is_own:  # the user's code, which may raise anything, has raised it
                raise
            raise ReplayError(f"{name} failed on replay: {error}", op=name) from error

    @contextmanager
    def _around(self, name: str) -> Iterator[None]:
        """Keeps a custom function from writing to lent memory, and from leaving an autocast region of forward."""
        torch.autocast_increment_nesting()  # else a region inside the function would clear the casts of those around it
        try:
            with nullcontext() if self._is_own else LentMemoryGuard(name, self._lent).within():
                yield
        finally:
            torch.autocast_decrement_nesting()

    def begin_check(self, name: str, tensors: Sequence[Tensor]) -> OpaqueCheck:
        """Begins the check of a node that is about to run, of whose arguments these are the tensors."""
        check = OpaqueCheck(self._packing.take)
        with _checking(name):
            check.add(tensors)
        return check

    def end_check(self, name: str, check: OpaqueCheck, results: Sequence[Tensor]) -> None:
        """Adds what a node has returned and kept to its check, and notes the digest."""
        nodes = {id(node): node for result in results if (node := result.grad_fn) is not None and is_custom(node)}
        self.node_classes |= set(map(type, nodes.values()))
        self._nodes += [(name, node) for node in nodes.values()]
        with _checking(name):
            check.add(results)
            check.add_contexts(results)
        self._packing.of_functions[name] |= check.storages
        self._packing.note(check.digest())

    def check_identities(self) -> None:
        """Raises ReplayError on a worker if a function has changed what it reads beside its arguments.

        Another session may have run it, so each forward and each backward is checked when it has ended.
        """
        if not self._is_own:
            for name in self._functions:
                names.check_identity(name)

    def backward(self, sources: Sequence[Tensor], outputs: Mapping[int, Tensor]) -> FunctionBackwards:
        """Returns what watches the functions in a backward that is about to run.

        Args:
            sources: The sources of the program.
            outputs: Its outputs by number, see `Contribution.source`.
        """
        reach = self._packing.of_functions
        return FunctionBackwards(self._functions, self._nodes, sources, outputs, reach, self._lent, is_own=self._is_own)


@contextmanager
def _checking(name: str) -> Iterator[None]:
    """Turns whatever prevents the check of a node into a ReplayError: a client may have made the function keep it."""
    try:
        with DisableTorchDispatch(), DisableTorchFunction():
            yield
    except Exception as error:
        raise ReplayError(f"what {name} reads, returns and keeps can't be compared: {error}", op=name) from error

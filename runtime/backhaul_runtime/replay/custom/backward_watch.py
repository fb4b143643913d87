"""Detects what the backward of a custom autograd function must do on the trainer only.

Torch's own backward formulas neither draw nor write to memory of others. A custom function may draw, and then draws
from the generator as backward finds it, which a worker does not know. It may also write to a tensor that others read
later, such as statistics of gradients, and then the trainer's own tensor would stay as it was. And it may read a tensor
that nothing compares with the trainer's, for example one in a dict of its module. So such a backward only runs on the
trainer.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from backhaul_runtime.errors import ReplayError
from backhaul_runtime.program.custom.code_identity import identity_of_class
from backhaul_runtime.program.op_rules import rules, tensors_in, written_tensors
from backhaul_runtime.replay.custom.context_state import context_digest, is_changed
from backhaul_runtime.tensors.deferred_digest import Digest
from backhaul_runtime.torch_internals.generators import default_generator, states_outside_torch
from backhaul_runtime.torch_internals.pre_dispatch import PreDispatchMode, observe_backward
from backhaul_runtime.torch_internals.private import (
    DisableTorchDispatch,
    OpOverload,
    identity_of,
    is_thin,
)
from backhaul_runtime.torch_internals.storages import StorageLedger, storage_key


class BackwardWatch:
    """Watches the nodes of custom functions during one backward. Call `end` afterwards.

    Args:
        nodes: The nodes of custom functions, each with the name of its function.
        devices: Devices whose default generators are looked at, beside that of the CPU.
        own: Keys of the storages that the replay has made, which backward may write to.
        lent: Keys of the storages of sources, which backward may read.
    """

    def __init__(
        self,
        nodes: Iterable[tuple[str, Node]],
        devices: Iterable[torch.device],
        own: Collection[int],
        lent: Collection[int],
    ) -> None:
        self._generators = [default_generator(device) for device in {torch.device("cpu"), *devices}]
        self._own, self._lent = own, lent
        self._contexts: list[tuple[str, Digest | None, Digest | None]] = []  # before and after each backward
        self.reason = self.function = ""
        for name, node in nodes:
            observe_backward(node, _Around(self, name, node, _compared_by(node)))

    def end(self) -> None:
        """Ends the watch. Raises ReplayError if a backward must run on the trainer. May wait for an accelerator."""
        for name, before, after in self._contexts:
            if not self.reason and is_changed(before, after):
                self.note(name, CHANGES)
        if self.reason:
            raise ReplayError(f"the backward of {self.function} {self.reason}", function=self.function)

    def note(self, function: str, reason: str) -> None:
        """Notes why the backward of a function must run on the trainer, unless a reason is known."""
        if not self.reason:
            self.function, self.reason = function, reason

    @contextmanager
    def within(self, name: str, node: Node, gradients: tuple[Any, ...], compared: Collection[int]) -> Iterator[None]:
        """Watches one backward, in the thread that runs it."""
        before, context = self._states(), context_digest(node)
        given = tensors_in(gradients)
        own = {*self._own, *[storage_key(tensor) for tensor in given if _has_storage(tensor)]}
        ops = _Ops(self, name, own, {*self._lent, *compared})
        for tensor in given:
            ops.note_own(tensor)
        with ops.within():
            yield
        if self._states() != before:
            self.note(name, _DRAWS)
        self._contexts.append((name, context, context_digest(node)))

    def _states(self) -> list[Any]:
        states: list[Any] = [generator.get_state().numpy().tobytes() for generator in self._generators]
        return [*states, *states_outside_torch()]


class _Around:
    """Makes the context manager for one node."""

    def __init__(self, watch: BackwardWatch, name: str, node: Node, compared: Collection[int]) -> None:
        self._watch, self._name, self._node, self._compared = watch, name, node, compared

    def __call__(self, gradients: tuple[Any, ...]) -> Any:
        return self._watch.within(self._name, self._node, gradients, self._compared)


class _Ops(PreDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the ops of one backward. It also notes why it raises an error, because the function might catch that."""

    def __init__(self, watch: BackwardWatch, name: str, own: Collection[int], readable: Collection[int]) -> None:
        super().__init__()
        self._watch, self._name, self._own, self._readable = watch, name, own, readable
        self._made = StorageLedger()
        self._others: dict[int, Tensor] = {}  # tensors without a storage of their own that are this backward's

    def around(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op_rules = rules(op)
        if op_rules.is_collective:
            self._watch.note(self._name, "communicates with other ranks")
            self._watch.end()
        if op_rules.draws:  # perhaps from a generator that is restored afterwards
            self._watch.note(self._name, _DRAWS)
        if op_rules.written:
            self._check_writes(op, args, kwargs)
        if op_rules.name != _NEW:
            self._check_reads(tensors_in((args, tuple(kwargs.values()))))
        returned = op(*args, **kwargs)
        for result in tensors_in(returned):
            if result.layout is torch.strided:
                self._made.add(result)
            self.note_own(result)
        return returned

    def note_own(self, tensor: Tensor) -> None:
        """Notes a tensor that this backward gets or makes, if no storage shows that."""
        if not _has_storage(tensor):
            self._others[identity_of(tensor)] = tensor

    def _check_writes(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with DisableTorchDispatch():
            for tensor in written_tensors(rules(op), args, kwargs):
                if not self._is_own(tensor):
                    self._watch.note(self._name, WRITES)
                    self._watch.end()

    def _check_reads(self, tensors: Iterable[Tensor]) -> None:
        with DisableTorchDispatch():
            if not all(map(self._may_read, tensors)):
                self._watch.note(self._name, _READS)

    def _may_read(self, tensor: Tensor) -> bool:
        if _has_storage(tensor):
            return self._is_own(tensor) or storage_key(tensor) in self._readable
        inner = getattr(tensor, "__tensor_flatten__", None)  # of a tensor subclass
        if identity_of(tensor) in self._others or inner is None:
            return identity_of(tensor) in self._others
        return all(self._may_read(getattr(tensor, name)) for name in inner()[0])

    def _is_own(self, tensor: Tensor) -> bool:
        return tensor in self._made or storage_key(tensor) in self._own

    def refuse(self, reason: str) -> None:
        """Does nothing: a higher-order op inside a backward is the function's own matter."""


def _has_storage(tensor: Tensor) -> bool:
    """Whether a tensor's elements lie in a storage, and not in other tensors as those of a sparse one do."""
    return is_thin(type(tensor)) and tensor.layout is torch.strided


def _compared_by(node: Node) -> set[int]:
    """Returns the keys of the storages of tensors that the identity of a custom function covers."""
    given: Any = node
    return {storage_key(tensor) for tensor in identity_of_class(given._forward_cls).tensors}


_NEW = "aten.lift_fresh.default"
"""The op that `torch.tensor` calls with a tensor that no op has made."""

_DRAWS = "draws random numbers, and only the trainer's generators can give those of a run without checkpointing"
WRITES = "writes to a tensor that is not its own, and the trainer's tensor would stay as it was"
CHANGES = "changes its context, and a later backward over the same graph would see that"
"""Why the backward of a function runs on the trainer only, and only once over a graph."""
_READS = "reads a tensor that is not compared with the trainer's, as in a dict or an object of its module"

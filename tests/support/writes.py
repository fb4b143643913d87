"""What ops write to and what they return, seen in memory itself instead of read off a schema."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch._C import _DisableTorchDispatch
from torch._ops import OpOverload

from backhaul_runtime.program.op_rules import tensors_in
from backhaul_runtime.record.recorder import Recorder
from backhaul_runtime.torch_internals.storages import storage_key

CALLS_OF_A_KIND = 2
"""Calls of an op with dtypes and flags that are looked at."""

Contents = dict[int, tuple[Tensor, Tensor]]
"""By storage: its bytes, and a copy of what they were."""


class Memory:
    """What calls of ops have done to the memory of their arguments.

    Attributes:
        seen: Ops that were looked at.
        hidden_writes: Ops that wrote to an argument which their schema does not name as written.
        hidden_aliases: Ops that returned memory of an argument which their schema does not name as aliased.
    """

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.hidden_writes: set[str] = set()
        self.hidden_aliases: set[str] = set()
        self._calls: Counter[Any] = Counter()

    def called(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], run: Any) -> Any:
        """Calls an op by a function, and looks at its arguments before and after."""
        given = [*args, *kwargs.values()]
        kind = [v.dtype if isinstance(v, Tensor) else v for v in given if isinstance(v, (Tensor, bool, type(None)))]
        call = (op, *kind)
        self._calls[call] += 1
        if self._calls[call] > CALLS_OF_A_KIND:
            return run(op, args, kwargs)
        with _DisableTorchDispatch(), torch._C._DisablePythonDispatcher(), torch.no_grad():
            contents: Contents = {}
            for tensor in tensors_in(given):
                _note(tensor, contents)
            marked = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
            aliased, written = set[int](), set[int]()
            for argument in op._schema.arguments:
                info = argument.alias_info
                if info is None:
                    continue
                for tensor in tensors_in(marked.get(argument.name)):
                    if tensor.layout is torch.strided:
                        (written if info.is_write else aliased).add(storage_key(tensor))
        returned = run(op, args, kwargs)
        with _DisableTorchDispatch(), torch._C._DisablePythonDispatcher(), torch.no_grad():
            name = str(op)
            self.seen.add(name)
            if any(key not in written and not torch.equal(now, was) for key, (now, was) in contents.items()):
                self.hidden_writes.add(name)
            returned_keys = {storage_key(tensor) for tensor in tensors_in(returned) if tensor.layout is torch.strided}
            if returned_keys & contents.keys() - aliased - written:
                self.hidden_aliases.add(name)
        return returned

    def recorder(self, *given: Any) -> Recorder:
        """A recorder whose ops are looked at."""
        recorder = _Watching(*given)
        recorder.memory = self
        return recorder


class _Watching(Recorder):
    memory: Memory

    def around(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.memory.called(op, args, kwargs, super().around)


def _note(tensor: Tensor, contents: Contents) -> None:
    if tensor.layout is not torch.strided or tensor._is_zerotensor() or storage_key(tensor) in contents:
        return
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    contents[storage_key(tensor)] = memory, memory.clone()


def sample_of(op: OpOverload) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments that an op takes, made up from its schema."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in op._schema.arguments:
        value = _value(argument)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


_BY_NAME: dict[str, Any] = {
    "index": lambda: torch.tensor([[0, 1], [1, 0]]),
    "condition": lambda: torch.tensor([[True, False], [False, True]]),
    "repeats": lambda: torch.tensor([1, 2]),
    "indices": lambda: [1],
    "spacing": lambda: [0.5, 0.5],
    "ord": lambda: 2.0,
    "scale_factors": lambda: [2.0, 2.0],
    "output_size": lambda: None,
    "size": lambda: [2, 2],
    "high": lambda: 5,
    "low": lambda: 1,
    "n": lambda: 5,
    "sections": lambda: 2,
}


def _value(argument: Any) -> Any:
    kind = str(argument.type)
    if argument.name in _BY_NAME and not (argument.name == "spacing" and "Tensor" in kind):
        return _BY_NAME[argument.name]()
    if "Generator" in kind:
        return torch.Generator()
    if argument.has_default_value() and argument.default_value is not None:
        return argument.default_value
    return {
        "Tensor": lambda: torch.rand(2, 2),
        "List[Tensor]": lambda: [torch.rand(2), torch.rand(2)],
        "number": lambda: 0.5,
        "int": lambda: 1,
        "List[int]": lambda: [0, 1],
    }.get(kind, lambda: None)()

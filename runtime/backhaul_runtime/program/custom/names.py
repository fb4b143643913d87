"""Names beside torch's own ops that programs may hold: custom autograd functions, ops of other libraries, and types.

NOTE [Names]
1. A program names a function or a type, and the process that replays it looks the name up in its table. A name that is
   not in the table is refused. Nothing is imported for a name.
2. A worker's table is filled once, before it serves anyone, from the list that its operator gave. A trainer's table has
   what it has recorded itself, for its own replays.
3. A trainer knows what its workers' tables hold from the handshake. What no worker allows is not recorded, and what a
   worker does not allow is not sent to it.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from backhaul_proto.v1 import session_pb2
from backhaul_runtime.errors import ProgramError, ReplayError
from backhaul_runtime.program.custom.adapters import adapter_of
from backhaul_runtime.program.custom.class_names import is_foreign, is_found_by_name, name_of_class, plain_name
from backhaul_runtime.program.custom.code_files import NO_VERSION, package_state
from backhaul_runtime.program.custom.code_identity import asks_beside_values, identity_of_class, uses_gradients
from backhaul_runtime.program.program import Program
from backhaul_runtime.torch_internals.libraries import module_of_op

IMPORTS: Mapping[str, Sequence[str]] = {
    "bitsandbytes": ("bitsandbytes",),
    "fla": ("fla", "fla.modules", "fla.ops"),
    "flash_attn": ("flash_attn", "flash_attn.flash_attn_interface"),
    "liger_kernel": ("liger_kernel.ops", "liger_kernel.transformers"),
    "torchao": ("torchao", "torchao.quantization"),
    "transformer_engine": ("transformer_engine.pytorch",),
}
"""Packages that are allowed by one name, and the modules that a worker imports for it. Of any other package a worker
imports the module that its operator named, and no other."""

_BUILTINS: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "builtins:tuple": tuple,
    "builtins:dict": dict,
    "torch:Size": torch.Size,
}
BUILTIN_TYPES = frozenset(_BUILTINS)
"""Types of containers, which need not be allowed."""

_NOT_FOUND = ": it is not defined at the top of a module, where a worker could find it by its name"


@dataclass(slots=True)
class NameTable:
    """The names that this process can replay. Filled as rule 2 says.

    Attributes:
        functions: Custom autograd functions by name.
        ops: Names of ops of other libraries than torch.
        types: Classes of arguments by name.
        identities: The identity of each function of a worker, as trainers know it; empty on a trainer.
        denied: Why a worker could not run a custom autograd function exactly, by name.
        proven: Names of the functions whose backward a worker has run exactly.
    """

    functions: dict[str, Any] = field(default_factory=dict)
    ops: set[str] = field(default_factory=set)
    types: dict[str, type] = field(default_factory=dict)
    identities: dict[str, str] = field(default_factory=dict)
    denied: dict[str, str] = field(default_factory=dict)
    proven: set[str] = field(default_factory=set)

    def deny(self, name: object, reason: str) -> None:
        """Keeps a custom autograd function of this process on the trainer from now on. Ignores unknown names."""
        if isinstance(name, str) and name in self.functions:
            self.denied[name] = reason
            self.proven.discard(name)

    def function(self, name: str) -> Any:
        """Returns the custom autograd function of that name. Raises ProgramError if it is not in the table."""
        function = self.functions.get(name)
        if function is None:
            raise ProgramError(f'the function "{name[:200]}" is not one that this worker\'s operator allows', op=name)
        return function

    def check_identity(self, name: str) -> None:
        """Raises ReplayError if a function of this worker is no longer what trainers know."""
        known = self.identities.get(name)
        if known is not None and identity_of_class(self.functions[name]).digest() != known:
            raise ReplayError(
                f"the custom autograd function {name}, or a value that it reads, has changed on the worker",
                function=name,
            )

    def changed(self, identities: Mapping[str, str]) -> str:
        """Returns the name of a function that no longer has the identity that it had; empty if all have.

        Args:
            identities: The identity that each function had in forward, by name.
        """
        for name, identity in identities.items():
            if identity_of_class(self.functions[name]).digest() != identity:
                return name
        return ""

    def check_type(self, name: str) -> None:
        """Raises ProgramError if an object of the type of this name can't be built here."""
        if name not in BUILTIN_TYPES and name not in self.types:
            raise ProgramError(f'the type "{name[:200]}" is not one that this worker\'s operator allows')

    def build(self, name: str, parts: Sequence[Any]) -> Any:
        """Returns an object of a type, from its parts. Raises ProgramError if the type is not in the table."""
        self.check_type(name)
        try:
            if name in _BUILTINS:
                return _BUILTINS[name](parts)
            adapter = adapter_of(self.types[name])
            assert adapter is not None, "the table holds types with adapters only"
            return adapter.build(self.types[name], parts)
        except Exception as error:  # a client may have sent any parts
            raise ProgramError(f'an object of the type "{name}" can\'t be built from its parts: {error}') from None


names = NameTable()
"""The names of this process."""


def option_for(name: str) -> str:
    """Returns the worker's option that would allow a function, a type or a module, given by its name."""
    package = name.partition(":")[0].partition(".")[0]
    return f"--allow {package if package in IMPORTS else name}"


@dataclass(frozen=True, slots=True)
class OfferedNames:
    """What one worker allows, as its handshake says.

    Attributes:
        packages: The version and the files of the package, see `package_state`, by the name that the operator gave.
        functions: The identity by the name of each custom autograd function.
        ops: Names of ops of other libraries than torch.
        types: Names of types of arguments.
        compiles: Whether it compiles programs, see NOTE [Compiled programs].
    """

    packages: Mapping[str, str] = field(default_factory=dict)
    functions: Mapping[str, str] = field(default_factory=dict)
    ops: frozenset[str] = frozenset()
    types: frozenset[str] = frozenset()
    compiles: bool = False

    @classmethod
    def of(cls, message: session_pb2.Allowed) -> Self:
        """Returns what a message says."""
        ops, types = frozenset(message.ops), frozenset(message.types)
        return cls(dict(message.packages), dict(message.functions), ops, types, message.compiles)

    def to_message(self) -> session_pb2.Allowed:
        """Returns the message for the handshake."""
        return session_pb2.Allowed(
            packages=self.packages,
            functions=self.functions,
            ops=sorted(self.ops),
            types=sorted(self.types),
            compiles=self.compiles,
        )

    def covers(self, name: str) -> str:
        """Returns what the operator gave that covers a name; empty if nothing does."""
        module = name.partition(":")[0]
        for allowed in self.packages:
            if allowed in {name, module} or module.startswith(f"{allowed}."):
                return allowed
        return ""

    def why_not_function(self, function: type) -> str:
        """Returns why the worker can't run a custom autograd function of this process; empty if it can."""
        name = name_of_class(function)
        what = f"the custom autograd function {plain_name(function)}"
        if is_foreign(function.__module__):
            return what
        if not is_found_by_name(function):
            return f"{what}{_NOT_FOUND}"
        if name in names.denied:
            return names.denied[name]
        identity = self.functions.get(name)
        if identity is None:
            return self._why_not(name, what)
        if reason := self._why_not_package(name, what):
            return reason
        own = identity_of_class(function)
        if own.obstacle:
            return f"{what}: {own.obstacle}"
        if identity != own.digest():
            return f"{what}: its code, or a value that it reads from its module or class, is another on the worker"
        if uses_gradients(function):
            return f"{what}: its code uses .grad of tensors, and those of a replay are not the trainer's"
        if asked := asks_beside_values(function):
            return f"{what}: its backward {asked}, which no worker has"
        return ""

    def why_not_type(self, cls: type) -> str:
        """Returns why the worker can't build objects of a class of this process; empty if it can."""
        name = name_of_class(cls)
        what = f"an argument of type {plain_name(cls)}"
        if name in self.types:
            return self._why_not_package(name, what)
        return what if is_foreign(cls.__module__) else self._why_not(name, what)

    def why_not_op(self, name: str) -> str:
        """Returns why the worker can't run an op of another library, given by its name; empty if it can."""
        namespace, packet, _ = name.split(".")
        module = module_of_op(f"{namespace}::{packet}") or namespace
        if name in self.ops:
            return self._why_not_package(module, f"the op {name}") if self.covers(module) else ""
        if module in sys.modules and not is_foreign(module):
            option = option_for(module)
            return f"the op {name} is not on the list of ops a worker runs (a worker with {option} would run it)"
        return f"the op {name} is not on the list of ops a worker runs"

    def missing(self, program: Program) -> str:
        """Returns a name in a program that the worker has not offered; empty if there is none."""
        offered = self.functions.keys() | self.ops
        unknown = [*(program.functions - offered), *({*program.types} - self.types - BUILTIN_TYPES)]
        return min(unknown, default="")

    def why_not_program(self, program: Program, identities: Mapping[str, str]) -> str:
        """Returns why the worker can't run a program of this process; empty if it can.

        Args:
            program: The program that was recorded.
            identities: The identity of each of its custom autograd functions, as it was recorded.
        """
        if program.compilation is not None and not self.compiles:
            return "it compiles no programs (a worker with --compile does)"
        if program.holds_attention and not self.compiles:
            return "it does not run flex_attention, for which torch generates code (a worker with --compile does)"
        for name in program.functions:
            if name not in identities:
                reason = self.why_not_op(name)
            elif self.functions.get(name) == identities[name]:
                reason = ""
            else:
                reason = self.why_not_function(names.functions[name])
            if reason:
                return reason
        for name in program.types:
            if name not in BUILTIN_TYPES and (reason := self.why_not_type(names.types[name])):
                return reason
        return ""

    def _why_not_package(self, name: str, what: str) -> str:
        """Returns why the package of a module or class, given by its name, is not the worker's; empty if it is."""
        allowed = self.covers(name)
        here, there = package_state(allowed or name), self.packages.get(allowed, "")
        if not here:
            return f"{what}: the files of its package are not found, so they can't be compared with the worker's"
        there = there or NO_VERSION
        return "" if here == there else f"{what}: its package has version {here} here and {there} on the worker"

    def _why_not(self, name: str, what: str) -> str:
        module, _, qualified = name.partition(":")
        if "<locals>" in qualified or module == "__main__":
            return f"{what}{_NOT_FOUND}"
        package = module.partition(".")[0]
        if self.covers(name):
            return f"{what} of {package}: the worker's installation has none of that name"
        return f"{what} of {package} (a worker with {option_for(name)} would run it)"


class JoinedNames:
    """What at least one of several workers allows.

    Args:
        offers: What each worker allows.

    Attributes:
        offers: What each worker allows.
    """

    def __init__(self, offers: Iterable[OfferedNames] = ()) -> None:
        self.offers = tuple(offers)
        self._offers = self.offers or (OfferedNames(),)

    def why_not_function(self, function: type) -> str:
        """Returns why no worker can run a custom autograd function; empty if one can."""
        return _first([offer.why_not_function(function) for offer in self._offers])

    def why_not_type(self, cls: type) -> str:
        """Returns why no worker can build objects of a class; empty if one can."""
        return _first([offer.why_not_type(cls) for offer in self._offers])

    def why_not_op(self, name: str) -> str:
        """Returns why no worker can run an op of another library; empty if one can."""
        return _first([offer.why_not_op(name) for offer in self._offers])


def _first(reasons: Sequence[str]) -> str:
    """Returns the first reason, or an empty text if any of them is empty."""
    return "" if "" in reasons else reasons[0]

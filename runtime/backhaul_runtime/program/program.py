"""A recorded call as data: the ops that ran, as seen above autograd, and where each argument came from."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from backhaul_runtime.tensors.layout import Layout
from backhaul_runtime.torch_internals.ambient_state import State

NODE_BYTES = 2 << 10
"""Bytes that a node takes in a replay beside the elements of its tensors: autograd's node, saved tensors and digests.
1.5 KiB were measured per node, in a program of 50,000 nodes with tensors of one element."""


@dataclass(frozen=True, slots=True)
class SourceRef:
    """A reference to a source of the call, by its index in `Program.sources`."""

    index: int


@dataclass(frozen=True, slots=True)
class ResultRef:
    """A reference to the `output`-th tensor that node number `node` returned."""

    node: int
    output: int


@dataclass(frozen=True, slots=True)
class GeneratorRef:
    """Stands for a generator that was an argument of the op. Its state is one of the segment's generator states."""


Ref = SourceRef | ResultRef

FLEX_ATTENTION = "higher_order.flex_attention.default"
"""The name of torch's higher-order op in programs, see NOTE [Nested programs]."""

CONSTANTS = frozenset({bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format, torch.device})
"""The types of values that a program holds as they are, beside None."""


@dataclass(frozen=True, slots=True)
class Composite:
    """An argument that is built from its parts, see `adapters`.

    Attributes:
        type: The name of its class.
        parts: References, constants, and tuples and composites of both.
    """

    type: str
    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class NestedNode:
    """One op of a nested program.

    Attributes:
        op: The op's name, as in `Node`.
        args: Positional arguments: references, constants, and tuples of both. A source is an input of the program.
        kwargs: Keyword arguments as pairs of name and value, in the order of the call.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class NestedProgram:
    """A function that an op calls, see NOTE [Nested programs].

    Attributes:
        inputs: The number of its arguments.
        nodes: The ops, in the order they run.
        output: The number that it returns.
    """

    inputs: int
    nodes: tuple[NestedNode, ...]
    output: Ref


@dataclass(frozen=True, slots=True)
class Source:
    """The properties of a source that a replay needs, apart from its layout and values.

    Attributes:
        requires_grad: Whether backward returns a gradient for the source.
        is_leaf: Whether it is a leaf, and no view that takes gradients. Autocast caches the casts of such leaves only,
            so this affects the gradients' bits.
        is_written: Whether the program writes into the source, so that a replay uses a copy of it.
    """

    requires_grad: bool
    is_leaf: bool
    is_written: bool


@dataclass(frozen=True, slots=True)
class RecordedChoice:
    """A draw or decision that a replay reads from a source, see NOTE [Recorded choices].

    Attributes:
        source: Index of the source that holds it.
        packed_elements: Number of zeros and ones that the source holds as bits; 0 if it holds the tensor itself.
    """

    source: int
    packed_elements: int


@dataclass(slots=True)
class Node:
    """One op of a program. Only the recorder changes it, directly after the op has run.

    Attributes:
        op: The op's name, in the form "namespace.name.overload"; or that of a custom autograd function, "module:name".
        args: Positional arguments: references, constants, and tuples of both.
        kwargs: Keyword arguments as pairs of name and value, in the order of the call.
        ambient: The index of its ambient state in `Program.ambient_states`.
        result_bytes: For each returned tensor, the bytes of its storage if the op made the storage, else 0.
        draws: Whether the op draws from a generator whose state before the op travels with the segment.
        fresh_casts: Whether autocast's cache was cleared since the previous node, so that weights are cast anew.
        given: The op's recorded choices, for programs that run on other hardware; otherwise empty.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    ambient: int
    result_bytes: tuple[int, ...]
    draws: bool
    fresh_casts: bool = False
    given: tuple[RecordedChoice, ...] = ()

    @property
    def parts(self) -> Iterator[Any]:
        """What `parts_in` yields of its arguments, the positional ones first."""
        return parts_in((self.args, tuple([value for _, value in self.kwargs])))

    @property
    def is_function(self) -> bool:
        """Whether the node is a custom autograd function."""
        return is_function_name(self.op)


def is_function_name(name: str) -> bool:
    """Whether a name is that of a custom autograd function, not of an op."""
    return ":" in name


@dataclass(frozen=True, slots=True)
class Compilation:
    """What a program is compiled for.

    Attributes:
        layouts: The layouts of the program's sources.
        facts: What compiled kernels depend on beside the fingerprint, by name, as for `inductor.facts`.
    """

    layouts: tuple[Layout, ...]
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Program:
    """A recorded call. A call that runs the same ops on other tensors of equal layout has an equal program.

    Attributes:
        sources: The sources, in the order of their first use.
        nodes: The ops, in the order they ran.
        ambient_states: The distinct ambient states that nodes ran under.
        outputs: References to the tensors whose gradients backward starts from.
        saved_count: The number of tensors that autograd saves.
        saved_bytes: Bytes of the distinct storages that autograd saves and that belong to no source or node's result.
        casts: Indices of the sources of which autocast's cache holds a cast when the program ends. Uses of the `i`-th
            cast give contributions of their own, under the number `len(sources) + i`; see NOTE [Casts].
        types: The names of the types of composite arguments.
        compilation: What the program is compiled for, see NOTE [Compiled programs]. None for one whose ops run one by
            one.
    """

    sources: tuple[Source, ...]
    nodes: tuple[Node, ...]
    ambient_states: tuple[State, ...]
    outputs: tuple[Ref, ...]
    saved_count: int
    saved_bytes: int
    casts: tuple[int, ...] = ()
    types: tuple[str, ...] = ()
    compilation: Compilation | None = None

    @cached_property
    def working_bytes(self) -> int:
        """An upper bound of the bytes that a replay holds before backward, without its sources."""
        return self.saved_bytes + sum(sum(node.result_bytes) for node in self.nodes)

    @cached_property
    def functions(self) -> frozenset[str]:
        """The names of the custom autograd functions, and of the ops of other libraries than torch, that it runs."""
        own = ("aten.", FLEX_ATTENTION)
        return frozenset(node.op for node in self.nodes if node.is_function or not node.op.startswith(own))

    @cached_property
    def holds_attention(self) -> bool:
        """Whether it runs flex_attention, for whose backward torch generates code in the process."""
        return any(node.op == FLEX_ATTENTION for node in self.nodes)

    @cached_property
    def draws(self) -> int:
        """The number of nodes that draw from a generator, and so of generator states that a replay needs."""
        return sum(node.draws for node in self.nodes)

    def execution_bytes(self, source_bytes: Sequence[int]) -> int:
        """Returns an upper bound of the bytes that a replay and its backward hold, without the sources.

        It counts a gradient for every tensor at once, a copy of each source that the program writes to, and
        `NODE_BYTES` for each node.

        Args:
            source_bytes: The bytes of each source, in the order of `sources`.
        """
        own = sum(
            size * (source.requires_grad + source.is_written)
            for source, size in zip(self.sources, source_bytes, strict=True)
        )
        return 2 * self.working_bytes + own + NODE_BYTES * len(self.nodes)


def parts_in(value: Any) -> Iterator[Any]:
    """Yields the items of an argument or of a tuple of arguments, and composites before what they are built from."""
    if isinstance(value, Composite):
        yield value
        yield from parts_in(value.parts)
    elif isinstance(value, tuple):
        for item in value:
            yield from parts_in(item)
    else:
        yield value


def numbers_in(program: Program) -> str:
    """Returns the numbers in a program as a text, in order, which distinguishes their types and signs.

    Two programs have the same encoding if they are equal and this text is equal too. `==` alone does not distinguish
    0.0 from -0.0, or 1 from 1.0 and True.
    """
    numbers: list[Any] = [program.ambient_states]

    for node in program.nodes:
        numbers += _numbers_in((node.args, node.kwargs))
    return repr(numbers)


def _numbers_in(value: Any) -> Iterator[Any]:
    for part in parts_in(value):
        if isinstance(part, NestedProgram):
            yield from _numbers_in(tuple([(node.args, node.kwargs) for node in part.nodes]))
        elif isinstance(part, (int, float, complex)):
            yield part


def is_same_program(first: Program, second: Program) -> bool:
    """Whether two programs have the same encoding."""
    return first == second and numbers_in(first) == numbers_in(second)

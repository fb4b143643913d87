"""A recorded call as data: the ops that ran, above autograd, and where each argument came from."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from backhaul_runtime.torch_internals.ambient_state import State

NODE_BYTES = 2 << 10
"""What a node takes in a replay beside the elements of its tensors: autograd's node, saved tensors, digests. Measured
over 50,000 nodes of one element it is 1.5 KiB."""


@dataclass(frozen=True, slots=True)
class SourceRef:
    """A tensor from outside the call, by its index in `Program.sources`."""

    index: int


@dataclass(frozen=True, slots=True)
class ResultRef:
    """The `output`-th tensor that node `node` returned."""

    node: int
    output: int


@dataclass(frozen=True, slots=True)
class GeneratorRef:
    """The generator an op was given; its state is the node's draw."""


Ref = SourceRef | ResultRef


@dataclass(frozen=True, slots=True)
class Source:
    """What a replay must know of a tensor from outside, apart from its layout and values.

    Attributes:
        requires_grad: Whether backward returns a gradient for it.
        is_leaf: Autocast caches the casts of leaves only, so this shows in the numbers.
        is_written: The program writes into it, so a replay works on a copy of its own.
    """

    requires_grad: bool
    is_leaf: bool
    is_written: bool


@dataclass(frozen=True, slots=True)
class RecordedChoice:
    """A draw or decision that a replay takes from outside, see NOTE [Recorded choices].

    Attributes:
        source: Index of the source that holds it.
        packed_elements: How many zeros and ones it holds as bits; 0 where it is the tensor itself.
    """

    source: int
    packed_elements: int


@dataclass(slots=True)
class Node:
    """One op. Nobody changes it but the recorder, once the op has run.

    Attributes:
        op: The op's name, in the form "namespace.name.overload".
        args: Positional arguments: references, constants, tuples of both.
        kwargs: Keyword arguments in the order given.
        ambient: The index of its ambient state in `Program.ambient_states`.
        result_bytes: Per tensor returned, the bytes of its storage if the op made it, 0 for a view.
        draws: It draws from a generator, whose state before travels with the segment.
        fresh_casts: Autocast's cache of casts was cleared since the node before: a weight is cast anew.
        given: What it drew or decided, for programs that run on other hardware.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    ambient: int
    result_bytes: tuple[int, ...]
    draws: bool
    fresh_casts: bool = False
    given: tuple[RecordedChoice, ...] = ()


@dataclass(frozen=True)
class Program:
    """A recorded call. Equal calls on other tensors of equal layout have equal programs.

    Attributes:
        sources: Tensors from outside, in the order they were met.
        nodes: In the order they ran.
        ambient_states: Distinct settings that nodes ran under.
        outputs: Tensors whose gradients backward is given.
        saved_count: How many tensors autograd saves.
        saved_bytes: Bytes of the distinct storages it saves that no node returned.
        casts: Indices of the sources of which autocast's cache holds a cast when the program ends. Uses of the `i`-th
            cast give contributions of their own, under the number `len(sources) + i`; see NOTE [Casts].
    """

    sources: tuple[Source, ...]
    nodes: tuple[Node, ...]
    ambient_states: tuple[State, ...]
    outputs: tuple[Ref, ...]
    saved_count: int
    saved_bytes: int
    casts: tuple[int, ...] = ()

    @cached_property
    def working_bytes(self) -> int:
        """Upper bound of what a replay holds beside its sources, before backward."""
        return self.saved_bytes + sum(sum(node.result_bytes) for node in self.nodes)

    @cached_property
    def draws(self) -> int:
        """How many of its nodes draw random numbers."""
        return sum(node.draws for node in self.nodes)

    def run_bytes(self, source_bytes: Sequence[int]) -> int:
        """Upper bound of what a replay and its backward hold beside the sources.

        Each tensor may have a gradient of its size at once, each source that is written a copy. A node takes
        `NODE_BYTES`.

        Args:
            source_bytes: The bytes of each source's gradient.
        """
        own = sum(
            size * (source.requires_grad + source.is_written)
            for source, size in zip(self.sources, source_bytes, strict=True)
        )
        return 2 * self.working_bytes + own + NODE_BYTES * len(self.nodes)


def numbers_in(program: Program) -> str:
    """The numbers in a program, in order, told apart by type and sign.

    Two programs have the same encoding if they are equal and their numbers are, too: `==` alone takes 0.0 for -0.0, and
    1 for 1.0 and True.
    """
    numbers: list[Any] = [program.ambient_states]

    def visit(value: Any) -> None:
        if isinstance(value, tuple):
            for item in value:
                visit(item)
        elif isinstance(value, (int, float, complex)):
            numbers.append(value)

    for node in program.nodes:
        visit(node.args)
        visit(node.kwargs)
    return repr(numbers)

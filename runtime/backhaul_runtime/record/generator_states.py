"""The states of random generators in which the ops of a running call begin to draw."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from backhaul_runtime.errors import Refusal
from backhaul_runtime.program.program import Node
from backhaul_runtime.record.recording import Recording
from backhaul_runtime.torch_internals.generators import default_generator, drawing_device


class GeneratorStates:
    """Records the state before each node that draws. Read it before the op with `begin`, and call `end` afterwards.

    Args:
        recording: Gets the states, and which of them the draw before has left.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._before = b""  # state of the generator that the op which runs would draw from
        self._cpu_before = b""  # state of the CPU's default generator before the custom function that runs
        self._left = b""  # state of the CPU's default generator after the last recorded draw from it

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Reads the state before an op that may draw."""
        self._before = _state(args, kwargs)

    def begin_function(self, args: Sequence[Any]) -> None:
        """Reads the states before a custom function, which may draw from two generators."""
        self._before = _state(args, {})
        self._cpu_before = self._before if _draws_from_cpu(args, {}) else _cpu_state()

    def continues(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether an op with these arguments begins to draw in the state that the last recorded draw has left."""
        return self._before == self._left and _draws_from_cpu(args, kwargs)

    def add(self, node: Node, *, continues: bool = False) -> None:
        """Records the state before a node that draws. A replay does not set it if the draw before has left it."""
        node.draws = True
        number, continuing = len(self._recording.generator_states), self._recording.continuing
        continuing.add(number) if continues else continuing.discard(number)
        self._recording.generator_states.append(self._before)

    def has_drawn(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the op has changed the state that `begin` has read."""
        return _state(args, kwargs) != self._before

    def end(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Reads the state that an op which draws has left."""
        if _draws_from_cpu(args, kwargs):
            self._left = _cpu_state()

    def end_function(self, node: Node, name: str, args: Sequence[Any], *, draws: bool) -> None:
        """Records what a custom function has drawn.

        Args:
            node: The node that stands for the function.
            name: The function's name, for people.
            args: The arguments of the function.
            draws: Whether an op inside the function draws, perhaps from a generator that is restored afterwards.

        Raises:
            Refusal: The function has drawn from two generators.
        """
        after, is_cpu = _state(args, {}), _draws_from_cpu(args, {})
        if not is_cpu and _cpu_state() != self._cpu_before:
            raise Refusal(f"the custom autograd function {name} draws from two generators")
        if draws or after != self._before:
            self.add(node, continues=self.continues(args, {}))
            self._left = after if is_cpu else self._left


def _draws_from_cpu(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op that draws does so from the CPU's default generator, whose state has 5 KiB."""
    is_own = any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))
    return not is_own and drawing_device(args, kwargs).type == "cpu"


def _state(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Returns the state of the generator that an op with these arguments would draw from."""
    generator = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)), None)
    generator = generator or default_generator(drawing_device(args, kwargs))
    return generator.get_state().numpy().tobytes()


def _cpu_state() -> bytes:
    return _state((), {})

"""Detects that the backward of a custom autograd function draws random numbers.

Torch's own backward formulas never draw. A custom function may, and then draws from the generator as backward finds it,
which a worker does not know. So such a backward only runs on the trainer.
"""

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from backhaul_runtime.errors import ReplayError
from backhaul_runtime.torch_internals.generators import default_generator


class DrawWatch:
    """Watches the nodes of custom functions during one backward. Call `end` afterwards.

    Args:
        nodes: The nodes of custom functions, each with the name of its function.
        devices: Devices whose default generators are looked at, beside that of the CPU.
    """

    def __init__(self, nodes: Iterable[tuple[str, Node]], devices: Iterable[torch.device]) -> None:
        self._generators = [default_generator(device) for device in {torch.device("cpu"), *devices}]
        self._before: list[Any] = []
        self._drawing = ""
        self._handles: list[RemovableHandle] = []
        for name, node in nodes:
            self._handles += [node.register_prehook(self._begins), node.register_hook(self._ends(name))]

    def end(self) -> None:
        """Ends the watch. Raises ReplayError if a function has moved torch's, Python's or NumPy's default generator."""
        for handle in self._handles:
            handle.remove()
        if self._drawing:
            raise ReplayError(
                f"the backward of {self._drawing} draws random numbers, and only the trainer's generators can give "
                "those of a run without checkpointing",
                function=self._drawing,
            )

    def _begins(self, _: Any) -> None:
        self._before = self._states()

    def _ends(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if self._states() != self._before:
                self._drawing = name

        return hook

    def _states(self) -> list[Any]:
        states: list[Any] = [generator.get_state().numpy().tobytes() for generator in self._generators]
        kind, keys, *rest = np.random.get_state(legacy=True)
        return [*states, random.getstate(), kind, np.asarray(keys).tobytes(), *rest]

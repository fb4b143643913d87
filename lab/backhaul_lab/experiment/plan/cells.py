"""The cells of a matrix: every combination of the values of its axes. Pure."""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from backhaul_lab.experiment.plan.axes import AXES, Value

MOST_CELLS = 500
MOST_NODES = 250
"""The most trainers and workers of a cell that is run: a bridge has addresses for as many."""


class SpecError(Exception):
    """The file of an experiment cannot be used. The message names the key and says what to change."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of values.

    Attributes:
        number: Its place in the matrix, from 0.
        values: The value of every axis by name, converted by `Axis.parse`.
    """

    number: int
    values: Mapping[str, Value]

    def __getitem__(self, axis: str) -> Any:
        return self.values[axis]

    def shown(self, axes: Sequence[str]) -> str:
        """Returns the values of some axes for people, as in "4 workers, latency 5 ms"."""
        return ", ".join(AXES[axis].said(self.values[axis]) for axis in axes) or "the only cell"

    @property
    def is_deferred(self) -> bool:
        """Whether a step is an accumulation block."""
        return bool(self["micro_batches"] > 1)


@dataclass(frozen=True, slots=True)
class Matrix:
    """The values of the axes of an experiment.

    Attributes:
        varied: Names of the axes with more than one value, in the order of the file.
        cells: The cells that are run.
    """

    varied: tuple[str, ...]
    cells: tuple[Cell, ...]


def expand(table: Mapping[str, Any], layers: int) -> Matrix:
    """Returns the matrix of a file's table.

    Args:
        table: The value or the list of values of each axis that the file sets.
        layers: The number of layers of the model.

    Raises:
        SpecError: An axis is unknown, a value is wrong, or cells are impossible. The message says how many cells the
            matrix would have had.
    """
    lists = {name: value if isinstance(value, list) else [value] for name, value in table.items()}
    count = math.prod(len(values) for values in lists.values())
    would_be = f"The matrix would have been {count} cell{'s' if count != 1 else ''}."
    for name, values in lists.items():
        if name not in AXES:
            near = get_close_matches(name, AXES, 1)
            hint = f"; did you mean {near[0]}?" if near else f": the axes are {', '.join(AXES)}."
            raise SpecError(f'matrix: "{name}" is not an axis{hint} {would_be}')
        if not values:
            raise SpecError(f"matrix: {name} has no value. {would_be}")
    parsed: dict[str, list[Value]] = {}
    for name, values in lists.items():
        try:
            parsed[name] = [AXES[name].parse(value) for value in values]
        except ValueError as error:
            raise SpecError(f"matrix: {name}: {error}. {would_be}") from None
        if len(set(parsed[name])) < len(parsed[name]):
            raise SpecError(f"matrix: {name} has a value twice. {would_be}")
    if count > MOST_CELLS:
        raise SpecError(f"matrix: {would_be} At most {MOST_CELLS} are allowed: split it into several files.")
    full = {axis.name: parsed.get(axis.name, [axis.default]) for axis in AXES.values()}
    cells = tuple(
        Cell(number, dict(zip(full, combination, strict=True)))
        for number, combination in enumerate(itertools.product(*full.values()))
    )
    _check_possible(cells, layers, would_be)
    return Matrix(tuple(name for name, values in parsed.items() if len(values) > 1), cells)


def _check_possible(cells: Sequence[Cell], layers: int, would_be: str) -> None:
    """Raises SpecError that lists why cells are impossible and how many there are of each kind."""
    reasons = Counter(reason for cell in cells if (reason := _impossible(cell, layers)))
    if reasons:
        parts = [f"{reason} (in {count} cell{'s' if count != 1 else ''})" for reason, count in reasons.items()]
        raise SpecError(f"matrix: {'; '.join(parts)}. {would_be} {reasons.total()} of them are impossible.")


def _impossible(cell: Cell, layers: int) -> str:
    """Returns why a cell cannot be run; empty if it can be."""
    if layers % cell["segment_layers"]:
        return f"segment_layers {cell['segment_layers']} does not divide the model's {layers} layers"
    if cell["workers"] > (segments := layers // cell["segment_layers"]):
        return f"workers {cell['workers']} are more than the {segments} segments of the model"
    if (nodes := cell["trainers"] + cell["workers"]) > MOST_NODES:
        return f"trainers and workers are {nodes} nodes together, and a cell may have {MOST_NODES}"
    if cell["batch"] % cell["micro_batches"]:
        return f"micro_batches {cell['micro_batches']} does not divide batch {cell['batch']}"
    if cell.is_deferred and cell["returns"] == "activations":
        return 'micro_batches above 1 are deferred, which needs returns "gradients" or "auto"'
    return ""

"""`backhaul simulate`."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from backhaul._cli.options import obstacle_to
from backhaul.simulate.costs import KnownCosts
from backhaul.simulate.predictions import (
    Measured,
    Measurements,
    as_svg,
    as_table,
    block_rows,
    blocks_as_table,
    measurable,
    others,
    rows,
)
from backhaul.simulate.validation import BAR, cells_as_text, median_error, read_cells
from backhaul_runtime.errors import SettingError

HELP = "predict the duration of a training step for other depths, memory budgets, networks and workers"
EXAMPLES = (
    "backhaul simulate                              # measures the costs of a segment first",
    "backhaul simulate --costs docs/simulation.json --svg step.svg",
)
MEASUREMENTS = "backhaul.measurements"
_CORES = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `backhaul simulate` to its parser."""
    parser.add_argument(
        "--costs",
        type=Path,
        metavar="FILE",
        help="read the costs of a segment from a file that --json wrote (default: measure them now)",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="also measure the setups that fit on two cores, and print the error of each prediction",
    )
    parser.add_argument(
        "--validate",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="only compare predictions with cells that were measured before: directories of `backhaul experiment run`, "
        "or files of --measure --json",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write costs, predictions and measurements to a file")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the predictions as an SVG image")


def run(arguments: argparse.Namespace) -> int:
    """Measures or reads the costs of a segment, predicts steps, prints them and writes the requested files.

    Returns:
        The exit code: 0, 1 if --validate found predictions that are too far off, or 2 if an option cannot be used.
    """
    if arguments.validate:
        return _validate(arguments.validate)
    for option in ("json", "svg"):
        path = getattr(arguments, option)
        if obstacle := obstacle_to(path):
            print(f"backhaul simulate: --{option} {path}: {obstacle}", file=sys.stderr)
            return 2
    written: dict[str, Any] = {}
    steps: Mapping[str, Measured] = {}
    blocks: Mapping[str, Measured] = {}
    costs: KnownCosts | None = None
    if arguments.costs is not None:
        try:
            costs = read_costs(arguments.costs)
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = f"the file has no {error}" if isinstance(error, KeyError) else error
            print(f"backhaul simulate: --costs {arguments.costs}: {why}", file=sys.stderr)
            return 2
    if costs is None or arguments.measure:
        cores = sorted(os.sched_getaffinity(0))[:_CORES] if hasattr(os, "sched_getaffinity") else []
        if len(cores) < _CORES:
            print(f"backhaul simulate: measuring needs Linux and {_CORES} cores", file=sys.stderr)
            return 2
        # backhaul-bench declares it, because measuring needs packages that the trainer's wheel does not hold.
        entry = next(iter(entry_points(group=MEASUREMENTS, name="simulate")), None)
        if entry is None:
            print("backhaul simulate: measuring needs pip install 'backhaul[bench]'", file=sys.stderr)
            return 2
        signal.signal(signal.SIGTERM, _interrupt)  # Raises, so that the worker processes are closed.
        measurements: Measurements = entry.load()(cores, costs, with_steps=arguments.measure)
        written["machine"], costs = measurements.machine, measurements.costs
        steps, blocks = measurements.steps, measurements.blocks
    predicted = rows(costs, measurable(costs.steps) | others(costs.steps), steps)
    predicted_blocks = block_rows(costs.blocks, blocks)
    print(as_table(predicted) + "\n\n" + blocks_as_table(predicted_blocks))
    if arguments.json is not None:
        written |= costs.as_json()
        written |= {"steps": predicted, "blocks": predicted_blocks}
        arguments.json.write_text(json.dumps(written, indent=2) + "\n")
    if arguments.svg is not None:
        arguments.svg.write_text(as_svg(costs))
    return 0


def _validate(paths: Sequence[Path]) -> int:
    """Prints the error of the prediction of each measured cell. Returns the exit code of the command."""
    try:
        cells = [cell for path in paths for cell in read_cells(path)]
        if not cells:
            raise SettingError(f"--validate {paths[0]}: it has no measured cells")
    except SettingError as error:
        print(f"backhaul simulate: {error.message}", file=sys.stderr)
        return 2
    print(cells_as_text(cells))
    middle = median_error(cells)
    return 1 if middle is not None and middle >= BAR else 0


def read_costs(path: Path) -> KnownCosts:
    """Reads costs from a file that --json wrote.

    Raises:
        OSError: The file cannot be read.
        ValueError, KeyError, TypeError: The file does not hold costs.
    """
    return KnownCosts.read(json.loads(path.read_text()))


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt

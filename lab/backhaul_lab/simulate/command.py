"""`backhaul simulate`."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from backhaul._cli.environment_options import obstacle_to
from backhaul_lab.harness.machine import two_cores
from backhaul_lab.harness.processes import interrupt_on_sigterm
from backhaul_lab.simulate.costs import KnownCosts
from backhaul_lab.simulate.predictions import as_svg, as_table, block_rows, blocks_as_table, rows

HELP = "predict the duration of a training step for other depths, memory budgets, networks and workers"
EXAMPLES = (
    "backhaul simulate                              # measures the costs of a segment first",
    "backhaul simulate --costs docs/simulation.json --svg step.svg",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `backhaul simulate` to its parser."""
    parser.add_argument(
        "--costs",
        type=Path,
        metavar="FILE",
        help="read the costs of a segment from a file that --json wrote (default: measure them now)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write costs and predictions to a file")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the predictions as an SVG image")


def run(arguments: argparse.Namespace) -> int:
    """Measures or reads the costs of a segment, predicts steps, prints them and writes the requested files.

    Returns:
        The exit code: 0, or 2 if an option cannot be used.
    """
    for option in ("json", "svg"):
        path = getattr(arguments, option)
        if obstacle := obstacle_to(path):
            print(f"backhaul simulate: --{option} {path}: {obstacle}", file=sys.stderr)
            return 2
    written: dict[str, Any] = {}
    if arguments.costs is not None:
        try:
            costs = read_costs(arguments.costs)
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = f"the file has no {error}" if isinstance(error, KeyError) else error
            print(f"backhaul simulate: --costs {arguments.costs}: {why}", file=sys.stderr)
            return 2
    else:
        try:
            cores = two_cores()
        except ValueError as error:
            print(f"backhaul simulate: {error}", file=sys.stderr)
            return 2
        from backhaul_lab.simulate.measured import measure_on_cores

        interrupt_on_sigterm()
        written["machine"], costs = measure_on_cores(cores)
    predicted, predicted_blocks = rows(costs), block_rows(costs.blocks)
    print(as_table(predicted) + "\n\n" + blocks_as_table(predicted_blocks))
    if arguments.json is not None:
        written |= costs.as_json()
        written |= {"steps": predicted, "blocks": predicted_blocks}
        arguments.json.write_text(json.dumps(written, indent=2) + "\n")
    if arguments.svg is not None:
        arguments.svg.write_text(as_svg(costs))
    return 0


def read_costs(path: Path) -> KnownCosts:
    """Reads costs from a file that --json wrote.

    Raises:
        OSError: The file cannot be read.
        ValueError, KeyError, TypeError: The file does not hold costs.
    """
    return KnownCosts.read(json.loads(path.read_text()))

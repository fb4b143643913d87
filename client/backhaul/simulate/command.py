"""`backhaul simulate`."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from backhaul.simulate.costs import Costs
from backhaul.simulate.predictions import Measured, as_svg, as_table, measurable, others, rows
from backhaul_runtime.replay.schedule import Footprint

HELP = "predict the time of a step with other depths, budgets, networks and workers"
MEASUREMENTS = "backhaul.measurements"
_CORES = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "--costs", type=Path, metavar="FILE", help="of a segment, as --json wrote them (default: they are measured now)"
    )
    parser.add_argument("--measure", action="store_true", help="measure what two cores can, and say the error")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write costs, predictions and measurements")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw predictions")


def run(arguments: argparse.Namespace) -> int:
    """Measures what a segment costs, predicts, prints, writes."""
    for option in ("json", "svg"):
        path = getattr(arguments, option)
        if path is not None and not os.access(path.absolute().parent, os.W_OK):
            print(f"backhaul simulate: --{option} {path} can't be written there", file=sys.stderr)
            return 2
    found: dict[str, Any] = {}
    measured: Mapping[str, Measured] = {}
    costs: Costs | None = None
    if arguments.costs is not None:
        try:
            costs = read_costs(arguments.costs)
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else error
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
        signal.signal(signal.SIGTERM, _interrupt)  # so that nothing is left behind then either
        found["machine"], costs, measured = entry.load()(cores, costs, with_steps=arguments.measure)
    predicted = rows(costs, measurable(costs) | others(costs), measured)
    print(as_table(predicted))
    if arguments.json is not None:
        found |= {"costs": asdict(costs), "steps": predicted}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    if arguments.svg is not None:
        arguments.svg.write_text(as_svg(costs))
    return 0


def read_costs(path: Path) -> Costs:
    """Costs as --json wrote them. Raises OSError, ValueError, KeyError or TypeError for anything else."""
    found = json.loads(path.read_text())["costs"]
    return Costs(**{**found, "footprint": Footprint(**found["footprint"])})


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt

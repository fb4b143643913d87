"""`backhaul simulate-fleet`."""

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from backhaul._cli.options import obstacle_to
from backhaul.simulate.command import read_costs
from backhaul.simulate.fleet.charts import draw_charts
from backhaul.simulate.fleet.dashboard_costs import read_dashboard_costs
from backhaul.simulate.fleet.events import simulate
from backhaul.simulate.fleet.setup import BOUNDARIES, PLACEMENTS, FleetSetup
from backhaul.simulate.fleet.tables import as_json, as_text, predict_fleet
from backhaul_runtime.errors import SettingError

HELP = "predict what many sessions on many workers are limited by, and what the loss of racks costs"
EXAMPLES = (
    "backhaul simulate-fleet --costs docs/simulation.json --sessions 1000 --workers 400",
    "backhaul simulate-fleet --costs docs/simulation.json --worker-link 1Gbit --trainable 0.01",
)

MOST_SIMULATED = 2_000_000
"""The most sessions that are simulated one by one, which takes about half an hour and some GB."""

_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]+?)(?:/s)?")
_BANDWIDTHS = {"Kbit": 1e3 / 8, "Mbit": 1e6 / 8, "Gbit": 1e9 / 8, "KB": 1e3, "MB": 1e6, "GB": 1e9}
_LATENCIES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def _in_units(name: str, units: dict[str, float], example: str, endless: str = "") -> Callable[[str], float]:
    """Returns a function that reads a number with its unit. `endless` is a word for no limit, which is 0."""

    def read(text: str) -> float:
        if endless and text == endless:
            return 0.0
        match = _QUANTITY.fullmatch(text)
        if match is None or match[2] not in units:
            raise argparse.ArgumentTypeError(
                f'"{text}" is no {name}: write a number with one of {", ".join(units)}, as in {example}'
            )
        if endless and not float(match[1]):
            raise argparse.ArgumentTypeError(f'"{text}" carries nothing; "{endless}" means no limit')
        return float(match[1]) * units[match[2]]

    read.__name__ = name
    return read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `backhaul simulate-fleet` to its parser."""
    bandwidth = _in_units("bandwidth", _BANDWIDTHS, "10Gbit", "unlimited")
    latency = _in_units("latency", _LATENCIES, "0.5ms")
    add = parser.add_argument
    add("--costs", type=Path, required=True, metavar="FILE", help="costs of a segment, from `backhaul simulate --json`")
    add("--sessions", type=int, default=100_000, metavar="N", help="number of sessions (default: %(default)s)")
    add("--workers", type=int, default=10_000, metavar="N", help="number of workers (default: %(default)s)")
    add(
        "--workers-per-session",
        type=int,
        default=1,
        metavar="N",
        help="number of workers among which a session divides its segments (default: %(default)s)",
    )
    add("--segments", type=int, default=8, metavar="N", help="segments of a model (default: %(default)s)")
    add("--micro-batches", type=int, default=1, metavar="N", help="micro-batches of a step (default: %(default)s)")
    add(
        "--deferred",
        dest="is_deferred",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="whether the micro-batches form an accumulation block (default: if there are several)",
    )
    add(
        "--boundaries",
        choices=BOUNDARIES,
        default="auto",
        help="how a worker gets the boundaries between its segments in blocks (default: %(default)s)",
    )
    add(
        "--trainable",
        dest="trainable_share",
        type=float,
        default=1.0,
        metavar="PART",
        help="trained part of the parameters, from 0 to 1, as in 0.01 for LoRA (default: %(default)s)",
    )
    add(
        "--trainer-speed",
        type=float,
        default=1.0,
        metavar="X",
        help="speed of trainers relative to the machine on which the costs were measured (default: %(default)s)",
    )
    add(
        "--worker-speed",
        type=float,
        default=1.0,
        metavar="X",
        help="speed of workers relative to trainers (default: %(default)s)",
    )
    for option, what in (("trainer", "a trainer's link"), ("worker", "a worker's link"), ("rack", "a rack's link")):
        add(
            f"--{option}-link",
            dest=f"{option}_link_bytes_per_s",
            type=bandwidth,
            default=0.0,
            metavar="BANDWIDTH",
            help=f"bandwidth of {what} in each direction, as in 10Gbit (default: unlimited)",
        )
    add(
        "--latency",
        dest="latency_s",
        type=latency,
        default=0.0,
        metavar="TIME",
        help="latency between trainer and worker in one direction, as in 0.5ms (default: none)",
    )
    add("--rack-size", type=int, default=20, metavar="N", help="workers of a rack (default: %(default)s)")
    add("--racks-lost", type=int, default=0, metavar="N", help="racks that fail at once (default: %(default)s)")
    add(
        "--placement",
        choices=PLACEMENTS,
        default="even",
        help="whether workers have equally many sessions, or sessions choose theirs at random (default: %(default)s)",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of the simulation (default: %(default)s)")
    add(
        "--simulate",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="simulate each session, besides balancing the flows; takes a minute for 100,000 sessions (default: yes)",
    )
    add("--json", type=Path, metavar="FILE", help="write the predictions to a file")
    add("--svg", type=Path, metavar="FILE", help="draw what binds the fleet as an SVG image")


def run(arguments: argparse.Namespace) -> int:
    """Predicts a fleet, prints the prediction and writes the requested files.

    Returns:
        The exit code: 0, or 2 if an option cannot be used.
    """
    for option in ("json", "svg"):
        path = getattr(arguments, option)
        if obstacle := obstacle_to(path):
            return _refuse(f"--{option} {path}: {obstacle}")
    try:
        known = read_costs(arguments.costs)
        dashboard = read_dashboard_costs(json.loads(arguments.costs.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        return _refuse(
            f"--costs {arguments.costs}: {f'the file has no {error}' if isinstance(error, KeyError) else error}"
        )
    try:
        setup = _setup(arguments)
    except SettingError as error:
        return _refuse(error.message)
    if arguments.simulate and setup.sessions > MOST_SIMULATED:
        return _refuse(f"sessions is {setup.sessions:,}: above {MOST_SIMULATED:,} only --no-simulate is possible")
    costs = known.blocks if setup.is_deferred else known.links
    simulated = simulate(costs, setup, seed=arguments.seed) if arguments.simulate else None
    prediction = predict_fleet(costs, setup, simulated, dashboard)
    print(as_text(prediction))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_json(prediction), indent=2) + "\n")
    if arguments.svg is not None:
        arguments.svg.write_text(draw_charts(costs, setup, simulated, dashboard))
    return 0


def _setup(arguments: argparse.Namespace) -> FleetSetup:
    """Returns the fleet that the options describe. Raises SettingError."""
    values: dict[str, Any] = {field.name: getattr(arguments, field.name) for field in fields(FleetSetup)}
    if values["is_deferred"] is None:
        values["is_deferred"] = values["micro_batches"] > 1
    return FleetSetup(**values)


def _refuse(why: str) -> int:
    print(f"backhaul simulate-fleet: {why}", file=sys.stderr)
    return 2

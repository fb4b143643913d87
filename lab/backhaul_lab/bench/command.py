"""`backhaul bench`. It measures each group of figures in a fresh process that is pinned to a core."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic

from backhaul._cli.environment_options import obstacle_to
from backhaul_lab.bench.figures import FIGURES, Figure, Verdict, chosen
from backhaul_lab.bench.groups import GROUPS
from backhaul_lab.bench.outcomes import Outcome, as_json, as_line, as_table, is_failed, without_value
from backhaul_lab.harness.device import VARIABLE
from backhaul_lab.harness.machine import HIVEMIND, describe, two_cores
from backhaul_lab.harness.processes import MODULE, ChildError, ChildProcess, interrupt_on_sigterm
from backhaul_lab.harness.rounds import PACE

HELP = "measure the overhead and the savings of Backhaul and compare each figure with its limit"
EXAMPLES = ("backhaul bench --json bench.json",)
GROUP_LIMIT_S = 600.0
WHOLE_S = 840.0
"""Seconds for all figures together, so that `make bench` takes under 15 minutes on slow machines too."""

MeasureGroup = Callable[[str, Sequence[int], float], list[Outcome]]
"""Measures a group's figures on two cores, the trainer's and the worker's. Raises RuntimeError if that fails."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `backhaul bench` to its parser."""
    parser.add_argument(
        "--hivemind",
        metavar="PYTHON",
        default="",
        help="Python of an environment with hivemind, which one figure is compared with",
    )
    names = ", ".join(figure.name for figure in FIGURES)
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="device of trainer and worker; on cuda only the figures of training are measured (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to a file")
    parser.add_argument(
        "--only",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help=f"measure only these figures; the figures are {names}",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measures the figures, prints them and writes them to a file if requested.

    Returns:
        The exit code: 0, even if limits were missed; 1 if a figure failed; 2 if an option cannot be used.
    """
    try:
        figures = _on_device(chosen(arguments.only), arguments.device)
        cores = two_cores()
    except ValueError as error:
        print(f"backhaul bench: {error}", file=sys.stderr)
        return 2
    if obstacle := obstacle_to(arguments.json):
        print(f"backhaul bench: --json {arguments.json}: {obstacle}", file=sys.stderr)
        return 2
    interrupt_on_sigterm()
    os.environ[VARIABLE] = arguments.device
    if arguments.hivemind:
        os.environ[HIVEMIND] = arguments.hivemind
    machine = describe(cores, arguments.device)
    outcomes = measure(figures, cores, run_group)
    print("\n" + as_table(outcomes))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_json(outcomes, machine), indent=2) + "\n")
    return 1 if is_failed(outcomes) else 0


def measure(figures: Sequence[Figure], cores: Sequence[int], measure_group: MeasureGroup) -> list[Outcome]:
    """Returns the outcomes of the figures, in order. A group that raises RuntimeError fails only its own figures."""
    by_name: dict[str, Outcome] = {}
    began_s = monotonic()
    groups = list(dict.fromkeys(figure.group for figure in figures))
    for number, group in enumerate(groups):
        names = [figure.name for figure in figures if figure.group == group]
        after_s = monotonic() - began_s
        pace = _pace(WHOLE_S - after_s, groups[number:])
        print(f"measuring {', '.join(names)} after {after_s:.0f} s", file=sys.stderr, flush=True)
        try:
            outcomes = {outcome.name: outcome for outcome in measure_group(group, cores, pace)}
        except RuntimeError as error:
            outcomes = {name: without_value(name, Verdict.FAILED, str(error)) for name in names}
        for name in names:
            missing = without_value(name, Verdict.FAILED, "the measurement did not report this figure")
            by_name[name] = outcomes.get(name, missing)
            print("  " + as_line(by_name[name]), file=sys.stderr, flush=True)  # In case a later group is interrupted.
    return [by_name[figure.name] for figure in figures]


def _pace(left_s: float, groups: Sequence[str]) -> float:
    """Returns the part of its time that each of the remaining groups may take, at most 1."""
    nominal_s = sum(GROUPS[group].nominal_s for group in groups)
    return max(0.0, min(1.0, left_s / nominal_s))


def run_group(group: str, cores: Sequence[int], pace: float) -> list[Outcome]:
    """Measures a group in a process of its own, in which each op uses one thread.

    Args:
        group: The name of the group.
        cores: The trainer's core and the worker's.
        pace: The part of its time that the measurement may take.

    Raises:
        RuntimeError: The process failed or timed out. The message is its last line on stderr, if it wrote any.
    """
    settings = {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6", PACE: str(pace)}
    with tempfile.TemporaryDirectory(prefix="backhaul-bench-") as folder:
        process = ChildProcess(
            "the measurement",
            [*MODULE, "backhaul_lab.bench.child", group, *map(str, cores)],
            Path(folder) / "log",
            {**settings, **GROUPS[group].environment},
            ends_with_stdin=False,
        )
        try:
            return [Outcome(**fields) for fields in json.loads(process.read(GROUP_LIMIT_S))]
        except ChildError as error:
            print(error.log, file=sys.stderr)
            raise RuntimeError(error.log.splitlines()[-1] if error.log else str(error)) from None
        finally:
            process.end()


def _on_device(figures: list[Figure], device: str) -> list[Figure]:
    """Returns the figures that exist for a device. Raises ValueError if there are none or the device is missing."""
    if device == "cpu":
        return figures
    import torch

    if not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no CUDA device that torch can use")
    on_device = [figure for figure in figures if GROUPS[figure.group].on_cuda]
    if not on_device:
        raise ValueError("--device cuda: none of these figures is measured on cuda")
    return on_device

"""`backhaul bench`. It measures each group of figures in a fresh process that is pinned to a core."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic

from backhaul_lab.bench.device import GROUPS, VARIABLE
from backhaul_lab.bench.figures import FIGURES, Figure, Verdict, chosen
from backhaul_lab.bench.machine import HIVEMIND, describe
from backhaul_lab.bench.outcomes import Outcome, as_json, as_line, as_table, is_failed, without_value
from backhaul_lab.bench.rounds import PACE

HELP = "measure the overhead and the savings of Backhaul and compare each figure with its limit"
EXAMPLES = ("backhaul bench --json bench.json",)
GROUP_LIMIT_S = 600.0
WHOLE_S = 840.0
"""Seconds for all figures together, so that `make bench` takes under 15 minutes on slow machines too."""
NOMINAL_S = {
    "steps": 150,
    "small_frozen": 30,
    "small": 40,
    "deferred": 180,
    "deferred_third": 220,
    "deferred_lost": 130,
    "deferred_wire": 50,
    "deferred_lora": 100,
    "peak_flat": 140,
    "peaks": 40,
    "connections": 110,
    "compression_thin": 35,
}
"""Seconds of the longest groups on a slow machine if none is hurried. All others take about `_SHORT_S`."""
_SHORT_S = 25
_END_S = 10.0
_CORES = 2
# glibc's thresholds for a process whose resident memory is measured. With the defaults, fragmentation would count too.
_PEAK_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
# The allocator keeps freed memory. Otherwise page faults, which any small allocation changes, would count as checks.
_CHECKS_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "8589934592", "MALLOC_TRIM_THRESHOLD_": "8589934592"}
ENVIRONMENTS = {
    "peaks": _PEAK_ENVIRONMENT,
    "peak_flat": _PEAK_ENVIRONMENT,
    "checks_large": _CHECKS_ENVIRONMENT,
    "checks_small": _CHECKS_ENVIRONMENT,
}

RunGroup = Callable[[str, Sequence[int], float], list[Outcome]]
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
        cores = _cores()
    except ValueError as error:
        print(f"backhaul bench: {error}", file=sys.stderr)
        return 2
    if arguments.json is not None and not os.access(arguments.json.absolute().parent, os.W_OK):
        print(f"backhaul bench: --json {arguments.json}: its directory is missing or not writable", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _interrupt)  # Raises, so that the processes it started are ended.
    os.environ[VARIABLE] = arguments.device
    if arguments.hivemind:
        os.environ[HIVEMIND] = arguments.hivemind
    machine = describe(cores[0], cores[1], arguments.device)
    outcomes = measure(figures, cores, run_group)
    print("\n" + as_table(outcomes))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_json(outcomes, machine), indent=2) + "\n")
    return 1 if is_failed(outcomes) else 0


def measure(figures: Sequence[Figure], cores: Sequence[int], run_group: RunGroup) -> list[Outcome]:
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
            outcomes = {outcome.name: outcome for outcome in run_group(group, cores, pace)}
        except RuntimeError as error:
            outcomes = {name: without_value(name, Verdict.FAILED, str(error)) for name in names}
        for name in names:
            missing = without_value(name, Verdict.FAILED, "the measurement did not report this figure")
            by_name[name] = outcomes.get(name, missing)
            print("  " + as_line(by_name[name]), file=sys.stderr, flush=True)  # In case a later group is interrupted.
    return [by_name[figure.name] for figure in figures]


def _pace(left_s: float, groups: Sequence[str]) -> float:
    """Returns the part of its time that each of the remaining groups may take, at most 1."""
    nominal_s = sum(NOMINAL_S.get(group, _SHORT_S) for group in groups)
    return max(0.0, min(1.0, left_s / nominal_s))


def run_group(group: str, cores: Sequence[int], pace: float) -> list[Outcome]:
    """Measures a group in a process of its own, in which each op uses one thread.

    Args:
        group: The name of the group.
        cores: The trainer's core and the worker's.
        pace: The part of its time that the measurement may take.

    Raises:
        RuntimeError: The process failed or timed out. The message is its last line on stderr.
    """
    settings = {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6", PACE: str(pace)}
    environment = {**os.environ, **settings, **ENVIRONMENTS.get(group, {})}
    with tempfile.TemporaryDirectory(prefix="backhaul-bench-") as directory:
        results = Path(directory) / "outcomes.json"
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "backhaul_lab.bench.child", group, *map(str, cores), str(results)],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches only this process, which then ends the child.
        )
        try:
            _, stderr = process.communicate(timeout=GROUP_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the measurement took longer than {GROUP_LIMIT_S:g} s") from None
        finally:
            _end(process)
        if process.returncode or not results.exists():
            last = stderr.strip().splitlines()[-1:] or [f"the measurement ended with code {process.returncode}"]
            print(stderr, file=sys.stderr)
            raise RuntimeError(last[0])
        return [Outcome(**fields) for fields in json.loads(results.read_text())]


def _end(process: "subprocess.Popen[str]") -> None:
    """Ends a measurement, by force if it does not end in time. It ends the processes that it started."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.stderr is not None:
        process.stderr.close()


def _cores() -> list[int]:
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(usable) < _CORES:
        raise ValueError(f"measuring needs Linux and {_CORES} cores, one for the trainer and one for the worker")
    return usable[:_CORES]


def _on_device(figures: list[Figure], device: str) -> list[Figure]:
    """Returns the figures that exist for a device. Raises ValueError if there are none or the device is missing."""
    if device == "cpu":
        return figures
    import torch

    if not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no CUDA device that torch can use")
    on_device = [figure for figure in figures if figure.group in GROUPS]
    if not on_device:
        raise ValueError("--device cuda: none of these figures is measured on cuda")
    return on_device


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt

"""`backhaul bench`. Measures nothing itself: each group of figures has a process of its own, fresh and pinned."""

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

from backhaul_bench.device import GROUPS, VARIABLE
from backhaul_bench.figures import FIGURES, Figure, Verdict, chosen
from backhaul_bench.machine import HIVEMIND, describe
from backhaul_bench.outcomes import Outcome, as_json, as_line, as_table, is_failed, without_value

HELP = "measure what Backhaul costs and spares, each figure beside its limit"
GROUP_LIMIT_S = 600.0
LAST_BEGIN_S = 855.0
"""No group begins later: `make bench` takes under 15 minutes also where all is slow. Those without a limit are last."""
_END_S = 10.0
_CORES = 2
# glibc's thresholds in a process whose resident memory is measured, else it is fragmentation that is measured.
_PEAK_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
# The allocator keeps what it has: page faults, which change with every small allocation, would count as the checks'.
_CHECKS_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "8589934592", "MALLOC_TRIM_THRESHOLD_": "8589934592"}
ENVIRONMENTS = {
    "peaks": _PEAK_ENVIRONMENT,
    "peak_flat": _PEAK_ENVIRONMENT,
    "checks_large": _CHECKS_ENVIRONMENT,
    "checks_small": _CHECKS_ENVIRONMENT,
}

RunGroup = Callable[[str, Sequence[int]], list[Outcome]]
"""Measures the figures of a group on two cores, the trainer's and the worker's. Raises RuntimeError."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "--hivemind", metavar="PYTHON", default="", help="of an environment with hivemind, which one figure is beside"
    )
    names = ", ".join(figure.name for figure in FIGURES)
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="where trainer and worker compute; on cuda only figures of training are measured (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    parser.add_argument(
        "--only",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help=f"only these figures, of: {names}",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints, writes. Returns 1 if a figure failed, 0 also where limits are missed."""
    try:
        figures = _on_device(chosen(arguments.only), arguments.device)
        cores = _cores()
    except ValueError as error:
        print(f"backhaul bench: {error}", file=sys.stderr)
        return 2
    if arguments.json is not None and not os.access(arguments.json.absolute().parent, os.W_OK):
        print(f"backhaul bench: --json {arguments.json} can't be written there", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _interrupt)  # so that nothing is left behind then either
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
    """The outcomes of the figures, in their order. A group that breaks fails its own figures and no others."""
    found: dict[str, Outcome] = {}
    began_s = monotonic()
    for group in dict.fromkeys(figure.group for figure in figures):
        names = [figure.name for figure in figures if figure.group == group]
        after_s = monotonic() - began_s
        print(f"measuring {', '.join(names)} after {after_s:.0f} s", file=sys.stderr, flush=True)
        try:
            measured = run_group(group, cores) if after_s <= LAST_BEGIN_S else _for_want_of_time(names)
            outcomes = {outcome.name: outcome for outcome in measured}
        except RuntimeError as error:
            outcomes = {name: without_value(name, Verdict.FAILED, str(error)) for name in names}
        for name in names:
            missing = without_value(name, Verdict.FAILED, "the measurement did not give it")
            found[name] = outcomes.get(name, missing)
            print("  " + as_line(found[name]), file=sys.stderr, flush=True)  # in case what follows is interrupted
    return [found[figure.name] for figure in figures]


def _for_want_of_time(names: Sequence[str]) -> list[Outcome]:
    note = f"no time was left: backhaul bench --only {' '.join(names)}"
    return [without_value(name, Verdict.UNAVAILABLE, note) for name in names]


def run_group(group: str, cores: Sequence[int]) -> list[Outcome]:
    """Measures a group in a process of its own, with one thread for each op.

    Raises:
        RuntimeError: It broke or took too long, with what it said last.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6", **ENVIRONMENTS.get(group, {})}
    with tempfile.TemporaryDirectory(prefix="backhaul-bench-") as directory:
        results = Path(directory) / "outcomes.json"
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "backhaul_bench.child", group, *map(str, cores), str(results)],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C is for us, who then end it
        )
        try:
            _, said = process.communicate(timeout=GROUP_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"it took longer than {GROUP_LIMIT_S:g} s") from None
        finally:
            _end(process)
        if process.returncode or not results.exists():
            last = said.strip().splitlines()[-1:] or [f"it ended with code {process.returncode}"]
            print(said, file=sys.stderr)
            raise RuntimeError(last[0])
        return [Outcome(**found) for found in json.loads(results.read_text())]


def _end(process: "subprocess.Popen[str]") -> None:
    """Ends a measurement, which ends what it has started; by force if it must be."""
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
        raise ValueError(f"it needs Linux and {_CORES} cores, one for the trainer and one for the worker")
    return usable[:_CORES]


def _on_device(figures: list[Figure], device: str) -> list[Figure]:
    """Those that a device has. Raises ValueError where it isn't there, or has none of them."""
    if device == "cpu":
        return figures
    import torch

    if not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no CUDA device that torch can use")
    found = [figure for figure in figures if figure.group in GROUPS]
    if not found:
        raise ValueError("--device cuda: none of these figures has work for it")
    return found


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt

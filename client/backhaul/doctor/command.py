"""`backhaul doctor`."""

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from backhaul._cli.environment_options import obstacle_to
from backhaul.doctor.check import Check, as_json, failed
from backhaul.doctor.profile.model_options import add_model_options, config_of, divide_cores, say_part, target_of
from backhaul_runtime.errors import AddressError, BackhaulError, SettingError
from backhaul_runtime.process.units import parse_count

if TYPE_CHECKING:
    from backhaul._config import Config
    from backhaul.doctor.profile.target import Target

HELP = "check an installation and a worker, and whether the worker pays for a model"
EXAMPLES = (
    "backhaul doctor                                # checks the installation with a worker on this machine",
    "backhaul doctor --worker gpu-box:50051 --model mytraining:example",
)
_OPTIMIZER_BYTES = 8
"""What AdamW keeps for each trained parameter, in float32."""
_SAMPLE = "four linear layers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `backhaul doctor` to its parser."""
    add_model_options(parser, is_required=False)
    parser.add_argument(
        "--rounds", type=parse_count, default=5, help="measured steps of each kind (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the checks to a file, with all numbers")


def run(arguments: argparse.Namespace) -> int:
    """Runs the checks and prints each when it has ended.

    Returns:
        The exit code: 0 if no check failed, 1 if one did, 2 if an option cannot be used, 130 after Ctrl-C.
    """
    if obstacle := obstacle_to(arguments.json):
        print(f"backhaul doctor: --json {arguments.json}: {obstacle}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _interrupt)  # Raises, so that the processes it started are ended.
    checks: list[Check] = []
    verdicts: list[str] = []
    try:
        config = config_of(arguments)
        target = target_of(arguments) if arguments.model else None
        divide_cores(config)
        for check in _checks(arguments, config, target, verdicts):
            checks.append(check)
            print(check, flush=True)
    except (AddressError, SettingError) as error:
        print(f"backhaul doctor: {error.message}", file=sys.stderr)
        return 2
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_json(checks), indent=2) + "\n")
    names = failed(checks)
    print(f"\n{len(names)} of {len(checks)} checks failed: {', '.join(names)}." if names else "\nNo check failed.")
    print("\n".join(verdicts or ["Verdict: give --model, and the worker is judged by what a step of the model costs."]))
    return 1 if names else 0


def _checks(
    arguments: argparse.Namespace, config: "Config", target: "Target | None", verdicts: list[str]
) -> "Iterator[Check]":
    from backhaul.doctor.advice import machine_check, model_checks, verdict
    from backhaul.doctor.installation import connection_checks, installation, speed_check
    from backhaul.doctor.profile.measurement import measure_model
    from backhaul.doctor.sample import sample
    from backhaul.doctor.surroundings import look

    yield installation()
    try:
        measured = measure_model(
            target or sample(), config, arguments.rounds, with_graphs=target is not None, on_part=say_part
        )
    except (AddressError, SettingError):
        raise
    except BackhaulError as error:
        todo = "" if config.worker else "Start a worker yourself and name it with --worker."
        yield Check("worker", "failed", error.message, todo)
        return
    yield (machine := machine_check(measured.disturbed))
    for worker in measured.workers:
        name = worker.address or "on this machine, started for these checks"
        yield Check("worker", "ok", f"a worker answers: {name}.")
        yield from connection_checks(worker, config)
        if target is None:
            yield speed_check(worker, measured.plain, _SAMPLE)
        else:
            fixed_bytes = measured.plain.model_bytes + _OPTIMIZER_BYTES * measured.plain.trained_parameters
            of_model = model_checks(measured.plain, worker, look(fixed_bytes, target.device))
            yield from of_model
            verdicts.append(verdict(measured.plain, [machine, *of_model]))


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt

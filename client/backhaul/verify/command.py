"""`backhaul verify`."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from backhaul._cli.environment_options import obstacle_to
from backhaul._config import Config, Settings, resolve
from backhaul._setting import texts_of
from backhaul.verify.verdicts import as_json, counted, exit_code

if TYPE_CHECKING:
    from backhaul.verify.recomputation import Recomputer

HELP = "compute recorded steps of a training again, and compare"
EXAMPLES = (
    "backhaul verify evidence                       # computes all recorded steps again on this machine",
    "backhaul verify evidence --worker gpu-box:50051 --step 100 --segment Block",
)
_PATIENT_S = 30.0
"""A worker is given this time without a message: nobody waits for it but this command."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `backhaul verify` to its parser."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory that Settings(evidence=DIR) wrote")
    parser.add_argument("--worker", metavar="ADDRESS", help="running worker that computes (default: this process)")
    said = texts_of(Config)
    for option, setting, metavar in (("--token-file", "token_file", "FILE"), ("--tls", "tls", "DIR")):
        sentence = said[setting].split(". ")[0].rstrip(".")
        parser.add_argument(option, metavar=metavar, help=sentence[0].lower() + sentence[1:])
    parser.add_argument(
        "--step", type=int, action="extend", nargs="+", default=[], metavar="N", help="only these steps, from 0"
    )
    parser.add_argument("--segment", default="", metavar="NAME", help="only calls of this function or module")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts to a file")


def run(arguments: argparse.Namespace) -> int:
    """Judges the calls of the directory and prints each verdict.

    Returns:
        The exit code: 0 if all are equal, 1 if something differs, 2 if something can't be judged, is damaged, or an
        option can't be used, 130 after Ctrl-C.
    """
    if obstacle := obstacle_to(arguments.json):
        print(f"backhaul verify: --json {arguments.json}: {obstacle}", file=sys.stderr)
        return 2
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise torch's profiler logs each start and stop
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from backhaul._evidence.files import EvidenceReader, UnusableError
    from backhaul.verify.judging import Judge
    from backhaul_runtime.errors import BackhaulError

    signal.signal(signal.SIGTERM, _interrupt)  # raises, so that the session is closed
    verdicts = []
    try:
        reader = EvidenceReader(arguments.directory)
        with _recomputer(arguments) as recomputer:
            judge = Judge(reader, recomputer, set(arguments.step), arguments.segment)
            for verdict in judge.verdicts():
                verdicts.append(verdict)
                print(verdict, flush=True)
    except UnusableError as error:
        print(f"backhaul verify: {error}", file=sys.stderr)
        return 2
    except BackhaulError as error:
        print(f"backhaul verify: {error.message}", file=sys.stderr)
        return 2
    for problem in judge.problems:
        print(f"damaged  {problem}.")
    for note in judge.notes:
        print(f"note     {note}.")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_json(verdicts, judge.problems, judge.notes), indent=2) + "\n")
    counts = counted(verdicts)
    judged = f"{counts['equal']} equal, {counts['differs']} differ, {counts['unknown']} can't be judged"
    print(f"\n{len(verdicts)} segments: {judged}.")
    return exit_code(verdicts, judge.problems)


@contextmanager
def _recomputer(arguments: argparse.Namespace) -> "Iterator[Recomputer]":
    """Yields what computes calls again: this process, or a session with a worker."""
    if not arguments.worker:
        from backhaul.verify.recomputation import Here

        yield Here()
        return
    from backhaul.verify.on_worker import VerifyingSession

    # Whatever else the environment sets is meant for trainings, such as a directory for evidence.
    quiet = Settings(silence_s=_PATIENT_S, telemetry=False, traces=False, evidence="", compression="off")
    config = resolve(
        quiet, worker=arguments.worker, token_file=arguments.token_file, tls=arguments.tls, strict=False, plan=""
    )
    with VerifyingSession(config) as session:
        yield session


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt

"""`backhaul experiment` and its subcommands."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from backhaul_lab.experiment.conduct.records import Records, RecordsError, default_directory, names
from backhaul_lab.experiment.plan.cells import SpecError
from backhaul_lab.experiment.plan.spec import read
from backhaul_lab.harness.processes import interrupt_on_sigterm
from backhaul_runtime.errors import BackhaulError
from backhaul_server.dashboard.history.retention import default_path

HELP = "run trainings over a matrix of trainers, workers, speeds and links, and report what they took"
EXAMPLES = (
    "backhaul experiment run examples/experiments/quick.toml",
    "backhaul experiment list",
    "backhaul experiment report quick",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands to a parser."""
    actions = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND", required=True)

    def add(name: str, act: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=text, description=text)
        action.set_defaults(act=act)
        action.add_argument(
            "--results",
            type=Path,
            default=default_directory(),
            metavar="DIR",
            help="directory with the results of all experiments (default: backhaul/experiments in $XDG_STATE_HOME or "
            "~/.local/state)",
        )
        return action

    conduct = add("run", _run, "run an experiment, or continue one that was interrupted, and write its report")
    conduct.add_argument("file", type=Path, metavar="FILE", help="the experiment, a TOML file")
    conduct.add_argument(
        "--restart", action="store_true", help="discard the results of an earlier run of this experiment"
    )
    conduct.add_argument(
        "--store",
        default=default_path(),
        metavar="FILE",
        help="SQLite file in which the dashboard keeps runs and their steps; :memory: writes none (default: "
        "backhaul/history.sqlite3 in $XDG_STATE_HOME or ~/.local/state)",
    )
    add("list", _list, "list the experiments that have results")
    report = add("report", _report, "write the report of an experiment as one HTML file, Markdown and SVG")
    report.add_argument("name", metavar="NAME", help="the experiment, as `backhaul experiment list` shows it")
    report.add_argument(
        "--to", type=Path, metavar="DIR", help="directory for the report (default: that of the experiment's results)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs a subcommand.

    Returns:
        The exit code: 0; 1 if a cell failed; 2 if the file or an option cannot be used; 130 after Ctrl-C.
    """
    interrupt_on_sigterm()
    try:
        return int(arguments.act(arguments))
    except (SpecError, RecordsError, BackhaulError) as error:
        where = f"{arguments.file}: " if arguments.act is _run and isinstance(error, SpecError) else ""
        print(f"backhaul experiment: {where}{error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("backhaul experiment: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"backhaul experiment: {error.filename or arguments.results}: {error.strerror}", file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace) -> int:
    from backhaul_lab.experiment.conduct.progress import Progress
    from backhaul_lab.experiment.conduct.runner import Runner, open_fabric
    from backhaul_lab.harness.machine import describe

    experiment = read(arguments.file)
    records = Records(arguments.results, experiment.name)
    nodes = open_fabric(experiment)  # before anything is discarded: this machine may not be able to run it
    with records.locked():
        if arguments.restart:
            records.discard()
        records.begin(experiment, describe())
        # Absolute, because nodes may have other directories.
        store = "" if arguments.store in {"", ":memory:"} else str(Path(arguments.store).absolute())
        runner = Runner(experiment, records, nodes, store)
        cells, remaining = len(experiment.matrix.cells), len(runner.remaining)
        done = cells * experiment.repeats - remaining
        print(
            f"{experiment.name}: {cells} cells, {experiment.repeats} repeats each"
            + (f"; {done} of {cells * experiment.repeats} visits were finished before" if done else ""),
            file=sys.stderr,
        )
        try:
            outcome = runner.run(Progress(remaining))
        except KeyboardInterrupt:
            print("backhaul experiment: interrupted; the same command continues with what is missing", file=sys.stderr)
            return 130
    for text in outcome.unequal:
        print(f"backhaul experiment: UNEQUAL GRADIENTS: {text}", file=sys.stderr)
    for text in outcome.failed:
        print(f"backhaul experiment: failed: {text}", file=sys.stderr)
    _write(records, records.path)
    return 1 if outcome.failed or outcome.unequal else 0


def _list(arguments: argparse.Namespace) -> int:
    experiments = names(arguments.results)
    if not experiments:
        print(f"There are no results in {arguments.results}.")
    rows = [("NAME", "VISITS", "FAILED", "DATE", "TITLE")]
    for name in experiments:
        records = Records(arguments.results, name)
        try:
            experiment, visits = records.experiment(), records.visits()
        except RecordsError:
            rows.append((name, "", "", "", "its record is damaged, or of another version of Backhaul"))
            continue
        settings = experiment["settings"]
        failed = sum(visit["status"] != "ok" for visit in visits)
        total = len(settings["cells"]) * settings["repeats"]
        rows.append(
            (name, f"{len(visits)}/{total}", str(failed), experiment["machine"].get("date", "")[:10], settings["title"])
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows if experiments else ():
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _report(arguments: argparse.Namespace) -> int:
    known = names(arguments.results)
    if arguments.name not in known:
        there = f"there are {', '.join(known)}" if known else "there are none"
        print(f'backhaul experiment: no results of "{arguments.name}" in {arguments.results}: {there}', file=sys.stderr)
        return 2
    records = Records(arguments.results, arguments.name)
    _write(records, arguments.to or records.path)
    return 0


def _write(records: Records, folder: Path) -> None:
    from backhaul_lab.experiment.report.pages import write_report

    for path in records.damaged():
        print(f"backhaul experiment: {path} is damaged and left out: run the experiment again", file=sys.stderr)
    for path in write_report(records.experiment(), records.visits(), folder):
        print(path)

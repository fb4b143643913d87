"""The records of an experiment: one file for each finished visit of a cell, written at once or not at all."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backhaul_lab.experiment.plan.spec import Experiment
from backhaul_server.dashboard.history.retention import default_path

_FILE = "experiment.json"
_EXPERIMENT = {"settings": dict, "machine": dict}
_SETTINGS = {
    "title": str, "digest": str, "repeats": int, "steps": int, "model": dict, "nodes": dict, "events": list,
    "charts": list, "varied": list, "cells": list,
}  # fmt: skip
"""What the record of an experiment has, and its settings."""
_VISIT = {"cell": int, "repeat": int, "status": str, "shares": dict}
_MEASURED = {
    "step_s": dict, "peak_bytes": dict, "carried": dict, "trainer_used": (int, float),
}  # fmt: skip
"""What a visit's record has, and that of one that was measured."""


class RecordsError(Exception):
    """The records of an experiment cannot be used. The message says why, and what to do."""


class OtherExperimentError(RecordsError):
    """The directory holds the records of another file, of another version of it, or of another machine."""


def default_directory() -> Path:
    """Returns the directory of all experiments' records, beside the history of the dashboard."""
    store = default_path()
    return Path("experiments") if store == ":memory:" else Path(store).parent / "experiments"


@dataclass(frozen=True, slots=True)
class Visit:
    """One repeat of one cell.

    Attributes:
        cell: Number of the cell in the matrix.
        repeat: Number of the repeat, from 0.
    """

    cell: int
    repeat: int


class Records:
    """The records of one experiment.

    Args:
        directory: The directory of all experiments.
        name: Name of the experiment, which is the directory's name inside.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self.path = directory / name

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other runs of this experiment away meanwhile, however this process ends.

        Raises:
            RecordsError: Another process runs this experiment.
            OSError: The directory cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with (self.path.parent / f"{self.path.name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RecordsError(
                    f"another process runs this experiment with {self.path}. Wait for it, or choose another directory "
                    "with --results"
                ) from None
            yield

    def begin(self, experiment: Experiment, machine: Mapping[str, Any]) -> None:
        """Creates the directory, or continues with the one of an interrupted run.

        Raises:
            OtherExperimentError: The records are those of another version of the file, of other versions of packages,
                or of another machine.
            RecordsError: The records are damaged.
            OSError: The directory cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if (self.path / _FILE).exists():
            stored = self.experiment()
            other = ""
            if stored["settings"]["digest"] != experiment.digest:
                other = "of another version of this file"
            elif changes := _changes(stored["machine"], machine):
                other = f"that were measured with {changes}"
            if other:
                raise OtherExperimentError(
                    f"{self.path} holds results {other}. Keep them by choosing another directory with --results, or "
                    "discard them with --restart"
                )
            return
        write(self.path / _FILE, {"settings": experiment.settings(), "machine": machine})

    def discard(self) -> None:
        """Removes the records. Raises OSError. A directory that holds no experiment is left alone."""
        if (self.path / _FILE).exists():
            shutil.rmtree(self.path)

    def experiment(self) -> dict[str, Any]:
        """Returns the settings and the machine. Raises OSError, or RecordsError if the file is damaged."""
        content = _read(self.path / _FILE)
        if not (_has(content, _EXPERIMENT) and _has(content["settings"], _SETTINGS)):
            raise RecordsError(
                f"{self.path / _FILE} is damaged, or of another version of Backhaul: restore it, or discard the "
                "results with --restart"
            )
        return dict(content)

    def put(self, visit: Visit, record: Mapping[str, Any]) -> None:
        """Writes the record of a finished visit."""
        write(self._file(visit), {"cell": visit.cell, "repeat": visit.repeat, **record})

    def get(self, visit: Visit) -> dict[str, Any] | None:
        """Returns the record of a finished visit; None if it is not finished, or if its record is damaged."""
        record = _read(self._file(visit))
        return record if _is_visit(record) else None

    def visits(self) -> list[dict[str, Any]]:
        """Returns the records of all finished visits by cell and repeat, without damaged ones."""
        return [record for path in self._files() if _is_visit(record := _read(path))]

    def damaged(self) -> list[Path]:
        """Returns the files of visits that hold no whole record. `run` measures these visits again."""
        return [path for path in self._files() if not _is_visit(_read(path))]

    def _files(self) -> list[Path]:
        return sorted(self.path.glob("cell-*.json"))

    def _file(self, visit: Visit) -> Path:
        return self.path / f"cell-{visit.cell:03}-repeat-{visit.repeat:02}.json"


def write(path: Path, content: Any) -> None:
    """Writes JSON so that a reader, or a run that continues, sees all of it or nothing."""
    text = json.dumps(content, indent=1, sort_keys=True) + "\n"
    draft = path.with_suffix(f".draft-{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        with suppress(OSError):  # the disk is full, or the draft is in its place
            draft.unlink()


def _read(path: Path) -> Any:
    """Returns the JSON of a file; None if there is none. Raises OSError for a file that may not be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        return None


def _has(content: Any, kinds: Mapping[str, Any]) -> bool:
    """Returns whether an object of JSON has values of these types by these names."""
    return isinstance(content, dict) and all(isinstance(content.get(key), kind) for key, kind in kinds.items())


def _is_visit(record: Any) -> bool:
    if not _has(record, _VISIT):
        return False
    return _has(record, _MEASURED) if record["status"] == "ok" else _has(record, {"why": str})


def _changes(stored: Mapping[str, Any], machine: Mapping[str, Any]) -> str:
    """Returns what differs between two machines and their packages, as they were; empty if nothing does."""
    earlier, now = (
        {**one.get("versions", {}), **{key: one.get("hardware", {}).get(key) for key in ("cpu", "usable_cores")}}
        for one in (stored, machine)
    )
    return ", ".join(
        f"{name} {earlier.get(name)} instead of {now.get(name)}".replace("usable_cores", "usable cores:")
        for name in sorted({*earlier, *now})
        if earlier.get(name) != now.get(name)
    )


def names(directory: Path) -> list[str]:
    """Returns the names of the experiments that have records."""
    return sorted(path.parent.name for path in directory.glob(f"*/{_FILE}"))

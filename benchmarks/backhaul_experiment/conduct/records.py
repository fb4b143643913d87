"""The records of an experiment: one file for each finished visit of a cell, written at once or not at all."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backhaul_experiment.plan.spec import Experiment
from backhaul_server.dashboard.history.options import default_path

_FILE = "experiment.json"
_COSTS = "costs.json"


class OtherExperimentError(Exception):
    """The directory holds the records of another file, or of another version of it."""


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

    def begin(self, experiment: Experiment, machine: Mapping[str, Any]) -> None:
        """Creates the directory, or continues with the one of an interrupted run.

        Raises:
            OtherExperimentError: The records are those of another version of the file.
            OSError: The directory cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if (self.path / _FILE).exists():
            if self.experiment()["settings"]["digest"] != experiment.digest:
                raise OtherExperimentError(
                    f"{self.path} holds the results of another version of this file. Keep them by choosing another "
                    "directory with --results, or discard them with --restart"
                )
            return
        write(self.path / _FILE, {"settings": experiment.settings(), "machine": machine})

    def discard(self) -> None:
        """Removes the records. Raises OSError. A directory that holds no experiment is left alone."""
        if (self.path / _FILE).exists():
            shutil.rmtree(self.path)

    def experiment(self) -> dict[str, Any]:
        """Returns the settings and the machine. Raises OSError or ValueError."""
        content: dict[str, Any] = json.loads((self.path / _FILE).read_text())
        return content

    def put(self, visit: Visit, record: Mapping[str, Any]) -> None:
        """Writes the record of a finished visit."""
        write(self._file(visit), {"cell": visit.cell, "repeat": visit.repeat, **record})

    def has(self, visit: Visit) -> bool:
        """Returns whether a visit is finished."""
        return self._file(visit).exists()

    def get(self, visit: Visit) -> dict[str, Any]:
        """Returns the record of a finished visit."""
        record: dict[str, Any] = json.loads(self._file(visit).read_text())
        return record

    def visits(self) -> list[dict[str, Any]]:
        """Returns the records of all finished visits by cell and repeat."""
        return [json.loads(path.read_text()) for path in sorted(self.path.glob("cell-*.json"))]

    def put_costs(self, costs: Mapping[str, Any]) -> None:
        """Writes the costs that the simulator predicts from."""
        write(self.path / _COSTS, costs)

    def costs(self) -> dict[str, Any]:
        """Returns the costs; empty if they were not measured."""
        path = self.path / _COSTS
        return json.loads(path.read_text()) if path.exists() else {}

    def _file(self, visit: Visit) -> Path:
        return self.path / f"cell-{visit.cell:03}-repeat-{visit.repeat:02}.json"


def write(path: Path, content: Any) -> None:
    """Writes JSON so that a reader, or a run that continues, sees all of it or nothing."""
    draft = path.with_suffix(f".draft-{os.getpid()}")
    draft.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    draft.replace(path)


def names(directory: Path) -> list[str]:
    """Returns the names of the experiments that have records."""
    return sorted(path.parent.name for path in directory.glob(f"*/{_FILE}"))

"""Runs an experiment: all cells in turns, with a record for each finished visit."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from backhaul_lab.experiment.conduct.measurement import FAILED, OK, UNEQUAL, Measurement, OpenFabric
from backhaul_lab.experiment.conduct.progress import Progress
from backhaul_lab.experiment.conduct.records import Records, Visit
from backhaul_lab.experiment.nodes import cpu_shares, network
from backhaul_lab.experiment.nodes.fabric import LocalFabric
from backhaul_lab.experiment.plan.cells import Cell, SpecError
from backhaul_lab.experiment.plan.shares import NodeShares, shares_of
from backhaul_lab.experiment.plan.spec import Experiment
from backhaul_lab.harness.machine import usable_cores


@dataclass(frozen=True, slots=True)
class ExperimentOutcome:
    """How a run has ended.

    Attributes:
        failed: Visits that failed, each as a text.
        unequal: Visits whose gradients were unequal.
    """

    failed: tuple[str, ...]
    unequal: tuple[str, ...]


def schedule(experiment: Experiment) -> list[Visit]:
    """Returns all visits in their order: every cell once, then every cell again from another one on, and so on.

    So a machine that becomes slower, or has a busy hour, slows all cells down and not the last ones.
    """
    count = len(experiment.matrix.cells)
    return [Visit((repeat + number) % count, repeat) for repeat in range(experiment.repeats) for number in range(count)]


def open_fabric(experiment: Experiment) -> OpenFabric:
    """Returns what creates the nodes of a cell. Raises SpecError if this machine cannot have such nodes."""
    kind = experiment.nodes.kind
    if kind == "ray":
        from backhaul_lab.experiment.nodes.ray_hosts import RayFabric, join_cluster

        join_cluster(experiment.nodes.ray_address)
        return lambda cell, folder: RayFabric(cell, experiment.nodes, folder)
    if kind == "namespace" and (why := network.obstacle()):
        raise SpecError(f'nodes.kind: {why}. Use nodes.kind = "process", whose links are proxies and need no rights')
    return lambda cell, folder: LocalFabric(cell, experiment.nodes, folder, is_in_namespaces=kind == "namespace")


def node_shares(experiment: Experiment, cell: Cell) -> NodeShares:
    """Returns the shares of a cell's nodes on this machine, or on a Ray cluster."""
    if experiment.nodes.kind == "ray":
        from backhaul_lab.experiment.nodes.ray_hosts import shares_on_cluster

        return shares_on_cluster(cell)
    why = cpu_shares.obstacle() if experiment.nodes.throttle else "nodes.throttle is false"
    cores = len(usable_cores()) or os.cpu_count() or 1
    return shares_of(cell, cores, why)


class Runner:
    """Runs the visits of an experiment that have no record yet.

    Args:
        experiment: The experiment to run.
        records: Where records are written.
        nodes: What creates the nodes of a cell, see `open_fabric`.
        store: The history file of the dashboard; empty to write none.
    """

    def __init__(self, experiment: Experiment, records: Records, nodes: OpenFabric, store: str) -> None:
        self._experiment, self._records = experiment, records
        throttles = experiment.nodes.throttle and experiment.nodes.kind != "ray"
        self._measurement = Measurement(
            experiment,
            nodes,
            partial(node_shares, experiment),
            cpu_shares.cpu_shares if throttles else None,
            store,
            records.path / "running",
        )
        self.remaining = [visit for visit in schedule(experiment) if not self._is_finished(visit)]

    def run(self, progress: Progress) -> ExperimentOutcome:
        """Runs the remaining visits.

        Args:
            progress: Shows every visit to the user.
        """
        failed: dict[int, str] = {}
        # Those of earlier runs are not measured again, and stay what the command has to say.
        unequal = [
            f"{self._name(visit)}: {record['why']}"
            for visit in schedule(self._experiment)
            if (record := self._records.get(visit)) is not None and record["status"] == UNEQUAL
        ]
        without_history = ""
        for visit in self.remaining:
            cell, name = self._experiment.matrix.cells[visit.cell], self._name(visit)
            progress.begin(name)
            if visit.cell in failed:
                progress.end("left out, because the cell has failed")
                continue
            record = self._measurement.visit(cell, visit.repeat)
            self._records.put(visit, record)
            progress.end(summary(record))
            if (trouble := record.get("history", "")) != without_history:
                without_history = trouble
                progress.say(f"the dashboard will not show these runs: {trouble}" if trouble else "runs are kept again")
            if record["status"] == UNEQUAL:
                unequal.append(f"{name}: {record['why']}")
                progress.say(f"UNEQUAL GRADIENTS in {name}: {record['why']}")
            if record["status"] == FAILED:
                failed[visit.cell] = f"{name}: {record['why']}"
                progress.say("\n".join(f"    {line}" for line in record["log"].splitlines()[-5:]))
        return ExperimentOutcome(tuple(failed.values()), tuple(unequal))

    def _name(self, visit: Visit) -> str:
        cell = self._experiment.matrix.cells[visit.cell]
        return f"cell {cell.number} ({cell.shown(self._experiment.matrix.varied)}), repeat {visit.repeat + 1}"

    def _is_finished(self, visit: Visit) -> bool:
        record = self._records.get(visit)
        return record is not None and record["status"] != FAILED


def summary(record: Mapping[str, Any]) -> str:
    """Returns what a visit has measured, in a few words."""
    if record["status"] != OK:
        return f"{record['status'].upper()}: {record['why']}"
    by_name = {
        name: median(step for of_trainer in trainers for step in of_trainer)
        for name, trainers in record["step_s"].items()
    }
    times = ", ".join(f"{name} {step_s * 1e3:.0f} ms" for name, step_s in by_name.items())
    marks = ", core-bound" if record["shares"]["is_core_bound"] else ""
    return f"{times}{marks}"

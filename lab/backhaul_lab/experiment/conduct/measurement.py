"""Measures one visit of a cell: starts its nodes, lets the variants take turns, and returns the record."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from backhaul_lab.experiment.nodes.cpu_shares import CpuShares
from backhaul_lab.experiment.nodes.fabric import Fabric
from backhaul_lab.experiment.plan.cells import Cell
from backhaul_lab.experiment.plan.shares import NodeShares
from backhaul_lab.experiment.plan.spec import BACKHAUL, NONE, VARIANTS, Experiment
from backhaul_lab.harness.core_times import MachineTimes, process_ran_s
from backhaul_lab.harness.processes import ChildError, ChildProcess
from backhaul_lab.harness.stage import OVER_TCP

OK, FAILED, UNEQUAL = "ok", "failed", "unequal"
"""States of a visit. One whose gradients are unequal has failed as well, and is never tried again."""
_COUNTS = ("up_bytes", "down_bytes", "remote", "fallbacks")
_SUMS = ("turn_s", "trainers_link_bytes", "workers_link_bytes", "trainers_ran_s", "workers_ran_s")
_LONGEST_TAG = 28
"""Characters of an experiment's name in a tag, which may have 40."""

OpenFabric = Callable[[Cell, Path], Fabric]


class Measurement:
    """Measures visits.

    Args:
        experiment: The experiment to which the cells belong.
        open_fabric: Creates the fabric of a cell, given a directory for its logs.
        shares_of: Returns the shares of a cell's nodes.
        cpu_shares: Creates what holds nodes to their shares; None if nodes are not throttled.
        store: The history file of the dashboard; empty to write none.
        folder: Directory for the logs of a visit, which is emptied before and removed after it.
    """

    def __init__(
        self,
        experiment: Experiment,
        open_fabric: OpenFabric,
        shares_of: Callable[[Cell], NodeShares],
        cpu_shares: Callable[[], CpuShares] | None,
        store: str,
        folder: Path,
    ) -> None:
        self._folder = folder
        self._experiment, self._open_fabric, self._shares_of = experiment, open_fabric, shares_of
        self._cpu_shares, self._store = cpu_shares, store

    def visit(self, cell: Cell, repeat: int) -> dict[str, Any]:
        """Runs a repeat of a cell. Returns its record, also if a node does not come up, ends or answers nonsense."""
        record: dict[str, Any] = {"status": OK, "began_at_s": time.time()}
        shares = self._shares_of(cell)
        record["shares"] = asdict(shares)
        try:
            with _emptied(self._folder) as folder, ExitStack() as opened:
                record |= self._measure(cell, repeat, shares, folder, opened)
        except ChildError as error:
            record |= {"status": FAILED, "why": str(error), "log": error.log}
        except subprocess.CalledProcessError as error:
            why = f"{' '.join(map(str, error.cmd))} has ended with code {error.returncode}"
            record |= {"status": FAILED, "why": why, "log": str(error.stderr or "")}
        except OSError as error:
            record |= {"status": FAILED, "why": f"this machine cannot run the cell: {error}", "log": ""}
        record["took_s"] = time.time() - record["began_at_s"]
        return record

    def _measure(self, cell: Cell, repeat: int, shares: NodeShares, folder: Path, opened: ExitStack) -> dict[str, Any]:
        experiment = self._experiment
        record: dict[str, Any] = {}
        throttle = None
        if self._cpu_shares is not None and not shares.is_core_bound:
            throttle = self._cpu_shares()
            opened.callback(throttle.close)
        fabric = opened.enter_context(self._open_fabric(cell, folder))
        trainers = [fabric.start_trainer() for _ in range(cell["trainers"])]  # imports torch meanwhile
        fabric.start_workers()
        collector = fabric.collector(self._store) if self._store else None
        if collector is not None and (trouble := collector.read(experiment.nodes.start_timeout_s)):
            record["history"] = trouble
        for number, trainer in enumerate(trainers):
            trainer.write(json.dumps(self._settings(cell, repeat, number, fabric)))
        for trainer in trainers:
            trainer.read(experiment.nodes.start_timeout_s)
        if throttle is not None:
            record["throttled_by"] = throttle.how
            if experiment.events and not throttle.follows_children:
                why = "a worker that was killed is started again without its share of a core"
                record["shares"] = {**asdict(shares), "is_core_bound": True, "why": why}
            for node in trainers:
                throttle.hold(node.name.replace(" ", "-"), node.pids, shares.trainer)
            for node in fabric.workers:
                throttle.hold(node.name.replace(" ", "-"), node.pids, shares.worker)
        turns = Turns(experiment, fabric, trainers)
        record |= turns.run()
        if record["status"] == OK:
            record["peak_bytes"] = _largest(turns.together("peak"))
        reports = turns.together("report")
        record["runs"] = [report["run"] for report in reports]
        record["parameter_bytes"] = reports[0]["parameter_bytes"]
        record["reasons"] = reports[0]["reasons"]
        for trainer in trainers:
            trainer.end()
        return record

    def _settings(self, cell: Cell, repeat: int, number: int, fabric: Fabric) -> dict[str, Any]:
        """Returns what a trainer reads before it connects."""
        model = asdict(self._experiment.model)
        workers = fabric.address
        if self._experiment.nodes.one_worker_each:
            addresses = workers.split(",")
            workers = addresses[number % len(addresses)]
        connect: dict[str, Any] = {
            "worker": workers,
            "token_file": fabric.token_file or None,
            "returns": cell["returns"],
            "run": f"{self._experiment.name} cell {cell.number} repeat {repeat} trainer {number}",
            **self._experiment.nodes.session,
        }
        settings: dict[str, Any] = {
            **OVER_TCP,
            "boundaries": cell["boundaries"],
            "connect_timeout_s": self._experiment.nodes.start_timeout_s,
            "tags": [f"experiment:{self._experiment.name[:_LONGEST_TAG]}", f"cell:{cell.number}", f"repeat:{repeat}"],
            "notes": cell.shown(self._experiment.matrix.varied),
            **connect.pop("settings", {}),
        }
        values, seed = dict(cell.values), self._experiment.seed
        return {"connect": connect, "settings": settings, "model": model, "cell": values, "seed": seed}


class Turns:
    """The turns of the variants, which all trainers take together.

    Args:
        experiment: Numbers of rounds and steps, and the events.
        fabric: The nodes of the cell.
        trainers: The trainers' processes, which are ready.
    """

    def __init__(self, experiment: Experiment, fabric: Fabric, trainers: Sequence[ChildProcess]) -> None:
        self._experiment, self._fabric, self._trainers = experiment, fabric, trainers

    def run(self) -> dict[str, Any]:
        """Warms up and runs all rounds. Returns what was measured."""
        experiment = self._experiment
        steps: dict[str, list[list[float]]] = {name: [[] for _ in self._trainers] for name in VARIANTS}
        carried = dict.fromkeys((*_COUNTS, *_SUMS), 0.0)
        busy_shares, last_losses = [], []
        for name in VARIANTS:
            self.together("turn", name, experiment.warm_up, [])
        if unequal := self._unequal():
            return unequal
        before = self._machine_times()
        for number in range(experiment.rounds):
            first = number % len(VARIANTS)
            for name in (*VARIANTS[first:], *VARIANTS[:first]):
                # Devices are read by processes of their own, which takes the longer the more nodes a cell has.
                linked = self._fabric.link_bytes()
                ran_s, workers_ran_s, began_s = self._ran_s(), self._workers_ran_s(), time.monotonic()
                answers = self._turn(name, number)
                turn_s = time.monotonic() - began_s
                ran_s, workers_ran_s = self._ran_s() - ran_s, self._workers_ran_s() - workers_ran_s
                for of_trainer, answer in zip(steps[name], answers, strict=True):
                    of_trainer.extend(answer["step_s"][1:])
                if name == NONE:
                    busy_shares.append(ran_s / turn_s / len(self._trainers))
                if name == BACKHAUL:
                    for count in _COUNTS:
                        carried[count] += sum(answer[count] for answer in answers)
                    carried["turn_s"] += turn_s
                    carried["trainers_ran_s"] += ran_s
                    carried["workers_ran_s"] += workers_ran_s
                    sides = zip(("trainers", "workers"), linked, self._fabric.link_bytes(), strict=True)
                    for side, earlier, later in sides:
                        carried[f"{side}_link_bytes"] += later - earlier
                    last_losses = [answer["losses"][-1] for answer in answers]
            if unequal := self._unequal():
                return unequal
        return {
            "status": OK,
            "step_s": steps,
            "carried": {**carried, "steps": experiment.rounds * experiment.steps * len(self._trainers)},
            "losses": last_losses,
            "trainer_used": median(busy_shares),
            "foreign_share": self._machine_times().foreign_share(before) if self._fabric.has_all_processes else None,
        }

    def together(self, *command: Any) -> list[dict[str, Any]]:
        """Lets all trainers execute a command, and returns their answers."""
        for trainer in self._trainers:
            trainer.write(json.dumps(command))
        return [self._answer(trainer) for trainer in self._trainers]

    def _turn(self, name: str, number: int) -> list[dict[str, Any]]:
        """Runs a turn of all trainers, with what happens in it."""
        timed = self._experiment.steps - 1
        killed: dict[int, list[int]] = {}  # workers by step of the turn
        for event in self._experiment.events if name == BACKHAUL else ():
            if event.at_step // timed == number:
                killed.setdefault(1 + event.at_step % timed, []).append(event.kill_worker)
        for trainer in self._trainers:
            trainer.write(json.dumps(["turn", name, self._experiment.steps, sorted(killed)]))
        for step in sorted(killed):
            for trainer in self._trainers:
                trainer.read(self._experiment.nodes.step_timeout_s)
            for worker in killed[step]:
                self._fabric.workers[worker].kill_serving()
            for trainer in self._trainers:
                trainer.write("")
        return [self._answer(trainer) for trainer in self._trainers]

    def _answer(self, trainer: ChildProcess) -> dict[str, Any]:
        """Reads an answer of a trainer. Raises ChildError if there is none, or if it is none."""
        line = trainer.read(self._experiment.nodes.step_timeout_s)
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise trainer.error(f"answered {line[:80]!r}, which is not JSON") from None
        return answer

    def _unequal(self) -> dict[str, Any]:
        """Returns the state of a visit whose gradients are unequal; empty if all are equal."""
        for trainer, answer in zip(self._trainers, self.together("compare"), strict=True):
            for name, (gradients, weights) in answer["unequal"].items():
                why = f"{gradients} gradients and {weights} weights of {name} differ from those without checkpointing"
                return {"status": UNEQUAL, "why": f"{why} on {trainer.name}"}
        return {}

    def _ran_s(self) -> float:
        return sum(trainer.ran_s() for trainer in self._trainers)

    def _workers_ran_s(self) -> float:
        return sum(worker.ran_s() for worker in self._fabric.workers)

    def _machine_times(self) -> MachineTimes:
        ours_s = sum(process.ran_s() for process in self._fabric.processes)
        return MachineTimes(ours_s + (process_ran_s(os.getpid()) or 0.0))


@contextmanager
def _emptied(folder: Path) -> Iterator[Path]:
    """Makes a directory, and removes it. What a run that was killed has left in it is removed before."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _largest(answers: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Returns the largest value of each key."""
    return {name: max(answer[name] for answer in answers) for name in answers[0]}

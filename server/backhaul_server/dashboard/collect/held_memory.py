"""The bytes held for runs on workers over time, beside the memory of their trainers."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from backhaul_server.dashboard.collect.series import LARGEST, Series
from backhaul_server.dashboard.collect.trainers import RUNS, Trainers
from backhaul_server.dashboard.collect.watched import RETENTION_S, Watched

HELD = ("held_bytes", "trainer_peak_bytes", "saved_bytes")
"""Bytes held on all workers for a run, its trainer's peak memory, and the bytes that workers spare the trainer."""


@dataclass(slots=True)
class WorkerMemoryOfRun:
    """The memory of one run over time.

    Attributes:
        run: The id of the run.
        trainer: The host and process of the trainer.
        budget_bytes: The sum of the budgets of the workers that it has sessions on.
        series: Bytes over time, in the order of HELD.
    """

    run: str
    trainer: str
    budget_bytes: int = 0
    series: Series = field(default_factory=lambda: Series(RETENTION_S, len(HELD)))


class HeldMemory:
    """Samples runs with a session.

    A run is kept as long as its last hour has samples; the number of runs is bounded.
    """

    def __init__(self) -> None:
        self._runs: dict[str, WorkerMemoryOfRun] = {}

    def __iter__(self) -> Iterator[WorkerMemoryOfRun]:
        return iter(self._runs.values())

    def sample(self, now_s: float, workers: Iterable[Watched], trainers: Trainers) -> None:
        """Samples the bytes held now for every run with a session."""
        held: dict[str, int] = {}
        budgets: dict[str, int] = {}
        for worker in workers:
            runs = set()
            for session in worker.sessions():
                if not session.run:
                    continue
                runs.add(session.run)
                held[session.run] = min(LARGEST, held.get(session.run, 0) + session.held_bytes)
                if session.run not in self._runs and len(self._runs) < RUNS:
                    self._runs[session.run] = WorkerMemoryOfRun(session.run, session.trainer)
            for run in runs:
                budgets[run] = min(LARGEST, budgets.get(run, 0) + worker.budget_bytes)
        for run, held_bytes in held.items():
            if (record := self._runs.get(run)) is not None:
                record.budget_bytes = budgets[run]
                trainer_run = trainers.find(run)
                of_trainer = (
                    (trainer_run.peak_bytes, trainer_run.last_step.peak_saved_bytes)
                    if trainer_run is not None
                    else (0, 0)
                )
                record.series.append(now_s, (held_bytes, *of_trainer))
        for run in [run for run, record in self._runs.items() if record.series.at_s[-1] < now_s - RETENTION_S]:
            del self._runs[run]

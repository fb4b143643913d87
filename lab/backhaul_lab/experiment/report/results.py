"""What the visits of an experiment amount to: one result for each cell. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from backhaul_lab.experiment.plan.cells import Cell
from backhaul_lab.harness.rounds import Spread

USED = 0.8
"""A visit is disturbed if its trainers, while they only computed, got less than this part of their share of a core."""


@dataclass(frozen=True, slots=True)
class CellResult:
    """The result of a cell. Times are in seconds, and ratios are of steps in the same round.

    Attributes:
        cell: The cell with the values of all axes.
        state: "ok", "failed", "unequal", or "missing" for a cell that has not run.
        why: Why the cell has no measurement; empty if it has one.
        log: The end of the log of the node that failed.
        over_none: Step with Backhaul over one without checkpointing; None if nothing was measured.
        torch_over_none: Step with torch.utils.checkpoint over one without checkpointing.
        over_torch: Step with Backhaul over one with torch.utils.checkpoint.
        step_s: Median step of each variant.
        peak_bytes: Peak memory of activations and gradients of each variant on the trainer.
        step_bytes: Bytes that a trainer sends and receives in a step with Backhaul.
        carried_bytes_per_s: Bytes per second of all trainers while Backhaul's turns ran, as sessions count them.
        trainers_bytes_per_s: Bytes per second that the network devices of the trainers count; 0 without namespaces.
        workers_bytes_per_s: Bytes per second that the network devices of the workers count; 0 without namespaces.
        share: Share of a core that each trainer had.
        trainer_busy: Part of its share that a trainer used while Backhaul's turns ran.
        worker_busy: Part of its share that a worker used meanwhile, on average over all workers.
        is_core_bound: Whether the nodes were not held to their shares, so that the cell says nothing about scaling.
        disturbed: How many visits other programs disturbed.
        visits: How many visits were measured.
        fallbacks: Segments that were meant for a worker and ran on the trainer.
        timeline: Timed steps with Backhaul over the median without checkpointing, for each visit.
    """

    cell: Cell
    state: str
    why: str = ""
    log: str = ""
    over_none: Spread | None = None
    torch_over_none: Spread | None = None
    over_torch: Spread | None = None
    step_s: Mapping[str, float] | None = None
    peak_bytes: Mapping[str, int] | None = None
    step_bytes: float = 0.0
    carried_bytes_per_s: float = 0.0
    trainers_bytes_per_s: float = 0.0
    workers_bytes_per_s: float = 0.0
    share: float = 1.0
    trainer_busy: float = 0.0
    worker_busy: float = 0.0
    is_core_bound: bool = False
    disturbed: int = 0
    visits: int = 0
    fallbacks: int = 0
    timeline: tuple[tuple[float, ...], ...] = ()

    @property
    def is_measured(self) -> bool:
        """Whether the cell has a measurement."""
        return self.over_none is not None


def results(experiment: Mapping[str, Any], visits: Sequence[Mapping[str, Any]]) -> list[CellResult]:
    """Returns the results of all cells.

    Args:
        experiment: The record of the experiment, with its settings.
        visits: The records of its visits.
    """
    settings = experiment["settings"]
    return [
        _result(Cell(number, values), [visit for visit in visits if visit["cell"] == number], settings)
        for number, values in enumerate(settings["cells"])
    ]


def _result(cell: Cell, visits: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> CellResult:
    bad = [visit for visit in visits if visit["status"] != "ok"]
    if bad:
        return CellResult(cell, bad[0]["status"], bad[0]["why"], bad[0].get("log", ""))
    if not visits:
        return CellResult(cell, "missing", "the run was interrupted before this cell")
    timed = settings["steps"] - 1
    rounds = [by_round for visit in visits for by_round in _rounds(visit["step_s"], timed)]
    carried = [visit["carried"] for visit in visits]
    turn_s = sum(part["turn_s"] for part in carried)

    def total(key: str) -> float:
        return float(sum(part[key] for part in carried))

    def busy(side: str) -> float:
        """Returns the part of their shares of a core that the nodes of a side used; visits may differ in shares."""
        had_s = sum(visit["carried"]["turn_s"] * visit["shares"][side] for visit in visits) * cell[f"{side}s"]
        return float(total(f"{side}s_ran_s") / had_s)

    return CellResult(
        cell,
        "ok",
        over_none=Spread.of([taken["backhaul"] / taken["none"] for taken in rounds]),
        torch_over_none=Spread.of([taken["torch"] / taken["none"] for taken in rounds]),
        over_torch=Spread.of([taken["backhaul"] / taken["torch"] for taken in rounds]),
        step_s={
            name: median(step for visit in visits for of_trainer in visit["step_s"][name] for step in of_trainer)
            for name in visits[0]["step_s"]
        },
        peak_bytes={name: max(visit["peak_bytes"][name] for visit in visits) for name in visits[0]["peak_bytes"]},
        step_bytes=(total("up_bytes") + total("down_bytes")) / total("steps"),
        carried_bytes_per_s=(total("up_bytes") + total("down_bytes")) / turn_s,
        trainers_bytes_per_s=total("trainers_link_bytes") / turn_s,
        workers_bytes_per_s=total("workers_link_bytes") / turn_s,
        share=visits[-1]["shares"]["trainer"],
        trainer_busy=busy("trainer"),
        worker_busy=busy("worker"),
        is_core_bound=any(visit["shares"]["is_core_bound"] for visit in visits),
        disturbed=sum(is_disturbed(visit) for visit in visits),
        visits=len(visits),
        fallbacks=int(total("fallbacks")),
        timeline=tuple(
            tuple(step / median(visit["step_s"]["none"][0]) for step in visit["step_s"]["backhaul"][0])
            for visit in visits
        ),
    )


def is_disturbed(visit: Mapping[str, Any]) -> bool:
    """Returns whether other programs took time from the trainers of a visit."""
    return bool(visit["trainer_used"] < USED * visit["shares"]["trainer"])


def _rounds(step_s: Mapping[str, Sequence[Sequence[float]]], timed: int) -> list[dict[str, float]]:
    """Returns the median step of each variant in each round of a visit, over all trainers."""
    count = min(len(of_trainer) for trainers in step_s.values() for of_trainer in trainers) // timed
    return [
        {
            name: median(step for of_trainer in trainers for step in of_trainer[number * timed : (number + 1) * timed])
            for name, trainers in step_s.items()
        }
        for number in range(count)
    ]

"""Compares predictions with measured cells of experiments. Imports no torch.

NOTE [Validation]
1. Nothing is fitted to a step with Backhaul. The costs of a segment are measured on their own, before the cells.
2. A cell of an experiment is predicted relative to its baseline: all costs are scaled so that a step without
   checkpointing takes as long as was measured beside it, in the same repeats. That takes out how fast the machine was
   at that time, and what a model computes outside of its segments. The error without the scaling is shown as well.
3. Cells that say nothing about the model are shown, but do not count: those that were core-bound, because their nodes
   waited for each other's cores; those that other programs disturbed; failed ones; and those with something that is not
   modelled.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from backhaul.simulate.costs import (
    KnownCosts,
    Setup,
    costs_of,
    rate_of_one_connection,
    step_without_checkpointing_s,
)
from backhaul.simulate.fleet.events import simulate
from backhaul.simulate.fleet.setup import FleetSetup
from backhaul.simulate.model import predict
from backhaul_runtime.errors import SettingError

BAR = 0.15
"""The largest median error with which predictions count as valid."""
MOST_FOREIGN = 0.15
"""A cell counts if other programs used at most this part of the machine's cores."""
_STEPS = 12


@dataclass(frozen=True, slots=True)
class ValidatedCell:
    """A measured cell and its prediction.

    Attributes:
        name: What distinguishes the cell.
        measured_s: Median duration of a measured step with Backhaul, in seconds; 0 if there is none.
        predicted_s: Predicted duration, in seconds; 0 if there is none.
        absolute_s: Predicted duration in seconds, not scaled to the cell's baseline; 0 if there is none.
        why_not: Why the cell does not count; empty if it does.
    """

    name: str
    measured_s: float
    predicted_s: float
    absolute_s: float
    why_not: str = ""

    @property
    def error(self) -> float:
        """The predicted duration relative to the measured one, minus 1."""
        return self.predicted_s / self.measured_s - 1


def read_cells(path: Path) -> list[ValidatedCell]:
    """Reads measured cells and predicts them.

    Args:
        path: A directory with the records of an experiment, or a file of `backhaul simulate --measure --json`.

    Raises:
        SettingError: The path holds neither.
    """
    try:
        if path.is_dir():
            return list(_of_experiment(path))
        return list(_of_simulation(json.loads(path.read_text())))
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        raise SettingError(f"--validate {path}: {why}") from None


def _of_simulation(content: Mapping[str, Any]) -> Iterator[ValidatedCell]:
    """Yields the steps that `backhaul simulate --measure` measured beside the costs."""
    known = KnownCosts.read(content)
    for row in content["steps"]:
        if "measured" not in row:
            continue
        setup = Setup(**row["setup"])
        costs = known.of(setup)
        fleet = FleetSetup(
            1,
            setup.workers,
            workers_per_session=setup.workers,
            segments=setup.segments,
            worker_speed=setup.worker_speed,
            worker_link_bytes_per_s=setup.bytes_per_s,
            latency_s=setup.latency_s,
        )
        why_not = ""
        if setup.shares_core:
            why_not = "core-bound"
        elif not row["measured"]["is_conclusive"]:
            why_not = "disturbed"
        # The model of fleets has no memory budgets.
        predicted_s = (
            predict(costs, setup).step_s if setup.memory_bytes else simulate(costs, fleet, steps=_STEPS).step_s
        )
        yield ValidatedCell(row["name"], row["measured"]["step_s"], predicted_s, predicted_s, why_not)


def _of_experiment(directory: Path) -> Iterator[ValidatedCell]:
    """Yields the cells of an experiment, each with the median over its repeats."""
    settings = json.loads((directory / "experiment.json").read_text())["settings"]
    stored = directory / "costs.json"
    known = json.loads(stored.read_text()).get("costs", {}) if stored.exists() else {}
    records: dict[int, list[dict[str, Any]]] = {}
    for file in sorted(directory.glob("cell-*.json")):
        record = json.loads(file.read_text())
        records.setdefault(record["cell"], []).append(record)
    for number, values in enumerate(settings["cells"]):
        shown = ", ".join(
            f"{axis} {values[axis]:g}" if isinstance(values[axis], float) else f"{axis} {values[axis]}"
            for axis in settings["varied"]
        )
        yield _cell(f"{settings['name']}: {shown}", settings, values, records.get(number, []), known)


def _cell(
    name: str,
    settings: Mapping[str, Any],
    values: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    known: Mapping[str, Any],
) -> ValidatedCell:
    finished = [record for record in records if record["status"] == "ok" and not record.get("simulated")]
    if not finished:
        return ValidatedCell(name, 0.0, 0.0, 0.0, "not measured" if not records else "failed")
    measured_s, none_s = (_median_s(finished, variant) for variant in ("backhaul", "none"))
    # The same key as in the experiment's costs.
    rows = values["batch"] // values["micro_batches"]
    kind = f"{values['segment_layers']} layers, {rows} rows, {values['dtype']}"
    obstacle = _obstacle(settings, values, known, kind)
    if obstacle:
        return ValidatedCell(name, measured_s, 0.0, 0.0, obstacle)
    costs, share = costs_of(known[kind]), finished[0]["shares"]["trainer"]
    window_bytes = settings.get("nodes", {}).get("window_kib", 0) << 10
    setup = FleetSetup(
        values["trainers"],
        values["workers"],
        # With one worker for each trainer, trainers that share one are sessions of the same fleet.
        workers_per_session=1 if settings.get("nodes", {}).get("one_worker_each") else values["workers"],
        segments=settings["model"]["layers"] // values["segment_layers"],
        micro_batches=values["micro_batches"],
        is_deferred=values["micro_batches"] > 1,
        boundaries=values["boundaries"],
        trainer_speed=share,
        worker_speed=values["worker_speed"],
        worker_link_bytes_per_s=rate_of_one_connection(values["bandwidth"], values["latency"], window_bytes),
        latency_s=values["latency"],
    )
    of_optimizer_s = setup.segments * costs.optimizer_s
    alone_s = step_without_checkpointing_s(costs, setup.segments) - of_optimizer_s
    scaled = replace(setup, trainer_speed=(setup.micro_batches * alone_s + of_optimizer_s) / none_s)
    predicted_s, absolute_s = (simulate(costs, one, steps=_STEPS).step_s for one in (scaled, setup))
    why_not = ""
    if any(record["shares"]["is_core_bound"] for record in finished):
        why_not = "core-bound"
    elif fmean(record.get("foreign_share") or 0.0 for record in finished) > MOST_FOREIGN:
        why_not = "disturbed"
    return ValidatedCell(name, measured_s, predicted_s, absolute_s, why_not)


def _obstacle(settings: Mapping[str, Any], values: Mapping[str, Any], known: Mapping[str, Any], kind: str) -> str:
    """Returns why a cell has no prediction; empty if it has one."""
    if settings["events"]:
        return "events are not modelled"
    if values["returns"] == "activations":
        return "activations are not modelled"
    return "" if kind in known else "its costs were not measured"


def _median_s(records: Sequence[Mapping[str, Any]], variant: str) -> float:
    steps_s: list[float] = [step for record in records for steps in record["step_s"][variant] for step in steps]
    return median(steps_s)


def median_error(cells: Sequence[ValidatedCell]) -> float | None:
    """Returns the median of the absolute errors of the cells that count; None if none does."""
    errors = [abs(cell.error) for cell in cells if not cell.why_not]
    return median(errors) if errors else None


def cells_as_text(cells: Sequence[ValidatedCell]) -> str:
    """Formats the cells as a text table with the median error below."""
    width = max(len(cell.name) for cell in cells)
    head = f"{'cell':<{width}}{'measured':>12}{'predicted':>12}{'error':>9}{'unscaled':>10}"
    lines = [head, "-" * len(head)]
    for cell in cells:
        numbers = f"{cell.measured_s * 1e3:>9.0f} ms" if cell.measured_s else f"{'':>12}"
        if cell.measured_s and cell.predicted_s:
            unscaled = cell.absolute_s / cell.measured_s - 1
            numbers += f"{cell.predicted_s * 1e3:>9.0f} ms{cell.error:>+9.1%}{unscaled:>+10.1%}"
        lines.append(f"{cell.name:<{width}}{numbers}{f'  ({cell.why_not})' if cell.why_not else ''}")
    count = sum(not cell.why_not for cell in cells)
    middle = median_error(cells)
    if middle is None:
        return "\n".join([*lines, "", "No cell counts, so the predictions are neither confirmed nor refuted."])
    verdict = "below" if middle < BAR else "NOT below"
    lines += ["", f"median of the absolute errors of {count} of {len(cells)} cells: {middle:.1%}, {verdict} {BAR:.0%}"]
    return "\n".join([*lines, "Cells in brackets do not count."])

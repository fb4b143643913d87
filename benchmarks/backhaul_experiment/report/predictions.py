"""What the simulator predicts for cells. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from backhaul.simulate.costs import Costs, Setup, rate_of_one_connection, step_without_checkpointing_s
from backhaul.simulate.deferred import BlockSetup, predict_block
from backhaul.simulate.model import predict
from backhaul_runtime.replay.schedule import Footprint

_TIMES = (
    *("forward_s", "backward_s", "optimizer_s", "record_s", "upload_s", "ingest_s"),
    *("replay_s", "replay_backward_s", "answer_s", "finish_s"),
)


@dataclass(frozen=True, slots=True)
class CellPrediction:
    """What the simulator predicts for a cell.

    Attributes:
        step_s: Duration of a step with Backhaul in seconds; None if the simulator does not model the cell.
        ratio: That duration over the predicted duration of a step without checkpointing.
        why: Why there is no prediction, or what it leaves out; empty if the simulator models all of the cell.
    """

    step_s: float | None = None
    ratio: float | None = None
    why: str = ""


NOT_PREDICTED = CellPrediction()
"""The prediction of a cell for which none was made."""


def kind_of(values: Mapping[str, Any]) -> str:
    """Returns the key of the costs of a cell: what a segment's costs depend on."""
    rows = values["batch"] // values["micro_batches"]
    return f"{values['segment_layers']} layers, {rows} rows, {values['dtype']}"


def predict_cell(
    values: Mapping[str, Any],
    layers: int,
    costs: Mapping[str, Any],
    trainer_share: float,
    *,
    one_worker_each: bool = False,
    window_bytes: int = 0,
) -> CellPrediction:
    """Predicts a cell.

    Args:
        values: The cell's values by axis.
        layers: The number of layers of the model.
        costs: The costs that were measured, by `kind_of`, as JSON.
        trainer_share: Share of a core that the trainer has, by which all costs are divided.
        one_worker_each: Whether each trainer uses one of the workers instead of all of them.
        window_bytes: The most bytes that a connection may have on their way; 0 for any number.
    """
    if kind_of(values) not in costs:
        return CellPrediction(why="the costs of such a segment were not measured")
    if values["returns"] == "activations":
        return CellPrediction(why="the simulator does not model workers that return activations")
    of_segment = _slowed(costs[kind_of(values)], trainer_share)
    segments, micro_batches = layers // values["segment_layers"], values["micro_batches"]
    # Trainers share a worker's core and link equally, at worst all the time.
    workers = 1 if one_worker_each else values["workers"]
    crowd = ceil(values["trainers"] / values["workers"]) if one_worker_each else values["trainers"]
    why = "trainers are modelled as equal shares of each worker" if crowd > 1 else ""
    none_s = step_without_checkpointing_s(replace(of_segment, optimizer_s=0.0), segments) * micro_batches
    none_s += segments * of_segment.optimizer_s
    if micro_batches > 1:
        if values["bandwidth"] or values["latency"]:
            return CellPrediction(why="the simulator does not model links in accumulation blocks")
        speeds = [values["worker_speed"] / crowd] * workers
        block = predict_block(of_segment, BlockSetup(segments, micro_batches, speeds))
        step_s = block.took_s + segments * of_segment.optimizer_s
        return CellPrediction(step_s, step_s / none_s, why)
    setup = Setup(
        segments,
        workers=workers,
        bytes_per_s=rate_of_one_connection(values["bandwidth"] / crowd, values["latency"], window_bytes),
        latency_s=values["latency"],
        worker_speed=values["worker_speed"] / crowd,
    )
    step_s = predict(of_segment, setup).step_s
    return CellPrediction(step_s, step_s / none_s, why)


def _slowed(stored: Mapping[str, Any], share: float) -> Costs:
    """Returns stored costs on a core of which a node has only a share."""
    times = {name: stored[name] / share for name in _TIMES}
    sizes = {name: stored[name] for name in ("weight_bytes", "boundary_bytes")}
    return Costs(**times, **sizes, footprint=Footprint(**stored["footprint"]))

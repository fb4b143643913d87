"""What a plan chooses from. Pure; imports no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from backhaul._config import Boundaries, Local, Returns
from backhaul_lab.plan.workers import PlannedWorker, fastest_first
from backhaul_lab.simulate.layer_costs import LayerCosts

Kind = Literal["plain", "torch", "blocking", "deferred"]
_MOST_LENGTHS = 8


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to train.

    Attributes:
        kind: "plain" is without checkpointing and "torch" with torch's. "blocking" is Backhaul with `loss.backward()`,
            and "deferred" Backhaul with accumulation blocks.
        segment_layers: Number of layers of a segment.
        kept_layers: Number of the last layers that are not checkpointed.
        returns: What workers return, gradients or activations.
        boundaries: How workers get boundaries.
        local: What the trainer does with its share of an accumulation block.
        workers: The workers that get segments; empty without Backhaul.
    """

    kind: Kind
    segment_layers: int = 1
    kept_layers: int = 0
    returns: Returns = "gradients"
    boundaries: Boundaries = "send"
    local: Local = "recompute"
    workers: tuple[PlannedWorker, ...] = ()

    @property
    def is_remote(self) -> bool:
        """Whether workers take part."""
        return bool(self.workers)

    def segments(self, layers: int) -> int:
        """Returns the number of segments of a model with so many layers."""
        return -(-(layers - self.kept_layers) // self.segment_layers)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a session for this plan. The address is left out of a worker that the session starts."""
        addresses = ",".join(worker.address for worker in self.workers if worker.address)
        settings: dict[str, Any] = {"worker": addresses} if addresses else {}
        settings |= {"segment_layers": self.segment_layers, "kept_layers": self.kept_layers}
        return settings | {"returns": self.returns, "boundaries": self.boundaries, "local": self.local}

    def __str__(self) -> str:
        names = {"plain": "without checkpointing", "torch": "torch's checkpoint"}
        if self.kind in names:
            return names[self.kind] + (f", {_count(self.kept_layers, 'layer')} kept" if self.kept_layers else "")
        parts = [f"{self.kind}, {_count(self.segment_layers, 'layer')} per segment"]
        if self.kept_layers:
            parts.append(f"{self.kept_layers} kept")
        if self.returns == "activations":
            parts.append("activations")
        if self.boundaries == "derive":
            parts.append("derived boundaries")
        if self.local == "keep":
            parts.append("share kept")
        if len(self.workers) > 1:
            parts.append(f"{len(self.workers)} workers")
        return ", ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def lengths(layers: int) -> list[int]:
    """Returns the lengths of segments to try: those that give different numbers of segments, at most eight."""
    by_segments = {-(-layers // length): length for length in range(layers, 0, -1)}
    distinct = sorted(by_segments.values())
    if len(distinct) <= _MOST_LENGTHS:
        return distinct
    step = (len(distinct) - 1) / (_MOST_LENGTHS - 1)
    return sorted({distinct[round(number * step)] for number in range(_MOST_LENGTHS)})


def candidates(costs: LayerCosts, workers: Sequence[PlannedWorker], micro_batches: int) -> Iterator[Candidate]:
    """Yields the ways to train, without regard to memory.

    Args:
        costs: The costs of the model's layers.
        workers: The workers. Plans use the fastest one, the two fastest ones, and so on.
        micro_batches: Number of micro-batches of an optimizer step. With one there is nothing to defer.
    """
    yield Candidate("plain")
    kept = sorted({0, costs.plain.layers // 4, costs.plain.layers // 2, 3 * costs.plain.layers // 4})
    yield from (Candidate("torch", kept_layers=layers) for layers in kept)
    ordered = fastest_first(workers)
    for count in range(1, len(ordered) + 1):
        chosen = tuple(ordered[:count])
        for length in lengths(costs.plain.layers):
            for boundaries in ("send", "derive"):
                for layers in kept:
                    yield Candidate("blocking", length, layers, boundaries=boundaries, workers=chosen)
                if micro_batches > 1:
                    for local in ("recompute", "keep"):
                        yield Candidate("deferred", length, boundaries=boundaries, local=local, workers=chosen)
            yield Candidate("blocking", length, returns="activations", workers=chosen)

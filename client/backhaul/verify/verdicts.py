"""What `backhaul verify` says of recorded calls, as text and as JSON. Imports no torch."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Outcome = Literal["equal", "differs", "unknown"]
_MARKS: Mapping[Outcome, str] = {"equal": "equal  ", "differs": "DIFFERS", "unknown": "unknown"}
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that was computed again and has other bits.

    Attributes:
        tensor: Which tensor of the call it is, with dtype and shape.
        distance: How far it is from the recorded one, estimated, relative to the recorded one's norm. None if only
            digests are known of both.
        is_rounding: Whether other hardware may differ by as much.
    """

    tensor: str
    distance: float | None = None
    is_rounding: bool = False

    def __str__(self) -> str:
        if self.distance is None:
            return f"{self.tensor}, of which only digests are known"
        if not self.distance:
            return f"{self.tensor}, in bits but not in numbers that its random projection shows"
        if self.distance == math.inf:
            return f"{self.tensor}, by infinite or undefined numbers"
        return f"{self.tensor}, by {self.distance:.1e} of its norm"


@dataclass(frozen=True, slots=True)
class SegmentVerdict:
    """What became of one recorded call.

    Attributes:
        step: The number of the step in the directory.
        session: The id of the session that recorded it.
        call: The number of the call in its step and session.
        segment: The name of the function or module; empty if its file can't be read.
        outcome: "equal" if all that was recorded has equal bits again, "differs" if something has not, and "unknown" if
            not all of it can be judged and nothing differs.
        why: Why it can't be judged; empty if it can.
        tensors: The number of tensors of forward that were compared.
        gradients: The number of gradients that were compared.
        workers: The addresses of the workers that had computed the gradients; an empty one stands for the trainer.
        has_other_bits: Whether one of these workers computes other bits than the trainer.
        differences: The tensors that differ.
        fingerprint: What differs between the trainer's fingerprint then and that of the recomputation, by key.
    """

    step: int
    session: str
    call: int
    segment: str
    outcome: Outcome
    why: str = ""
    tensors: int = 0
    gradients: int = 0
    workers: Sequence[str] = ()
    has_other_bits: bool = False
    differences: Sequence[Difference] = ()
    fingerprint: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def __str__(self) -> str:
        begin = f"{_MARKS[self.outcome]}  step {self.step}, call {self.call} of session {self.session}"
        parts = [f"{begin}, {self.segment}:" if self.segment else f"{begin}:"]
        if self.outcome == "equal":
            parts.append(f"{self.tensors} tensors of forward and {self.gradients} gradients.")
        if self.differences:
            parts += self._on_differences()
        if self.why:
            parts.append(f"Not judged: {self.why}.")
        return " ".join(parts)

    def _on_differences(self) -> Iterator[str]:
        known = [one for one in self.differences if one.distance is not None]
        known.sort(key=lambda one: one.distance or 0.0, reverse=True)
        ordered = [*known, *(one for one in self.differences if one.distance is None)]
        more = f"; and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
        yield "; ".join(map(str, ordered[:_SHOWN])) + f"{more}."
        if names := sorted({*self.workers} - {""}):
            yield f"The gradients came from {', '.join(names)}."
        if self.has_other_bits:
            yield "That worker had other hardware than the trainer."
        if self.fingerprint:
            facts = [f"{key} was {then} and is {now}" for key, (then, now) in self.fingerprint.items()]
            yield f"The fingerprints differ: {', '.join(facts)}."
        if known and all(one.is_rounding for one in known) and (self.fingerprint or self.has_other_bits):
            yield "Other hardware rounds the gradients by as much."


def counted(verdicts: Sequence[SegmentVerdict]) -> dict[Outcome, int]:
    """Returns the number of verdicts of each outcome."""
    counts = Counter(verdict.outcome for verdict in verdicts)
    return {outcome: counts[outcome] for outcome in _MARKS}


def exit_code(verdicts: Sequence[SegmentVerdict], problems: Sequence[str]) -> int:
    """Returns 1 if something differs, 2 if not everything can be judged or something is damaged, and otherwise 0."""
    counts = counted(verdicts)
    if counts["differs"]:
        return 1
    return 2 if counts["unknown"] or problems or not verdicts else 0


def as_json(verdicts: Sequence[SegmentVerdict], problems: Sequence[str], notes: Sequence[str]) -> dict[str, Any]:
    """Returns all verdicts with their counts, what is wrong with the directory, and what else is known of it."""
    return {
        "counts": counted(verdicts),
        "problems": list(problems),
        "notes": list(notes),
        "segments": [_finite(asdict(verdict)) for verdict in verdicts],
    }


def _finite(verdict: dict[str, Any]) -> dict[str, Any]:
    """Replaces infinite distances, for which JSON has no number, by texts."""
    for difference in verdict["differences"]:
        if difference["distance"] == math.inf:
            difference["distance"] = "infinite"
    return verdict

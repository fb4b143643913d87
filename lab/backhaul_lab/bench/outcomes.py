"""The outcomes of figures, as a table and as JSON. Imports no torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from backhaul_lab.bench.figures import FIGURES, Figure, Verdict
from backhaul_lab.harness.rounds import Round, Rounds, Spread

FORMAT = 1
"""Version of the JSON. It increases when a reader of old results would misread new ones."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one figure.

    Attributes:
        name: Name of the figure.
        verdict: Value of a `Verdict`.
        value: Median over the undisturbed rounds; over all rounds if inconclusive. None: nothing was measured.
        low: Lower quartile over the same rounds.
        high: Upper quartile over the same rounds.
        undisturbed: Number of undisturbed rounds.
        dropped: Number of disturbed rounds.
        note: Remark for people, may be empty.
        details: Medians that the value was computed from, by name.
    """

    name: str
    verdict: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    undisturbed: int = 0
    dropped: int = 0
    note: str = ""
    details: Mapping[str, float | str] | None = None


def by_name(name: str) -> Figure:
    """Returns the figure with this name."""
    return next(figure for figure in FIGURES if figure.name == name)


def of_rounds(name: str, rounds: Rounds, figure: Callable[[Round], float], note: str = "") -> Outcome:
    """Returns the outcome of a timed figure, with the median of each variant as details."""
    spread = rounds.spread(figure)
    verdict = by_name(name).judge(spread.value) if rounds.is_conclusive else Verdict.INCONCLUSIVE
    details = {variant: rounds.spread(lambda taken, v=variant: taken[v]).value for variant in rounds.measured[0][0]}  # type: ignore[misc]
    return Outcome(
        name, verdict.value, spread.value, spread.low, spread.high, rounds.undisturbed, rounds.dropped, note, details
    )


def of_counts(
    name: str, values: Sequence[float], note: str = "", details: Mapping[str, float] | None = None
) -> Outcome:
    """Returns the outcome of a figure that counts bytes, which other processes cannot disturb."""
    spread = Spread.of(values)
    verdict = by_name(name).judge(spread.value)
    return Outcome(name, verdict.value, spread.value, spread.low, spread.high, len(values), 0, note, details)


def without_value(name: str, verdict: Verdict, note: str) -> Outcome:
    """Returns the outcome of a figure that has no value. The note says why."""
    return Outcome(name, verdict.value, note=note)


def as_json(outcomes: Sequence[Outcome], machine: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all outcomes as JSON, each under its name and with its limit."""
    figures = {}
    for outcome in outcomes:
        figure = by_name(outcome.name)
        fields = {key: value for key, value in asdict(outcome).items() if key != "name"}
        figures[figure.name] = {"what": figure.what, "kind": figure.kind.name.lower(), "limit": figure.limit, **fields}
    return {"format": FORMAT, **machine, "figures": figures}


def as_table(outcomes: Sequence[Outcome]) -> str:
    """Formats the outcomes as a text table. Values of inconclusive figures are in brackets."""
    head = f"{'figure':<27}{'value':>10}  {'limit':<9}{'verdict':<14}{'middle half':<19}{'quiet':>5}{'dropped':>9}"
    lines = [head, "-" * len(head)]
    for outcome in outcomes:
        lines.append(as_line(outcome))
        if outcome.note:
            lines.append(f"    {outcome.note}")
    return "\n".join(lines)


def as_line(outcome: Outcome) -> str:
    """Formats an outcome as a row of the table."""
    value = "-" if outcome.value is None else f"{outcome.value:.3f}"
    if outcome.verdict == Verdict.INCONCLUSIVE.value:
        value = f"({value})"
    spread = "" if outcome.low is None else f"{outcome.low:.3f} to {outcome.high:.3f}"
    rounds = f"{outcome.undisturbed:>5}{outcome.dropped:>9}" if outcome.value is not None else ""
    limit = by_name(outcome.name).limit_text
    return f"{outcome.name:<27}{value:>10}  {limit:<9}{outcome.verdict:<14}{spread:<19}{rounds}".rstrip()


def is_failed(outcomes: Sequence[Outcome]) -> bool:
    """Returns whether any figure failed. A missed limit is no failure."""
    return any(outcome.verdict == Verdict.FAILED.value for outcome in outcomes)

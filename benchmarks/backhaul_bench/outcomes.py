"""What was found of each figure, as a table and as JSON. Free of torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from backhaul_bench.figures import FIGURES, Figure, Verdict
from backhaul_bench.rounds import Round, Rounds, Spread

FORMAT = 1
"""Of the JSON: counts up when a reader of old results would misread new ones."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one figure.

    Attributes:
        name: Of the figure.
        verdict: Read the value only under one that has any.
        value: The median; of an inconclusive figure it is of disturbed rounds too.
        low: The middle half of the rounds begins here,
        high: and ends here.
        kept: Rounds that count.
        dropped: Rounds that don't.
        note: For people.
        details: What the value was made of, by name.
    """

    name: str
    verdict: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    kept: int = 0
    dropped: int = 0
    note: str = ""
    details: Mapping[str, float | str] | None = None


def by_name(name: str) -> Figure:
    """A figure of the registry."""
    return next(figure for figure in FIGURES if figure.name == name)


def of_rounds(name: str, rounds: Rounds, figure: Callable[[Round], float], note: str = "") -> Outcome:
    """A timed figure: the median of its kept rounds, and what each variant took."""
    spread = rounds.spread(figure)
    verdict = by_name(name).judge(spread.value) if rounds.is_conclusive else Verdict.INCONCLUSIVE
    details = {variant: rounds.spread(lambda taken, v=variant: taken[v]).value for variant in rounds.found[0][0]}  # type: ignore[misc]
    return Outcome(
        name, verdict.value, spread.value, spread.low, spread.high, rounds.kept, rounds.dropped, note, details
    )


def of_counts(
    name: str, values: Sequence[float], note: str = "", details: Mapping[str, float] | None = None
) -> Outcome:
    """A figure that neighbours can't disturb: bytes."""
    spread = Spread.of(values)
    verdict = by_name(name).judge(spread.value)
    return Outcome(name, verdict.value, spread.value, spread.low, spread.high, len(values), 0, note, details)


def without_value(name: str, verdict: Verdict, note: str) -> Outcome:
    """A figure that there is none of, and why."""
    return Outcome(name, verdict.value, note=note)


def as_json(outcomes: Sequence[Outcome], machine: Mapping[str, Any]) -> dict[str, Any]:
    """Everything found, each figure under its name with its limit beside it."""
    figures = {}
    for outcome in outcomes:
        figure = by_name(outcome.name)
        found = {key: value for key, value in asdict(outcome).items() if key != "name"}
        figures[figure.name] = {"what": figure.what, "kind": figure.kind.name.lower(), "limit": figure.limit, **found}
    return {"format": FORMAT, **machine, "figures": figures}


def as_table(outcomes: Sequence[Outcome]) -> str:
    """As people read it; the value of an inconclusive figure in brackets."""
    head = f"{'figure':<27}{'value':>10}  {'limit':<9}{'verdict':<14}{'middle half':<19}{'kept':>5}{'dropped':>9}"
    lines = [head, "-" * len(head)]
    for outcome in outcomes:
        lines.append(as_line(outcome))
        if outcome.note:
            lines.append(f"    {outcome.note}")
    return "\n".join(lines)


def as_line(outcome: Outcome) -> str:
    """Its row of the table."""
    value = "-" if outcome.value is None else f"{outcome.value:.3f}"
    if outcome.verdict == Verdict.INCONCLUSIVE.value:
        value = f"({value})"
    spread = "" if outcome.low is None else f"{outcome.low:.3f} to {outcome.high:.3f}"
    rounds = f"{outcome.kept:>5}{outcome.dropped:>9}" if outcome.value is not None else ""
    limit = by_name(outcome.name).limit_text
    return f"{outcome.name:<27}{value:>10}  {limit:<9}{outcome.verdict:<14}{spread:<19}{rounds}".rstrip()


def is_failed(outcomes: Sequence[Outcome]) -> bool:
    """Whether a figure failed. A limit that is missed is a result, and no failure."""
    return any(outcome.verdict == Verdict.FAILED.value for outcome in outcomes)

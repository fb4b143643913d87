"""What a check found, as text and as JSON. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

State = Literal["ok", "note", "failed"]
_MARKS: Mapping[State, str] = {"ok": "ok    ", "note": "note  ", "failed": "FAILED"}


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        name: What was checked, in one or two words.
        state: "ok"; "note" for what costs time or memory, but works; or "failed".
        text: What was found, in a sentence with the values.
        todo: What to do about it; empty if there is nothing to do.
        values: The numbers in the text, in seconds, bytes and ratios.
    """

    name: str
    state: State
    text: str
    todo: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        todo = f" {self.todo}" if self.todo else ""
        return f"{_MARKS[self.state]}  {self.name}: {self.text}{todo}"


def failed(checks: Sequence[Check]) -> list[str]:
    """Returns the names of the checks that failed."""
    return [check.name for check in checks if check.state == "failed"]


def as_json(checks: Sequence[Check]) -> dict[str, Any]:
    """Returns all checks, and which of them failed."""
    return {"checks": [asdict(check) for check in checks], "failed": failed(checks)}

"""What the sessions of one credential hold together, and may hold. Event loop only."""

from dataclasses import dataclass, field
from typing import Protocol

from backhaul_runtime.errors import BudgetError, LimitError

RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Quotas:
    """Upper bounds for one credential, None where only the worker's own limits count.

    Attributes:
        memory_bytes: Bytes of the tensors, programs, segments, gradient sums and sessions that the worker keeps. Memory
            that the worker can take back, and that of an execution, does not count.
        inflight_bytes: Bytes of the tensors that are arriving and of the answers that are being sent.
        requests: Number of requests that wait or run.
        sessions: Number of open sessions.
    """

    memory_bytes: int | None = None
    inflight_bytes: int | None = None
    requests: int | None = None
    sessions: int | None = None


@dataclass(eq=False, slots=True)
class Account:
    """What the sessions of a credential hold now.

    Attributes:
        name: The name of the credential, empty if the worker requires none.
        quotas: The present upper bounds.
        sees_all: Whether the credential may see what belongs to the sessions of others, as a dashboard does.
        held_bytes: Bytes that count against the quota of memory.
        inflight_bytes: Bytes that count against the quota of bytes in flight.
        requests: Number of requests without an answer.
        sessions: Number of open sessions.
    """

    name: str = ""
    quotas: Quotas = field(default_factory=Quotas)
    sees_all: bool = True
    held_bytes: int = 0
    inflight_bytes: int = 0
    requests: int = 0
    sessions: int = 0

    def may_keep(self, added_bytes: int) -> bool:
        """Whether the worker may keep so many bytes more."""
        return self.quotas.memory_bytes is None or self.held_bytes + added_bytes <= self.quotas.memory_bytes

    def check_memory(self, added_bytes: int) -> None:
        """Raises BudgetError if the worker may not keep so many bytes more."""
        self._check_bytes("keep", self.held_bytes, added_bytes, self.quotas.memory_bytes)

    def check_inflight(self, added_bytes: int) -> None:
        """Raises BudgetError if so many bytes more may not be on the way."""
        self._check_bytes("have in flight", self.inflight_bytes, added_bytes, self.quotas.inflight_bytes)

    def check_requests(self) -> None:
        """Raises LimitError if no further request may be made."""
        self._check_count("requests", self.requests + 1, self.quotas.requests)

    def check_sessions(self) -> None:
        """Raises LimitError if no further session may be opened."""
        self._check_count("sessions", self.sessions + 1, self.quotas.sessions)

    def _check_bytes(self, what: str, present: int, added: int, most: int | None) -> None:
        if most is not None and present + added > most:
            raise BudgetError(
                f'the credential "{self.name}" may {what} {most} bytes on this worker: {added} do not fit beside '
                f"{present}",
                needed_bytes=added,
                budget_bytes=most,
                retry_after_s=RETRY_AFTER_S if added <= most else 0.0,
            )

    def _check_count(self, what: str, count: int, most: int | None) -> None:
        if most is not None and count > most:
            raise LimitError(
                f'the credential "{self.name}" may have {most} {what} on this worker at once',
                limit=f"{what} of the credential {self.name}",
                most=most,
                found=count,
            )


class Owner(Protocol):
    """Who possesses tensors in the store: a session."""

    @property
    def id(self) -> str:
        """The id of the session."""
        ...

    @property
    def account(self) -> Account:
        """The account of the session's credential."""
        ...

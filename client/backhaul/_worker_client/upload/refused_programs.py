"""Programs that a worker has refused, and when it is asked again."""

from collections import OrderedDict
from copy import copy
from time import monotonic
from typing import NamedTuple

from backhaul._worker_client.connection.worker_session import WorkerSession
from backhaul_runtime.errors import CompilingError, ProgramError

LEAST_S, PART = 0.25, 4
"""A worker is asked again after this many seconds, or a part of the time since it first refused, if that is longer."""

_MOST = 1024
"""The number of programs that are remembered; the longest ago are forgotten first."""


class _Refused(NamedTuple):
    """A refusal.

    Attributes:
        since_s: When the worker first refused, by the monotonic clock.
        until_s: When it is asked again.
        error: Why it has refused.
    """

    since_s: float
    until_s: float
    error: CompilingError | ProgramError


class RefusedPrograms:
    """What a worker session does not take now, so that it need not be sent with each call. Uploader's thread only."""

    def __init__(self) -> None:
        self._refused: OrderedDict[bytes, _Refused] = OrderedDict()
        self._refused_by: WorkerSession | None = None

    def check(self, worker_session: WorkerSession, address: bytes) -> None:
        """Raises the last error for a program that a worker need not be asked about yet."""
        refused = self._refused.get(address) if self._refused_by is worker_session else None
        if refused is not None and monotonic() < refused.until_s:
            raise copy(refused.error)  # without a traceback, which would refer to the variables of an upload

    def note(self, worker_session: WorkerSession, address: bytes, error: CompilingError | ProgramError) -> None:
        """Notes that a worker has refused a program."""
        if self._refused_by is not worker_session:
            self._refused.clear()
            self._refused_by = worker_session
        now_s = monotonic()
        before = self._refused.pop(address, None)
        since_s = now_s if before is None else before.since_s
        self._refused[address] = _Refused(since_s, now_s + max(LEAST_S, (now_s - since_s) / PART), copy(error))
        if len(self._refused) > _MOST:
            self._refused.popitem(last=False)

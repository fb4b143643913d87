"""The session that an integration uses: a new one, or one that the caller has."""

from typing import Any

from backhaul._api import connect
from backhaul._session import Session
from backhaul_runtime.errors import SettingError


def session_of(session: Session | None, worker: str | None, settings: dict[str, Any]) -> Session:
    """Returns the caller's session, or connects a new one.

    Args:
        session: The session that the caller has; None for a new one.
        worker: The address of a worker for a new session; None starts one on this machine.
        settings: Further settings of a new session.

    Raises:
        ConnectError: No worker answers at one of the addresses.
        SettingError: There are settings for a new session besides a session.
    """
    check_choice(session, worker, settings)
    return connect(worker, **settings) if session is None else session


def check_choice(session: Session | None, worker: str | None, settings: dict[str, Any]) -> None:
    """Raises SettingError if there are settings for a new session besides a session."""
    if session is not None and (worker is not None or settings):
        raise SettingError("pass either a session or the worker and settings of a new one, not both")

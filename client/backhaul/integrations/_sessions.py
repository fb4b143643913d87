"""The session that an integration uses: a new one, or one that the caller has."""

from typing import Any

from backhaul._api import connect
from backhaul._config import refuse_unknown
from backhaul._session import Session
from backhaul_runtime.errors import SettingError


def session_of(session: Session | None, worker: str | None, arguments: dict[str, Any]) -> Session:
    """Returns the caller's session, or connects a new one.

    Args:
        session: The session that the caller has; None for a new one.
        worker: The address of a worker for a new session; None starts one on this machine.
        arguments: Further arguments of `backhaul.connect` for a new session.

    Raises:
        ConnectError: No worker answers at one of the addresses.
        SettingError: There are arguments for a new session besides a session.
        TypeError: An argument is unknown.
    """
    check_choice(session, worker, arguments)
    return connect(worker, **arguments) if session is None else session


def check_choice(session: Session | None, worker: str | None, arguments: dict[str, Any]) -> None:
    """Raises SettingError if there are arguments for a new session besides a session, TypeError for an unknown one."""
    refuse_unknown(arguments)
    if session is not None and (worker is not None or arguments):
        raise SettingError("pass either a session or the worker and settings of a new one, not both")

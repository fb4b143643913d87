"""The audit log of a worker: who opened sessions from where, and what was denied. Does not import torch.

Each line is one JSON object with "time" (RFC 3339, UTC) and "event", and the fields of the event. Tokens never occur.
The file may be moved away at any time, as logrotate does: the next line creates it again.
"""

import json
import logging
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any, Protocol

from backhaul_runtime.errors import SettingError
from backhaul_runtime.process.logs import Seldom


class CallContext(Protocol):
    """The part of gRPC's context of a call that the log needs."""

    def peer(self) -> str:
        """Returns the address of the client."""
        ...

    def auth_context(self) -> Any:
        """Returns what TLS has verified about the client."""
        ...


class AuditLog:
    """Appends to a file. Without a path it does nothing.

    Denials can be caused by anyone who reaches the worker, so at most 10 in 10 seconds are written; the next line says
    how many were left out.

    Args:
        path: The file; it is created with access for its owner only.

    Raises:
        SettingError: The file cannot be written.
    """

    def __init__(self, path: str | None = None) -> None:
        self._logger = logging.Logger("backhaul.audit")
        self._denials = logging.Logger("backhaul.audit.denials")
        if path is None:
            self._denials.addHandler(logging.NullHandler())  # otherwise logging would write the event to stderr
            return
        try:
            os.close(os.open(Path(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
            handler = WatchedFileHandler(path, encoding="utf-8")
        except OSError as error:
            raise SettingError(f'the audit log "{path}" can\'t be written: {error.strerror}') from None
        handler.setFormatter(_JsonLine())
        self._logger.addHandler(handler)
        self._denials.addHandler(handler)
        self._denials.addFilter(Seldom())

    def opened(self, call: CallContext, credential: str, trainer: str, run: str, session: str) -> None:
        """Notes that a session was opened.

        Args:
            call: The context of the request.
            credential: The name of the credential, empty if it has none.
            trainer: The trainer's host and process.
            run: The id of the trainer's run.
            session: The id of the session, of which only the beginning is written because the whole gives access.
        """
        fields = {"trainer": trainer, "run": run, "session": session[:8]}
        self._logger.info(
            "", extra={"event": "session opened", "fields": {"credential": credential} | _origin(call) | fields}
        )

    def denied(self, call: CallContext, method: str, why: str, credential: str = "") -> None:
        """Notes that a request was denied.

        Args:
            call: The context of the request.
            method: The method that was called.
            why: What is wrong, in words.
            credential: The name of the credential, empty if the request shows none.
        """
        fields = {"method": method, "why": why}
        self._denials.warning(
            "", extra={"event": "request denied", "fields": {"credential": credential} | _origin(call) | fields}
        )

    def changed(self, credentials: Sequence[str], closed: int) -> None:
        """Notes that other tokens are valid now.

        Args:
            credentials: The names of all credentials.
            closed: The number of sessions that were closed because their token was revoked.
        """
        fields = {"credentials": list(credentials), "closed_sessions": closed}
        self._logger.info("", extra={"event": "credentials changed", "fields": fields})


class _JsonLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Formats an event as one line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"
        left_out = {"left_out": count} if (count := getattr(record, "left_out", 0)) else {}
        return json.dumps({"time": time, "event": record.event} | record.fields | left_out)  # type: ignore[attr-defined]


def _origin(call: CallContext) -> dict[str, str]:
    """Returns the address of a client, and the name in its certificate if it has shown one."""
    names = (call.auth_context() or {}).get("x509_common_name") or [b""]
    return {"peer": call.peer(), "certificate": names[0].decode(errors="replace")}

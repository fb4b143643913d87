"""The logs of commands: text on a terminal, otherwise one JSON object per line. Does not import torch.

NOTE [Fields]
1. A line has the time (RFC 3339, UTC), level, command, logger and message, and the exception if there is one. It has
   session, segment and step where they are known: log calls pass them as `extra=about(...)`.
2. session is the random id of the trainer's session, which is the same on the trainer and all its workers. It gives no
   access: tokens, and a worker's own id of the session, are never logged.
3. The library logs to "backhaul" and configures nothing, because a process configures its own logging. If it has not,
   logging would write warnings as bare messages; here they get a prefix. The commands' configuration is here.
4. A log call in the code writes at most `MOST_LINES` lines in `INTERVAL_S`. Further lines are counted, and the next
   line of that call says how many were left out. Otherwise a client whose requests are refused could fill the disk.
"""

import json
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from time import monotonic
from typing import Any

from backhaul_runtime.errors import SettingError
from backhaul_runtime.process.settings import in_environment, variable_of

FORMAT_VARIABLE = variable_of("log", "format")
LEVEL_VARIABLE = variable_of("log", "level")
FORMATS = ("json", "text")
ABOUT = ("session", "segment", "step")
MOST_LINES, INTERVAL_S = 10, 10.0
_SHOWN_OF_MESSAGE = 200


def about(session: str = "", segment: str = "", step: int | None = None) -> dict[str, Any]:
    """Returns the `extra` of a log call: the session, segment and step that are known."""
    known = {"session": session or None, "segment": segment or None, "step": step}
    return {name: value for name, value in known.items() if value is not None}


@contextmanager
def set_up(command: str) -> Iterator[None]:
    """Configures logging for a command, including warnings and errors that end threads, and restores it on exit.

    The command's own logger, "backhaul." and its name, logs from INFO on, and all others from WARNING on.
    BACKHAUL_LOG_LEVEL overrides both.

    Raises:
        SettingError: A variable has an invalid value. Names the variable, the value and what is allowed.
    """
    level = _level()
    root, own = logging.getLogger(), logging.getLogger(f"backhaul.{command}")
    handler, seldom = _ToStderr(), Seldom()
    handler.addFilter(seldom)
    handler.setFormatter(_formatter(command))
    levels, hooks = (root.level, own.level), (threading.excepthook, sys.unraisablehook)
    root.addHandler(handler)
    root.setLevel(level or logging.WARNING)
    own.setLevel(level or logging.INFO)
    logging.captureWarnings(True)

    def thread_ended(ended: threading.ExceptHookArgs) -> None:
        if ended.exc_type is not SystemExit:
            name = ended.thread.name if ended.thread else "a thread"
            own.error("The thread %s ended with an error.", name, exc_info=ended.exc_value)

    def unraisable(raised: Any) -> None:
        own.error("%s %r", raised.err_msg or "Exception ignored in", raised.object, exc_info=raised.exc_value)

    threading.excepthook, sys.unraisablehook = thread_ended, unraisable
    try:
        yield
    finally:
        threading.excepthook, sys.unraisablehook = hooks
        logging.captureWarnings(False)
        handler.removeFilter(seldom)
        for record in seldom.last():
            handler.handle(record)
        root.removeHandler(handler)
        root.setLevel(levels[0])
        own.setLevel(levels[1])


@dataclass(frozen=True, slots=True)
class Line:
    """A logged line of a command, as its parent process reads it.

    Attributes:
        level: The level as a number of the module logging.
        message: The message, followed by the exception if there is one.
        about: The session, segment and step that are known.
    """

    level: int
    message: str
    about: dict[str, Any]


def parse(line: str) -> Line | None:
    """Parses a line of JSON. Returns None for any other line, because a process may also print other text."""
    try:
        fields = json.loads(line)
        level = logging.getLevelNamesMapping()[fields["level"]]
        message = "\n".join(str(fields[name]) for name in ("message", "exception") if name in fields)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return Line(level, message, {name: fields[name] for name in ABOUT if name in fields})


@dataclass(slots=True)
class _LogCall:
    began_at_s: float
    written: int = 0
    left_out: int = 0
    like: tuple[str, int, str] = ("", 0, "")


class Seldom(logging.Filter):
    """A filter that limits the lines of each log call (Rule 4). The number of log calls in the code bounds its size."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[tuple[str, int], _LogCall] = {}
        self._lock = threading.Lock()  # guards the counts per log call

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether to write a record, and notes in it how many were left out before it."""
        now = monotonic()
        with self._lock:
            origin = self._calls.setdefault((record.pathname, record.lineno), _LogCall(now))
            if now - origin.began_at_s >= INTERVAL_S:
                origin.began_at_s, origin.written = now, 0
            if origin.written >= MOST_LINES:
                origin.left_out += 1
                # The record itself is not kept, because its arguments and traceback lead to requests and tensors.
                origin.like = record.name, record.levelno, str(record.msg)[:_SHOWN_OF_MESSAGE]
                return False
            origin.written += 1
            record.left_out, origin.left_out = origin.left_out, 0
            return True

    def last(self) -> list[logging.LogRecord]:
        """Returns records that report the lines left out since the last written one."""
        return [
            logging.makeLogRecord(
                {
                    "name": name,
                    "levelno": level,
                    "levelname": logging.getLevelName(level),
                    "msg": "%d lines like this one were left out: %s",
                    "args": (origin.left_out, message),
                }
            )
            for origin in self._calls.values()
            if origin.left_out
            for name, level, message in [origin.like]
        ]


class _ToStderr(logging.Handler):
    """Writes to the current sys.stderr, which may be replaced at any time."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line."""
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:  # as in all handlers of logging: a log call must not fail because of its handler
            self.handleError(record)


class _Unconfigured(_ToStderr):
    """Writes warnings with a prefix in a process that has not configured logging (Rule 3)."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("backhaul: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line, unless another handler does."""
        if logging.getLogger("backhaul").handlers == [self] and not logging.getLogger().handlers:
            super().emit(record)


class _Json(logging.Formatter):
    def __init__(self, command: str) -> None:
        super().__init__()
        self._command = command

    def format(self, record: logging.LogRecord) -> str:
        """Formats a record as JSON (Rule 1)."""
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")[:-6] + "Z",
            "level": record.levelname,
            "command": self._command,
            "logger": record.name,
            "message": _message(record),
        }
        fields |= _about(record)
        if record.exc_info and record.exc_info[1] is not None:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's name
        """Formats a record as text, followed by its session, segment and step."""
        record.message = _message(record)
        context = ", ".join(f"{name} {value}" for name, value in _about(record).items())
        return super().formatMessage(record) + (f" ({context})" if context else "")


def _message(record: logging.LogRecord) -> str:
    try:
        message = record.getMessage()
    except (TypeError, ValueError):  # the arguments do not fit the message: logging would print a traceback
        message = f"{record.msg} {record.args}"
    left_out = getattr(record, "left_out", 0)
    return f"{message} ({left_out} like it were left out)" if left_out else message


def _about(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name in ABOUT if (value := getattr(record, name, None)) is not None}


def _formatter(command: str) -> logging.Formatter:
    text = (in_environment(FORMAT_VARIABLE) or ("text" if sys.stderr.isatty() else "json")).lower()
    if text not in FORMATS:
        raise SettingError(f"{FORMAT_VARIABLE}={text!r} is not one of {', '.join(FORMATS)}")
    return _Json(command) if text == "json" else _Text()


def _level() -> int:
    """Returns the level in the environment, 0 if it is not set."""
    text = in_environment(LEVEL_VARIABLE)
    levels = logging.getLevelNamesMapping()
    if text is not None and text.upper() not in levels:
        names = ", ".join(name.lower() for name, level in levels.items() if level and name not in {"WARN", "FATAL"})
        raise SettingError(f"{LEVEL_VARIABLE}={text!r} is not one of {names}")
    return levels[text.upper()] if text else 0


logging.getLogger("backhaul").addHandler(_Unconfigured())

"""What commands log: text on a terminal, elsewhere one JSON object per line. Free of torch.

NOTE [Fields]
1. A line has time (RFC 3339, UTC), level, command, logger and message; exception, where there is one; and session,
   segment and step where they are known: log calls pass them as `extra=about(...)`.
2. session is the random name of the trainer's session, the same on the trainer and all its workers. It opens nothing:
   what a trainer proves itself with, and a worker's own name for the session, are never logged.
3. The library logs to "backhaul" and configures nothing. What a process shows is its own business; a command's is here.
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
    """What a log call is about, as its `extra`. What isn't known is left out."""
    known = {"session": session or None, "segment": segment or None, "step": step}
    return {name: value for name, value in known.items() if value is not None}


@contextmanager
def set_up(command: str) -> Iterator[None]:
    """Within it the process logs as a command does, with warnings and what ends threads; after it as before.

    The command's own logger, "backhaul." and its name, tells from INFO on and all others from WARNING on, unless
    BACKHAUL_LOG_LEVEL says otherwise for all.

    Raises:
        SettingError: Naming the variable, its value, and what it takes.
    """
    level = _level()
    root, own = logging.getLogger(), logging.getLogger(f"backhaul.{command}")
    handler, seldom = _ToStderr(), _Seldom()
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
            own.error("%s ended by an error", name, exc_info=ended.exc_value)

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
    """A line that a command logged, as somebody reads it who started the command.

    Attributes:
        level: The level as a number of the module logging.
        message: With the exception, if there is one.
        about: Session, segment and step, as far as they are known.
    """

    level: int
    message: str
    about: dict[str, Any]


def parse(line: str) -> Line | None:
    """Reads a line of JSON. None for any other: not all that a process prints is logged."""
    try:
        fields = json.loads(line)
        level = logging.getLevelNamesMapping()[fields["level"]]
        message = "\n".join(str(fields[name]) for name in ("message", "exception") if name in fields)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return Line(level, message, {name: fields[name] for name in ABOUT if name in fields})


@dataclass(slots=True)
class _Place:
    began_at_s: float
    written: int = 0
    left_out: int = 0
    like: tuple[str, int, str] = ("", 0, "")


class _Seldom(logging.Filter):
    """Rule 4. Places are as many as the code has, so nothing that is said makes this grow."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[tuple[str, int], _Place] = {}
        self._lock = threading.Lock()  # guards the counts per log call

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is written. One that is says how many were left out before it."""
        now = monotonic()
        with self._lock:
            origin = self._places.setdefault((record.pathname, record.lineno), _Place(now))
            if now - origin.began_at_s >= INTERVAL_S:
                origin.began_at_s, origin.written = now, 0
            if origin.written >= MOST_LINES:
                origin.left_out += 1
                # Not the record: its arguments and traceback lead to requests and tensors.
                origin.like = record.name, record.levelno, str(record.msg)[:_SHOWN_OF_MESSAGE]
                return False
            origin.written += 1
            record.left_out, origin.left_out = origin.left_out, 0
            return True

    def last(self) -> list[logging.LogRecord]:
        """What is still to be said of lines that were left out."""
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
            for origin in self._places.values()
            if origin.left_out
            for name, level, message in [origin.like]
        ]


class _ToStderr(logging.Handler):
    """Writes to what is sys.stderr at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line."""
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:  # as all of logging's handlers: who logs must not fail for it
            self.handleError(record)


class _Json(logging.Formatter):
    def __init__(self, command: str) -> None:
        super().__init__()
        self._command = command

    def format(self, record: logging.LogRecord) -> str:
        """See Rule 1."""
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
        """The line, with what it is about behind it."""
        record.message = _message(record)
        context = ", ".join(f"{name} {value}" for name, value in _about(record).items())
        return super().formatMessage(record) + (f" ({context})" if context else "")


def _message(record: logging.LogRecord) -> str:
    try:
        message = record.getMessage()
    except (TypeError, ValueError):  # somebody's arguments don't fit their message: logging would print a traceback
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
    """What the environment says, 0 if it says nothing."""
    text = in_environment(LEVEL_VARIABLE)
    levels = logging.getLevelNamesMapping()
    if text is not None and text.upper() not in levels:
        names = ", ".join(name.lower() for name, level in levels.items() if level and name not in {"WARN", "FATAL"})
        raise SettingError(f"{LEVEL_VARIABLE}={text!r} is not one of {names}")
    return levels[text.upper()] if text else 0

"""What a line of log is."""

import json
import logging
import sys
import threading
import warnings
from datetime import UTC, datetime, timedelta

import pytest

from backhaul_runtime.errors import SettingError
from backhaul_runtime.process import logs

logger = logging.getLogger("backhaul.worker")


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_has_all_that_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    with logs.set_up("worker"):
        logger.info("recomputed %d", 3, extra=logs.about("a1b2", "Block", 7))
    (line,) = lines(capsys)
    at = datetime.fromisoformat(str(line.pop("time")))
    assert at.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - at) < timedelta(minutes=1)
    assert line == {
        "level": "INFO",
        "command": "worker",
        "logger": "backhaul.worker",
        "message": "recomputed 3",
        "session": "a1b2",
        "segment": "Block",
        "step": 7,
    }


def test_what_is_not_known_is_left_out_and_step_0_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    with logs.set_up("worker"):
        logger.info("one", extra=logs.about(session="a1b2", step=0))
        logger.info("two")
    first, second = lines(capsys)
    assert (first["step"], "segment" in first) == (0, False)
    assert not {"session", "segment", "step", "exception"} & set(second)


@pytest.mark.parametrize("message", ["two\nlines", "\x1b[31m", '"quoted" \\', "100 %"])
def test_any_message_is_one_line(message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with logs.set_up("worker"):
        logger.warning(message)
    assert [line["message"] for line in lines(capsys)] == [message]


def test_what_utf8_can_not_write_is_escaped() -> None:
    record = logging.makeLogRecord({"msg": "ü\udcff"})  # not logged: pytest's own processes could not tell of it
    line = logs._Json("worker").format(record)
    assert json.loads(line.encode())["message"] == "ü\udcff"


def test_an_exception_is_one_field(capsys: pytest.CaptureFixture[str]) -> None:
    with logs.set_up("worker"):
        try:
            1 / 0  # noqa: B018
        except ZeroDivisionError:
            logger.exception("failed")
    (line,) = lines(capsys)
    assert (line["level"], line["message"]) == ("ERROR", "failed")
    assert str(line["exception"]).startswith("Traceback")
    assert str(line["exception"]).endswith("ZeroDivisionError: division by zero")


class Unpleasant:
    def __del__(self) -> None:
        raise ValueError("in a destructor")


def test_warnings_ended_threads_and_destructors_go_the_same_way(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with logs.set_up("worker"):
            warnings.warn("old", DeprecationWarning, stacklevel=1)
            thread = threading.Thread(target=lambda: 1 / 0, name="helper")
            thread.start()
            thread.join()
            Unpleasant()
            threading.Thread(target=sys.exit).start()  # says nothing
    warning, thread_line, destructor = lines(capsys)
    assert (warning["logger"], "DeprecationWarning: old" in str(warning["message"])) == ("py.warnings", True)
    assert thread_line["message"] == "The thread helper ended with an error."
    assert "ZeroDivisionError" in str(thread_line["exception"])
    assert "in a destructor" in str(destructor["exception"])


def test_arguments_that_do_not_fit_are_still_one_line() -> None:
    record = logging.LogRecord("backhaul", logging.INFO, __file__, 1, "%d tensors", ("many",), None)
    assert json.loads(logs._Json("worker").format(record))["message"] == "%d tensors ('many',)"


def test_commands_tell_more_of_themselves_than_libraries_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for level in ("", "debug", "ERROR"):
        monkeypatch.setenv("BACKHAUL_LOG_LEVEL", level)
        with logs.set_up("worker"):
            for name in ("backhaul.worker", "uvicorn.error"):
                for said in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
                    logging.getLogger(name).log(said, level)
    logged = [(line["message"], line["logger"], line["level"]) for line in lines(capsys)]
    four = ("DEBUG", "INFO", "WARNING", "ERROR")
    assert logged == [
        *[("", "backhaul.worker", level) for level in four[1:]],
        *[("", "uvicorn.error", level) for level in four[2:]],
        *[("debug", name, level) for name in ("backhaul.worker", "uvicorn.error") for level in four],
        *[("ERROR", name, "ERROR") for name in ("backhaul.worker", "uvicorn.error")],
    ]


def test_text_is_for_people(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKHAUL_LOG_FORMAT", "text")
    with logs.set_up("worker"):
        logger.warning("is back", extra=logs.about("a1b2", step=7))
    assert capsys.readouterr().err.endswith(" WARNING backhaul.worker: is back (session a1b2, step 7)\n")


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("BACKHAUL_LOG_FORMAT", "xml", "BACKHAUL_LOG_FORMAT='xml' is not one of json, text"),
        ("BACKHAUL_LOG_LEVEL", "loud", "BACKHAUL_LOG_LEVEL='loud' is not one of critical, error, warning, info, debug"),
    ],
)
def test_values_that_can_not_be(variable: str, text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(SettingError, match=message), logs.set_up("worker"):
        pass


def test_it_leaves_logging_as_it_was() -> None:
    def state() -> tuple[object, ...]:
        root = logging.getLogger()
        hooks = threading.excepthook, sys.unraisablehook, warnings.showwarning
        return root.level, logger.level, list(root.handlers), *hooks

    before = state()
    with pytest.raises(ZeroDivisionError), logs.set_up("worker"):
        raise ZeroDivisionError
    assert state() == before


def test_what_was_logged_can_be_read_again(capsys: pytest.CaptureFixture[str]) -> None:
    with logs.set_up("worker"):
        try:
            raise ValueError("odd")
        except ValueError:
            logger.exception("failed", extra=logs.about("a1b2", "Block"))
    record = logs.parse(capsys.readouterr().err)
    assert record is not None
    assert (record.level, record.about) == (logging.ERROR, {"session": "a1b2", "segment": "Block"})
    assert record.message.startswith("failed\nTraceback")


@pytest.mark.parametrize("line", ["", "Killed", "{}", "[1]", "3", '{"level": "LOUD", "message": ""}', '{"level": []}'])
def test_other_lines_are_no_log(line: str) -> None:
    assert logs.parse(line) is None


@pytest.mark.slow
def test_a_place_that_says_much_is_written_seldom(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(logs, "monotonic", lambda: now[0])

    def deny(times: int) -> None:
        for _ in range(times):
            logger.warning("denied")

    with logs.set_up("worker"):
        deny(13_000)
        logger.warning("from elsewhere")
        now[0] = logs.INTERVAL_S
        deny(logs.MOST_LINES + 5)
    messages = [str(line["message"]) for line in lines(capsys)]
    assert messages[: logs.MOST_LINES] == ["denied"] * logs.MOST_LINES
    elsewhere, first, *more, last = messages[logs.MOST_LINES :]
    assert (elsewhere, more) == ("from elsewhere", ["denied"] * (logs.MOST_LINES - 1))
    assert "denied" in first
    assert f"{13_000 - logs.MOST_LINES}" in first
    assert last == "5 lines like this one were left out: denied"

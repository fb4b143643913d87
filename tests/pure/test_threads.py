"""Functions that only one thread may call."""

import threading

import pytest

from backhaul_runtime.process.threads import only_in


@only_in("writer")
def write(lines: list[str], line: str) -> None:
    lines.append(line)


def test_a_function_of_a_thread_runs_in_it() -> None:
    lines: list[str] = []
    thread = threading.Thread(target=write, args=(lines, "a"), name="writer")
    thread.start()
    thread.join()
    assert lines == ["a"]


def test_a_function_of_a_thread_refuses_others() -> None:
    lines: list[str] = []
    with pytest.raises(AssertionError, match="write ran in the thread MainThread, but is only for writer"):
        write(lines, "a")
    assert lines == []

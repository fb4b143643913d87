"""A history that writes at once, and the file that it is in."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from backhaul_server.dashboard.history import writer
from support.processes import open_files


@pytest.fixture
def quick_history(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Writes at once rather than every second; nothing is left open."""
    monkeypatch.setattr(writer, "WRITE_S", 0.01)
    before = threading.active_count(), open_files()
    yield
    assert (threading.active_count(), open_files()) == before


@pytest.fixture
def path(tmp_path: Path) -> str:
    """The path of a history that does not exist yet."""
    return str(tmp_path / "state" / "history.sqlite3")

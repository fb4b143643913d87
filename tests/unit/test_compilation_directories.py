"""Files of compilations go with their worker, however it ends."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from backhaul_server.worker.engine.compilation_directories import CompilationDirectories

_MAKES_ONE = """
import sys, time
from backhaul_server.worker.engine.compilation_directories import CompilationDirectories
print(CompilationDirectories().of("name"), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary directories are."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_next_worker_removes_what_a_killed_one_has_left(temporary: Path) -> None:
    (temporary / "backhaul-compiled-file").touch()
    (temporary / "backhaul-compiled-link").symlink_to(temporary)
    mine = CompilationDirectories()
    with subprocess.Popen([sys.executable, "-c", _MAKES_ONE], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        (theirs / "file").touch()
        mine.of("name")
        assert theirs.exists()  # its worker lives
        other.kill()
    mine.close()

    one = Path(mine.of("one"))

    assert not theirs.parent.exists()
    assert one.exists()
    assert (temporary / "backhaul-compiled-file").exists()
    mine.close()
    assert not one.parent.exists()


def test_each_credential_has_a_directory_of_its_own() -> None:
    directories = CompilationDirectories()
    assert directories.of("one") == directories.of("one") != directories.of("other")
    directories.close()

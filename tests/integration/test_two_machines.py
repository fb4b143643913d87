"""docs/two-machines.md: each command is run, on two machines that are two folders here."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from conftest import wait_until
from integration.test_slurm import two_free_ports

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "two-machines.md").read_text()
SCP = """#!/bin/sh
# Copies from the folder that plays the other machine.
for argument; do
    case $argument in
        -r) ;;
        gpu-box:*) from=$HELPER/${argument#gpu-box:} ;;
        *) to=$argument ;;
    esac
done
cp -r "$from" "$to"
"""
PIP = """#!/bin/sh
# Installs the project without what it depends on, which is installed already.
[ "$1" = install ] && "$PYTHON" -m pip install --quiet --no-deps --no-build-isolation --no-index --target site "$2"
"""


def blocks(machine: str) -> list[tuple[str, str]]:
    """The language and the text of each block of code that the page gives a machine."""
    sections = re.split(r"^\*\*On ", PAGE, flags=re.MULTILINE)[1:]
    named = [section for section in sections if section.startswith((machine, "both"))]
    return [
        block for section in named for block in re.findall(r"^```(\w+)\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    ]


class Machine:
    """A folder, and the commands that the page runs there."""

    def __init__(self, folder: Path, programs: Path, port: int, dashboard: int) -> None:
        folder.mkdir()
        (folder / "backhaul").mkdir()
        for path in ROOT.iterdir():
            if not path.name.startswith("."):
                (folder / "backhaul" / path.name).symlink_to(path)
        self.folder, self._port, self._dashboard = folder, port, dashboard
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("BACKHAUL_")},
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HELPER": str(folder.parent / "gpu-box"),
            "PYTHON": sys.executable,
            "OMP_NUM_THREADS": "1",
        }

    def here(self, text: str) -> str:
        """The same commands with addresses of this machine."""
        text = text.replace("gpu-box:50051", f"localhost:{self._port}").replace(
            "--worker gpu-box", "--worker localhost"
        )
        text = text.replace("0.0.0.0:50051", f"127.0.0.1:{self._port}").replace("--memory 8GiB", "--memory 512MiB")
        return text.replace("backhaul dashboard", f"backhaul dashboard --listen 127.0.0.1:{self._dashboard}")

    def run(self, text: str) -> str:
        """Runs commands to their end. Returns what they printed."""
        done = subprocess.run(
            ["bash", "-euc", self.here(text)],
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    @contextmanager
    def running(self, text: str) -> Iterator[Path]:
        """Runs commands of which the last goes on. Yields the file with what they print."""
        log = self.folder / "log"
        with log.open("w") as opened:
            process = subprocess.Popen(
                ["bash", "-euc", self.here(text)],
                cwd=self.folder,
                env=self._environment,
                stdout=opened,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield log
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


@pytest.mark.distributed
def test_each_command_of_the_tutorial(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("scp", SCP), ("pip", PIP)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o700)
    port = two_free_ports()
    helper, trainer = (Machine(tmp_path / name, programs, port, port + 1) for name in ("gpu-box", "trainer"))

    (_, install), (_, make), (_, serve) = blocks("gpu-box")
    helper.run(install)
    assert (helper.folder / "site" / "backhaul").is_dir()
    helper.run(make)
    with helper.running(serve) as log:
        wait_until(lambda: "listening on" in log.read_text(), "the worker is ready")
        (_, _), (_, copy), (_, ask), (language, program), (_, run), (_, watch) = blocks("the trainer")
        trainer.run(copy)
        assert trainer.run(ask) == f"localhost:{port}: serving\n"
        assert language == "python"
        (trainer.folder / "train.py").write_text(program)
        printed = trainer.run(run)
        assert "step 4: loss" in printed
        assert re.search(r"TransformerEncoderLayer +40 +40 +0 +0 +0 ", printed)
        with trainer.running(watch) as log_of_dashboard:
            wait_until(lambda: "backhaul dashboard on" in log_of_dashboard.read_text(), "the dashboard serves")
            assert "1 of 1 workers serve" in log_of_dashboard.read_text()


def test_the_page_has_no_block_that_is_not_run() -> None:
    assert len(re.findall(r"^```\w", PAGE, re.MULTILINE)) == len(blocks("gpu-box")) + len(blocks("the trainer")) - 1

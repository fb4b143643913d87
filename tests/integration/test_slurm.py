"""deploy/slurm/backhaul-workers.sbatch, with two programs in the place of Slurm's."""

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import backhaul
from backhaul_runtime.process.credentials import make_token
from backhaul_server.commands import certificates
from conftest import QUIET, wait_until
from numerics.cases import blocks, stack
from support.bits import differing, plainly, train

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "backhaul-workers.sbatch"
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames $SLURM_JOB_NODELIST" ] && echo localhost
"""
SRUN = """#!/bin/bash
# Starts both tasks of the only node, and passes signals on, as Slurm does.
[ "$1" = --kill-on-bad-exit=0 ] || exit 9
shift
for id in 0 1; do SLURM_LOCALID=$id "$@" & pids+=" $!"; done
trap 'kill -TERM $pids' TERM
until wait $pids; do kill -0 $pids 2> /dev/null || break; done
"""


def two_free_ports() -> int:
    """The first of two ports in a row that are free, below those that the system gives to other programs meanwhile."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as first, socket.socket() as second, suppress(OSError):
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    programs, home = tmp_path / "bin", tmp_path / "home"
    programs.mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o700)
    (programs / "backhaul").symlink_to(Path(sys.executable).with_name("backhaul"))
    directory = home / "backhaul"
    directory.mkdir(parents=True)
    certificates.make(directory / "certificates", ["localhost"], 1)
    make_token(directory / "worker.token")
    return {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(home),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[1]",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_BACKHAUL_PORT": str(two_free_ports()),
        "SLURM_BACKHAUL_OPTIONS": "--memory 256MiB",
    }


@contextmanager
def submitted(environment: dict[str, str]) -> "Iterator[subprocess.Popen[bytes]]":
    job = subprocess.Popen(["bash", str(SCRIPT)], env=environment, start_new_session=True)
    try:
        yield job
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


@pytest.mark.distributed
def test_the_workers_of_a_job_are_in_the_file_while_it_runs(environment: dict[str, str]) -> None:
    directory = Path(environment["HOME"]) / "backhaul"
    file = directory / "workers"
    file.write_text("other:1 # job 77\n")
    with submitted(environment) as job:
        port = int(environment["SLURM_BACKHAUL_PORT"])
        ours = [f"localhost:{port} # job 7", f"localhost:{port + 1} # job 7"]
        wait_until(
            lambda: file.read_text().splitlines() == ["other:1 # job 77", *ours], "the addresses are in the file"
        )
        file.write_text("\n".join(ours))  # nobody answers at the other one
        with backhaul.connect(
            f"file:{file}",
            token_file=str(directory / "worker.token"),
            tls=str(directory / "certificates" / "trainer"),
            settings=QUIET,
        ) as session:
            wait_until(lambda: sum(handle.up is not None for handle in session._workers) == 2, "both are up")
            assert differing(train(session.checkpoint, blocks, stack), train(plainly, blocks, stack)) == []
            assert (session.report().remote > 0, session.report().fallbacks) == (True, 0)
            before = session.report()
            # Preemption: the workers finish, and their addresses go.
            job.send_signal(signal.SIGTERM)
            wait_until(lambda: file.read_text() == "", "the addresses are gone")
            assert job.wait(240) == 0
            wait_until(lambda: not session._workers, "the trainer has noticed")
            assert differing(train(session.checkpoint, blocks, stack), train(plainly, blocks, stack)) == []
            assert session.report().remote == before.remote

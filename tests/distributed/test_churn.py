"""Four ranks on three workers, of which one is killed, one is drained, and to which one is added."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from backhaul_runtime.process.credentials import make_token
from backhaul_server.commands import certificates
from conftest import wait_until
from integration.test_tls import options_of
from support.processes import WorkerProcess

RANK = Path(__file__).parents[1] / "support" / "rank.py"
RANKS, STEPS = 4, 20


@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_workers_come_and_go_under_four_ranks(tmp_path: Path) -> None:
    certificates.make(tmp_path / "tls", ["127.0.0.1"], 1)
    token, file = tmp_path / "token", tmp_path / "workers"
    make_token(token)
    options = ["--memory", "512MiB", "--token-file", str(token), *options_of(tmp_path / "tls" / "worker")]

    def write(workers: Sequence[WorkerProcess]) -> None:
        draft = file.with_suffix(".draft")
        draft.write_text("".join(f"{worker.address}\n" for worker in workers))
        draft.replace(file)

    def all_in(step: int) -> None:
        def is_there(rank: int) -> bool:
            path = tmp_path / f"{rank}.step"
            return path.exists() and int(path.read_text()) >= step

        wait_until(lambda: all(map(is_there, range(RANKS))), f"all ranks are in step {step}")

    with ExitStack() as opened:
        kept, killed, drained = (opened.enter_context(WorkerProcess(*options, supervised=True)) for _ in range(3))
        write([kept, killed, drained])
        environment = {
            **os.environ,
            "BACKHAUL_WORKER": f"file:{file}",
            "BACKHAUL_TOKEN_FILE": str(token),
            "BACKHAUL_TLS": str(tmp_path / "tls" / "trainer"),
            "BACKHAUL_SILENCE_S": "60",  # a process of this many that waits for a core is not silent
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        log = opened.enter_context((tmp_path / "log").open("w"))
        training = subprocess.Popen(
            [*command, str(RANK), str(tmp_path), str(STEPS)], env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        opened.callback(training.kill)
        all_in(4)
        killed.kill()
        all_in(8)
        write([kept, killed])
        assert "finishes requests in flight" in drained.end()
        all_in(12)
        added = opened.enter_context(WorkerProcess(*options, supervised=True))
        write([kept, added])

        def sees(rank: int) -> bool:
            path = tmp_path / f"{rank}.up"
            return path.exists() and sorted(path.read_text().split(",")) == sorted([kept.address, added.address])

        wait_until(lambda: all(map(sees, range(RANKS))), "all ranks see who has come and gone")
        (tmp_path / "done").touch()
        assert training.wait(200) == 0, (tmp_path / "log").read_text()[-4_000:]
    outcomes = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    assert [outcome["differing"] for outcome in outcomes] == [[]] * RANKS
    assert all(outcome["remote"] > outcome["fallbacks"] for outcome in outcomes)
    both = sorted([kept.address, added.address])
    assert [sorted(outcome["computed"]) for outcome in outcomes] == [both] * RANKS

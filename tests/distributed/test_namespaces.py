"""Two workers and two ranks on four hosts that a name server knows, of which one is cut off for a while."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from backhaul_runtime.process.credentials import make_token
from backhaul_server.commands import certificates
from conftest import wait_until
from integration.test_tls import options_of
from support.namespaces import Network, require_namespaces

RANK = Path(__file__).parents[1] / "support" / "rank.py"
NAME, PORT, STEPS = "workers.test", 50051, 20


@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_four_hosts_of_which_one_is_cut_off(tmp_path: Path) -> None:
    require_namespaces()
    certificates.make(tmp_path / "tls", [NAME], 1)
    token = tmp_path / "token"
    make_token(token)
    files = ["--token-file", str(token), *options_of(tmp_path / "tls" / "worker")]
    with ExitStack() as opened:
        network = opened.enter_context(Network(tmp_path))
        workers, ranks = [network.host() for _ in range(2)], [network.host() for _ in range(2)]
        network.resolve(NAME, workers)
        serve = (
            sys.executable,
            "-m",
            "backhaul",
            "worker",
            "--listen",
            f"0.0.0.0:{PORT}",
            "--memory",
            "512MiB",
            *files,
        )
        for host in workers:
            worker = host.start(*serve, stdout=subprocess.PIPE)
            assert worker.stdout is not None
            opened.callback(worker.stdout.close)
            opened.callback(worker.wait)
            opened.callback(worker.terminate)
            assert b"listening on" in worker.stdout.readline()
        environment = {
            **os.environ,
            "BACKHAUL_WORKER": f"dns:///{NAME}:{PORT}",
            "BACKHAUL_TOKEN_FILE": str(token),
            "BACKHAUL_TLS": str(tmp_path / "tls" / "trainer"),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "BACKHAUL_SILENCE_S": "2",  # by its silence the loss is noticed
        }
        log = opened.enter_context((tmp_path / "log").open("w"))
        trainings = []
        for number, host in enumerate(ranks):
            run = (sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1")
            where = (f"--node-rank={number}", f"--master-addr={ranks[0].address}", "--master-port=29500")
            trainings.append(
                host.start(*run, *where, str(RANK), str(tmp_path), str(STEPS), env=environment, stdout=log, stderr=log)
            )
            opened.callback(trainings[-1].kill)

        def all_in(step: int) -> bool:
            paths = [tmp_path / f"{rank}.step" for rank in range(2)]
            return all(path.exists() and int(path.read_text()) >= step for path in paths)

        def all_see(addresses: list[str]) -> bool:
            paths = [tmp_path / f"{rank}.up" for rank in range(2)]
            return all(path.exists() and sorted(path.read_text().split(",")) == sorted(addresses) for path in paths)

        first, second = (f"{host.address}:{PORT}" for host in workers)
        wait_until(lambda: all_in(4), "both ranks train")
        network.connect(workers[1], is_up=False)
        wait_until(lambda: all_in(STEPS - 1), "both ranks have gone on")
        wait_until(lambda: all_see([first]), "the loss is noticed")
        network.resolve(NAME, workers[:1])
        network.connect(workers[1], is_up=True)
        network.resolve(NAME, workers)
        wait_until(lambda: all_see([first, second]), "it is back")
        (tmp_path / "done").touch()
        assert [training.wait(200) for training in trainings] == [0, 0], (tmp_path / "log").read_text()[-4_000:]
    outcomes = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [outcome["differing"] for outcome in outcomes] == [[], []]
    assert [sorted(outcome["computed"]) for outcome in outcomes] == [sorted([first, second])] * 2

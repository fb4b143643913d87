"""`backhaul fleet` and `ray:NAME` in a Ray cluster of one node."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import backhaul
from backhaul_runtime.process.credentials import make_token
from backhaul_server.commands import certificates
from conftest import QUIET, wait_until
from integration.test_discovery import Training
from integration.test_tls import options_of
from support.bits import differing, plainly
from support.ray_cluster import RayCluster


def started(cluster: RayCluster, command: str, *arguments: str) -> "subprocess.Popen[str]":
    """Starts `backhaul fleet`."""
    return subprocess.Popen(
        [sys.executable, "-m", "backhaul", "fleet", command, *arguments],
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def fleet(cluster: RayCluster, command: str, *arguments: str) -> str:
    """Runs `backhaul fleet`, which must succeed. Returns what it prints."""
    with started(cluster, command, *arguments) as process:
        out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    return out


@pytest.mark.slow
@pytest.mark.distributed
def test_a_fleet_grows_and_shrinks_while_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates.make(tmp_path / "tls", ["small"], 1)
    token = tmp_path / "token"
    make_token(token)
    without = Training(plainly)
    expected = [without.steps(2) for _ in range(4)]
    with RayCluster(1) as cluster:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        options = ["--memory", "256MiB", "--device", "cpu", "--token-file", str(token)]
        up = fleet(
            cluster, "up", "--name", "small", "--workers", "1", "--", *options, *options_of(tmp_path / "tls" / "worker")
        )
        assert up.splitlines()[1].split()[:2] == ["small-0", cluster.nodes[0].address]
        with pytest.raises(
            backhaul.ConnectError, match=r'the Ray cluster has no fleet "large", only small. Start it with'
        ):
            backhaul.connect("ray:large")
        with backhaul.connect(
            "ray:small", token_file=str(token), tls=str(tmp_path / "tls" / "trainer"), settings=QUIET
        ) as session:

            def are_up(count: int) -> None:
                wait_until(lambda: [handle.up is not None for handle in session._workers] == [True] * count, f"{count}")

            ours = Training(session.checkpoint)
            assert differing(ours.steps(2), expected[0]) == []

            fleet(cluster, "scale", "--name", "small", "--workers", "2")
            are_up(2)
            assert differing(ours.steps(2), expected[1]) == []

            loss = ours.forward()
            with started(cluster, "drain", "--name", "small", "small-0", "--grace", "600") as draining:
                wait_until(lambda: any(handle.is_leaving for handle in session._workers), "the address is withdrawn")
                assert differing([*ours.step(loss), *ours.steps(1)], expected[2]) == []
                assert session.report().fallbacks == 0
                del loss
                are_up(1)

                # The shorter time to end ends the wait of the drain.
                down = fleet(cluster, "down", "--name", "small")
                assert sorted(down.splitlines()) == ["small-0 has ended", "small-1 has ended"]
                assert draining.communicate() == ("small-0 has ended\n", "")
            are_up(0)
            assert differing(ours.steps(2), expected[3]) == []
        assert fleet(cluster, "status") == "The Ray cluster has no fleet.\n"
        assert [line for line in cluster.nodes[0].processes().values() if "-m backhaul" in line] == []

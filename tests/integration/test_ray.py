"""`backhaul fleet` and `ray:NAME` in a Ray cluster of one node."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import backhaul
from backhaul_runtime.process.credentials import make_token
from backhaul_server.commands import certificates
from conftest import QUIET_S, wait_until
from integration.test_discovery import Training
from integration.test_tls import options_of
from support.bits import differing, plainly
from support.ray_cluster import RayCluster


def fleet(cluster: RayCluster, command: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs `backhaul fleet`."""
    return subprocess.run(
        [sys.executable, "-m", "backhaul", "fleet", command, *arguments],
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
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
        assert (up.returncode, up.stderr) == (0, "")
        assert up.stdout.splitlines()[1].split()[:2] == ["small-0", cluster.nodes[0].address]
        with pytest.raises(
            backhaul.ConnectError, match=r'the Ray cluster has no fleet "large", only small. Start it with'
        ):
            backhaul.connect("ray:large")
        with backhaul.connect(
            "ray:small", token_file=str(token), tls=str(tmp_path / "tls" / "trainer"), silence_s=QUIET_S
        ) as session:

            def are_up(count: int) -> None:
                wait_until(lambda: [handle.up is not None for handle in session._workers] == [True] * count, f"{count}")

            ours = Training(session.checkpoint)
            assert differing(ours.steps(2), expected[0]) == []

            scaled = fleet(cluster, "scale", "--name", "small", "--workers", "2")
            assert (scaled.returncode, scaled.stderr) == (0, "")
            are_up(2)
            assert differing(ours.steps(2), expected[1]) == []

            drained = fleet(cluster, "drain", "--name", "small", "small-0", "--grace", "2")
            assert (drained.returncode, drained.stdout) == (0, "small-0 has ended\n")
            are_up(1)
            assert differing(ours.steps(2), expected[2]) == []
            assert session.report().fallbacks == 0

            down = fleet(cluster, "down", "--name", "small")
            assert (down.returncode, down.stdout) == (0, "small-1 has ended\n")
            are_up(0)
            assert differing(ours.steps(2), expected[3]) == []
        assert fleet(cluster, "status").stdout == "The Ray cluster has no fleet.\n"
        assert [line for line in cluster.nodes[0].processes().values() if "backhaul" in line] == []

"""An experiment whose workers run on the hosts of a Ray cluster."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from integration.test_experiment import TINY
from support.ray_cluster import RayCluster


@pytest.mark.distributed
def test_workers_on_the_hosts_of_a_cluster(tmp_path: Path) -> None:
    with RayCluster(2) as cluster:
        nodes = f'[nodes]\nkind = "ray"\nray_address = "{cluster.address}"\n'
        (tmp_path / "tiny.toml").write_text(TINY + nodes + "[matrix]\nworkers = [1, 2]\n")
        done = subprocess.run(
            [sys.executable, "-m", "backhaul", "experiment", "run", str(tmp_path / "tiny.toml"), "--store", ":memory:"],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
        )
        assert done.returncode == 0, done.stderr
        alive = [line for node in cluster.nodes for line in node.processes().values() if " worker --listen " in line]
    records = [json.loads(path.read_text()) for path in (tmp_path / "backhaul/experiments/tiny").glob("cell-*.json")]
    assert [record["status"] for record in records] == ["ok", "ok"]
    assert all(record["carried"]["remote"] for record in records)
    assert alive == []

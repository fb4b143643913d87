"""`backhaul experiment`: a run of a few seconds, its records, and what happens when something is wrong."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from backhaul._cli.main import main
from backhaul_lab.experiment.conduct.records import Records
from backhaul_lab.experiment.nodes import cpu_shares, network
from backhaul_lab.experiment.plan.spec import read
from backhaul_lab.harness.machine import describe
from backhaul_lab.harness.processes import descendants
from conftest import wait_until
from support.namespaces import require_namespaces

pytestmark = pytest.mark.slow

TINY = """
description = "Two cells."
repeats = 1
warm_up = 1
rounds = 1
steps = 2

[model]
layers = 2
width = 32
context = 8
"""
MODEL = """
import itertools
import os

from backhaul_lab.experiment.training.models import WideModel

calls = itertools.count()


class Careless(WideModel):
    def begin(self, rows, seed):
        return super().begin(rows, next(calls))


class Diverging(WideModel):
    def loss(self, x, target):
        return x.square() * float("nan")


def make(layers, batch, seed, most):
    if batch > most:
        raise ValueError(f"{batch} rows are too many")
    print("a line that is no answer")
    os.write(1, b"a line of a library that is no answer\\n")
    return {1: Careless, 2: Diverging}.get(batch, WideModel)(layers, batch, seed, width=64)
"""


def experiment(
    folder: Path, *options: str, command: str = "run", **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Runs a command on the experiment of a folder."""
    own = [str(folder / "tiny.toml"), "--store", str(folder / "history.sqlite3")] if command == "run" else []
    return subprocess.run(
        [sys.executable, "-m", "backhaul", "experiment", command, "--results", str(folder / "results"), *own, *options],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )  # fmt: skip


def records(folder: Path) -> dict[str, dict[str, object]]:
    """The records of the visits by the names of their files."""
    return {path.name: json.loads(path.read_text()) for path in (folder / "results" / "tiny").glob("cell-*.json")}


@pytest.mark.distributed
def test_a_run_is_recorded_continued_and_reported(tmp_path: Path) -> None:
    file = tmp_path / "tiny.toml"
    file.write_text(TINY + '[matrix]\nbandwidth = ["unlimited", "50Mbit"]\nlatency = "1ms"\n')
    first = experiment(tmp_path)
    assert first.returncode == 0, first.stderr
    assert "[2/2] cell 1 (bandwidth 50 Mbit/s), repeat 1" in first.stderr
    kept = records(tmp_path)
    assert [record["status"] for record in kept.values()] == ["ok", "ok"]
    assert all((tmp_path / "results/tiny" / name).exists() for name in ("tiny.html", "tiny.md"))
    history = sqlite3.connect(tmp_path / "history.sqlite3")
    runs = {name for (name,) in history.execute("SELECT name FROM runs")}
    history.close()
    assert runs == {run for record in kept.values() for run in record["runs"]}  # type: ignore[attr-defined]

    (tmp_path / "results/tiny/cell-001-repeat-00.json").unlink()
    second = experiment(tmp_path)
    assert "1 of 2 visits were finished before" in second.stderr
    assert "[1/1] cell 1" in second.stderr
    again = records(tmp_path)
    assert again["cell-000-repeat-00.json"] == kept["cell-000-repeat-00.json"]
    assert again["cell-001-repeat-00.json"] != kept["cell-001-repeat-00.json"]

    file.write_text(file.read_text().replace("50Mbit", "20Mbit"))
    changed = experiment(tmp_path)
    assert changed.returncode == 2
    assert "holds results of another version of this file" in changed.stderr
    assert records(tmp_path) == again
    listed = experiment(tmp_path, command="list")
    assert "tiny  2/2     0" in listed.stdout
    reported = experiment(tmp_path, "tiny", "--to", str(tmp_path / "report"), command="report")
    assert (tmp_path / "report/tiny.html").exists(), reported.stderr


@pytest.mark.distributed
def test_a_node_that_does_not_come_up_and_unequal_gradients_fail_their_cells_alone(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(MODEL)
    own = '[model]\nfunction = "own:make"\nlayers = 2\narguments = { most = 4 }\n'
    (tmp_path / "tiny.toml").write_text(TINY.partition("[model]")[0] + own + "[matrix]\nbatch = [8, 4, 1, 2]\n")
    done = experiment(tmp_path)
    assert done.returncode == 1
    failed, equal, unequal, diverging = (record for _, record in sorted(records(tmp_path).items()))
    assert (failed["status"], equal["status"], unequal["status"]) == ("failed", "ok", "unequal")
    assert diverging["status"] == "ok"  # NaN everywhere, and the same everywhere
    assert failed["why"] == "trainer 0 has ended with code 1"
    assert "ValueError: 8 rows are too many" in str(failed["log"])
    assert "UNEQUAL GRADIENTS: cell 2 (1 row in a step), repeat 1" in done.stderr
    for name in ("tiny.md", "tiny.html"):
        page = (tmp_path / "results/tiny" / name).read_text()
        assert "ValueError: 8 rows are too many" in page
        assert "UNEQUAL GRADIENTS in cell 2" in page
    again = experiment(tmp_path)
    assert "[1/1] cell 0" in again.stderr  # what has failed is tried again
    assert "UNEQUAL GRADIENTS: cell 2 (1 row in a step), repeat 1" in again.stderr


@pytest.mark.nightly
def test_a_worker_that_does_not_start_is_shown_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY + '[nodes]\nworker_options = ["--memory", "much"]\n')
    done = experiment(tmp_path)
    assert done.returncode == 1
    assert "worker 0 has ended with code 2" in done.stderr
    assert "argument --memory" in done.stderr


def test_without_namespaces_it_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(network, "obstacle", lambda: "network namespaces need root, and this user is not root")
    (tmp_path / "tiny.toml").write_text(TINY + '[nodes]\nkind = "namespace"\n')
    code = main(["experiment", "run", str(tmp_path / "tiny.toml"), "--results", str(tmp_path / "results")])
    assert code == 2
    said = capsys.readouterr().err
    assert "need root, and this user is not root" in said
    assert 'Use nodes.kind = "process"' in said
    assert not (tmp_path / "results").exists()


def test_a_second_run_waits_for_no_first_and_restart_discards_nothing_without_rights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    command = ["experiment", "run", str(tmp_path / "tiny.toml"), "--results", str(tmp_path / "results")]
    kept = Records(tmp_path / "results", "tiny")
    kept.begin(read(tmp_path / "tiny.toml"), describe())
    with kept.locked():
        assert main(command) == 2
    assert "another process runs this experiment" in capsys.readouterr().err
    (tmp_path / "tiny.toml").write_text(TINY + '[nodes]\nkind = "namespace"\n')
    monkeypatch.setattr(network, "obstacle", lambda: "network namespaces need root")
    assert main([*command, "--restart"]) == 2
    assert kept.experiment()["settings"]["nodes"]["kind"] == "process"


def test_what_namespaces_need_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None if name == "ip" else name)
    assert "need ip, of iproute2" in network.obstacle()
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "this user is not root" in network.obstacle()


@pytest.mark.distributed
def test_namespaces_and_groups_end_with_a_killed_run(tmp_path: Path) -> None:
    require_namespaces()
    (tmp_path / "tiny.toml").write_text(
        TINY.replace("rounds = 1", "rounds = 1000")
        + '[nodes]\nkind = "namespace"\n[matrix]\nbandwidth = "50Mbit"\nlatency = "1ms"\n'
    )
    command = [sys.executable, "-m", "backhaul", "experiment", "run", str(tmp_path / "tiny.toml")]
    to = ["--results", str(tmp_path / "results"), "--store", ":memory:"]
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen([*command, *to], stderr=log)
    group = _group(run.pid)

    def is_training() -> bool:
        assert run.poll() is None, (tmp_path / "log").read_text()
        return len(descendants(run.pid)) > 8 if group is None else (group / "worker-0").exists()

    try:
        wait_until(is_training, "the nodes train")
        nodes = descendants(run.pid)
    finally:
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    wait_until(lambda: not any(_is_alive(pid) for pid in nodes), "all nodes end")
    wait_until(lambda: group is None or not group.exists(), "the groups are removed")
    (tmp_path / "tiny.toml").write_text(TINY)
    left = tmp_path / "results" / "tiny" / "running"
    assert left.exists()
    assert main(["experiment", "run", str(tmp_path / "tiny.toml"), "--restart", *to]) == 0
    assert not left.exists()


def test_without_groups_processes_are_stopped_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise PermissionError

    monkeypatch.setattr(cpu_shares, "parent_group", refuse)
    shares = cpu_shares.cpu_shares()
    assert not shares.follows_children
    with subprocess.Popen(["sleep", "inf"]) as node:
        try:
            shares.hold("node", [node.pid], 0.5)
            wait_until(lambda: _state(node.pid) == "T", "the node is stopped")
            shares.close()
            assert _state(node.pid) != "T"
        finally:
            node.kill()


def _group(pid: int) -> Path | None:
    """The cgroup of a run's nodes, None where they are stopped in turns instead."""
    try:
        return cpu_shares.parent_group()[0] / f"backhaul-experiment-{pid}"
    except OSError:
        return None


def _is_alive(pid: int) -> bool:
    return _state(pid) not in {"", "Z"}


def _state(pid: int) -> str:
    """The state of a process in one letter; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""

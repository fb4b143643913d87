"""The order of visits, their records, and the bandwidth that connections of a link share."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul._cli.main import main
from backhaul_lab.experiment.conduct.progress import Progress
from backhaul_lab.experiment.conduct.records import OtherExperimentError, Records, RecordsError, Visit, names, write
from backhaul_lab.experiment.conduct.runner import Runner, open_fabric, schedule
from backhaul_lab.experiment.nodes.fabric import LocalFabric
from backhaul_lab.experiment.plan.cells import Cell
from backhaul_lab.experiment.plan.spec import Experiment, parse
from backhaul_lab.harness import link_proxy
from backhaul_lab.harness.link_proxy import Bandwidth
from backhaul_lab.harness.processes import ChildProcess, end_of

FAILED = {"status": "failed", "why": "trainer 0 has ended with code 1", "log": "", "shares": {}}


def experiment_of(cells: int, repeats: int) -> Experiment:
    """An experiment with some cells."""
    matrix = {"workers": list(range(1, cells + 1))}
    return parse({"repeats": repeats, "model": {"layers": 16}, "matrix": matrix}, "name")


@given(st.integers(1, 12), st.integers(1, 5))
def test_every_cell_is_visited_once_in_each_repeat_before_the_next(cells: int, repeats: int) -> None:
    visits = schedule(experiment_of(cells, repeats))
    for repeat in range(repeats):
        of_repeat = visits[repeat * cells : (repeat + 1) * cells]
        assert Counter(visit.cell for visit in of_repeat) == Counter(range(cells))
        assert {visit.repeat for visit in of_repeat} == {repeat}


def test_each_repeat_begins_with_another_cell() -> None:
    assert [visit.cell for visit in schedule(experiment_of(3, 3))] == [0, 1, 2, 1, 2, 0, 2, 0, 1]


def test_records_are_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    records = Records(tmp_path, "name")
    records.begin(experiment_of(2, 1), {"date": "today"})
    assert records.get(Visit(1, 0)) is None
    with pytest.raises(TypeError):
        records.put(Visit(1, 0), {"status": object()})
    assert records.get(Visit(1, 0)) is None
    records.put(Visit(1, 0), FAILED)
    assert records.get(Visit(1, 0)) == {"cell": 1, "repeat": 0, **FAILED}
    assert [record["cell"] for record in records.visits()] == [1]
    assert names(tmp_path) == ["name"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"cell": 0, "repeat": 0, "status": "ok", "shares": {}}', "null"])
def test_a_damaged_record_is_measured_again_and_left_out_of_the_report(tmp_path: Path, content: str) -> None:
    records = Records(tmp_path, "name")
    records.begin(experiment_of(2, 1), {"date": "today"})
    records.put(Visit(0, 0), FAILED)
    records.put(Visit(1, 0), FAILED)
    (tmp_path / "name" / "cell-000-repeat-00.json").write_text(content)
    assert records.get(Visit(0, 0)) is None
    assert [record["cell"] for record in records.visits()] == [1]
    assert [path.name for path in records.damaged()] == ["cell-000-repeat-00.json"]


def test_a_damaged_experiment_is_named_and_does_not_hide_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "other"):
        Records(tmp_path, name).begin(experiment_of(2, 1), {"date": "today"})
    (tmp_path / "one" / "experiment.json").write_text("{")
    assert main(["experiment", "list", "--results", str(tmp_path)]) == 0
    listed = capsys.readouterr().out
    assert "its record is damaged" in listed
    assert "other  0/2" in listed
    assert main(["experiment", "report", "one", "--results", str(tmp_path)]) == 2
    assert "experiment.json is damaged" in capsys.readouterr().err


def test_a_full_disk_leaves_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_half(self: Path, text: str, **_: str) -> None:
        with self.open("w") as file:
            file.write(text[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "record.json", {"a": 1})
    assert list(tmp_path.iterdir()) == []


def test_two_runs_of_an_experiment_do_not_mix(tmp_path: Path) -> None:
    with Records(tmp_path, "name").locked():
        with (
            pytest.raises(RecordsError, match="another process runs this experiment"),
            Records(tmp_path, "name").locked(),
        ):
            pass
        with Records(tmp_path, "other").locked():
            pass
    with Records(tmp_path, "name").locked():
        pass


def test_results_of_other_versions_or_another_machine_are_not_mixed(tmp_path: Path) -> None:
    machine: dict[str, Any] = {
        "versions": {"torch": "2.12"},
        "hardware": {"cpu": "A CPU", "usable_cores": 2, "load_average": 0.1},
    }
    records = Records(tmp_path, "name")
    records.begin(experiment_of(2, 1), machine)
    records.begin(experiment_of(2, 1), {**machine, "hardware": {**machine["hardware"], "load_average": 3.0}})
    with pytest.raises(OtherExperimentError, match=r"measured with torch 2\.12 instead of 2\.13\. Keep them"):
        records.begin(experiment_of(2, 1), {**machine, "versions": {"torch": "2.13"}})
    with pytest.raises(OtherExperimentError, match="usable cores: 2 instead of 64"):
        records.begin(experiment_of(2, 1), {**machine, "hardware": {"cpu": "A CPU", "usable_cores": 64}})


class Silent(Progress):
    """Progress that nobody sees, with the lines that it was to show."""

    def __init__(self) -> None:
        super().__init__(1)
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        """Keeps a line."""
        self.lines.append(text)


def test_unequal_gradients_are_told_again_when_an_experiment_goes_on(tmp_path: Path) -> None:
    experiment, records = experiment_of(2, 1), Records(tmp_path, "name")
    records.begin(experiment, {})
    for cell in (0, 1):
        records.put(Visit(cell, 0), {**FAILED, "status": "unequal" if cell else "failed", "why": "3 gradients differ"})
    records.put(Visit(0, 0), {**FAILED, "status": "unequal", "why": "3 gradients differ"})
    runner = Runner(experiment, records, open_fabric(experiment), "")
    assert runner.remaining == []
    outcome = runner.run(Silent())
    assert [text.partition(": ")[2] for text in outcome.unequal] == ["3 gradients differ"] * 2


def test_a_kernel_that_refuses_fails_the_cell_and_not_the_run(tmp_path: Path) -> None:
    def refuse(cell: Cell, folder: Path) -> LocalFabric:
        if cell.number:
            raise OSError(24, "Too many open files")
        raise subprocess.CalledProcessError(2, ["tc", "qdisc"], stderr="RTNETLINK answers: No such file")

    experiment, records = experiment_of(2, 1), Records(tmp_path, "name")
    records.begin(experiment, {})
    progress = Silent()
    outcome = Runner(experiment, records, refuse, "").run(progress)
    assert [text.partition(": ")[2] for text in outcome.failed] == [
        "tc qdisc has ended with code 2",
        "this machine cannot run the cell: [Errno 24] Too many open files",
    ]
    assert "    RTNETLINK answers: No such file" in progress.lines


@pytest.mark.parametrize("content", [b"x" * 10**6, b"\xff\x00\x1b[31mred\r\n" * 10**5, b"", b"short"])
def test_the_end_of_a_log_is_short_and_printable(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "log").write_bytes(content)
    shown = end_of(tmp_path / "log")
    assert len(shown) <= 20_000
    assert len(shown.splitlines()) <= 25
    assert shown.replace("\n", "").isprintable()
    assert bool(shown) == bool(content)
    assert end_of(tmp_path / "missing") == ""


def test_what_a_killed_process_of_a_node_ran_stays_counted(tmp_path: Path) -> None:
    child = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass\nprint(flush=True)"
    parent = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', sys.argv[1] + '; input()'], "
        "stdin=subprocess.PIPE); child.wait(); print('ended', flush=True); input()"
    )
    node = ChildProcess("node", [sys.executable, "-c", parent, child], tmp_path / "log")
    try:
        node.read(60)
        before_s = node.ran_s()
        node.kill_serving()
        assert node.read(60) == "ended"
        assert before_s >= 0.3
        assert node.ran_s() >= before_s - 0.05
    finally:
        node.end()


def test_records_of_another_version_are_kept(tmp_path: Path) -> None:
    records = Records(tmp_path, "name")
    records.begin(experiment_of(2, 1), {})
    records.begin(experiment_of(2, 1), {})
    with pytest.raises(OtherExperimentError, match="--restart"):
        records.begin(experiment_of(3, 1), {})
    assert len(records.experiment()["settings"]["cells"]) == 2
    records.discard()
    records.begin(experiment_of(3, 1), {})
    assert len(records.experiment()["settings"]["cells"]) == 3


def test_a_directory_without_records_is_not_discarded(tmp_path: Path) -> None:
    (tmp_path / "name").mkdir()
    (tmp_path / "name" / "thesis.txt").write_text(json.dumps("all of it"))
    Records(tmp_path, "name").discard()
    assert (tmp_path / "name" / "thesis.txt").exists()


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 10**6)), min_size=1, max_size=30))
def test_connections_share_the_bandwidth_of_a_direction(chunks: list[tuple[float, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        now_s, slept_s = 0.0, 0.0

        def sleep(seconds: float) -> None:
            nonlocal slept_s
            slept_s = seconds

        patch.setattr(link_proxy.time, "monotonic", lambda: now_s)  # type: ignore[attr-defined]
        patch.setattr(link_proxy.time, "sleep", sleep)  # type: ignore[attr-defined]
        link = Bandwidth(1000.0)
        free_s = 0.0
        for later_s, size_bytes in chunks:  # each may be another connection's: waiting does not advance the clock
            now_s += later_s
            link.wait(size_bytes)
            free_s = max(free_s, now_s) + size_bytes / 1000.0
            assert slept_s == pytest.approx(free_s - now_s)

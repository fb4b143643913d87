"""The order of visits, their records, and the bandwidth that connections of a link share."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul_bench.simulation import throttled_proxy
from backhaul_bench.simulation.throttled_proxy import Bandwidth
from backhaul_experiment.conduct.records import OtherExperimentError, Records, Visit, names
from backhaul_experiment.conduct.runner import schedule
from backhaul_experiment.plan.spec import Experiment, parse


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
    assert not records.has(Visit(1, 0))
    with pytest.raises(TypeError):
        records.put(Visit(1, 0), {"status": object()})
    assert not records.has(Visit(1, 0))
    records.put(Visit(1, 0), {"status": "ok"})
    assert records.get(Visit(1, 0)) == {"cell": 1, "repeat": 0, "status": "ok"}
    assert [record["cell"] for record in records.visits()] == [1]
    assert names(tmp_path) == ["name"]


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

        patch.setattr(throttled_proxy.time, "monotonic", lambda: now_s)  # type: ignore[attr-defined]
        patch.setattr(throttled_proxy.time, "sleep", sleep)  # type: ignore[attr-defined]
        link = Bandwidth(1000.0)
        free_s = 0.0
        for later_s, size_bytes in chunks:  # each may be another connection's: waiting does not advance the clock
            now_s += later_s
            link.wait(size_bytes)
            free_s = max(free_s, now_s) + size_bytes / 1000.0
            assert slept_s == pytest.approx(free_s - now_s)

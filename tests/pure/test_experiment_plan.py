"""The file of an experiment, its matrix, and the shares of its nodes."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul_lab.experiment.plan.axes import AXES, parse_bandwidth, parse_latency, show_bandwidth, show_latency
from backhaul_lab.experiment.plan.cells import Cell, SpecError, expand
from backhaul_lab.experiment.plan.shares import FOR_PROXIES, RESERVED, SMALLEST, shares_of
from backhaul_lab.experiment.plan.spec import parse, read

SHIPPED = sorted((Path(__file__).parents[2] / "examples/experiments").glob("*.toml"))


def cell(**values: Any) -> Cell:
    """A cell whose other values are the defaults."""
    return Cell(0, {axis.name: axis.default for axis in AXES.values()} | values)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3, unique=True),
    st.lists(st.sampled_from([1, 2, 4]), unique=True, min_size=1),
)
def test_a_matrix_has_every_combination_once(workers: list[int], sizes: list[int]) -> None:
    matrix = expand({"workers": workers, "segment_layers": sizes}, 16)
    assert [(one["workers"], one["segment_layers"]) for one in matrix.cells] == [
        (count, size) for count in workers for size in sizes
    ]
    assert [one.number for one in matrix.cells] == list(range(len(matrix.cells)))
    assert all(set(one.values) == set(AXES) for one in matrix.cells)
    assert matrix.varied == tuple(
        name for name, values in (("workers", workers), ("segment_layers", sizes)) if len(values) > 1
    )


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"worker_speeds": [1, 2]}, r'"worker_speeds" is not an axis; did you mean worker_speed\?'),
        ({"worker_speeds": [1, 2], "workers": [1, 2, 3]}, "The matrix would have been 6 cells"),
        ({"zebra": [1]}, r'"zebra" is not an axis: the axes are trainers, workers'),
        ({"workers": []}, "workers has no value. The matrix would have been 0 cells"),
        ({"workers": [1, 1]}, "workers has a value twice. The matrix would have been 2 cells"),
        ({"workers": [0, 1]}, "workers: 0 is not a whole number above 0. The matrix would have been 2 cells"),
        ({"workers": True}, "True is not a whole number"),
        ({"bandwidth": ["100"]}, r"bandwidth: '100' is not a bandwidth: write it as \"100Mbit\""),
        ({"latency": [5]}, 'latency: 5 is not a latency: write it as "5ms"'),
        ({"dtype": ["float16"]}, "'float16' is not one of float32, bfloat16"),
        ({"worker_speed": [0]}, "0 is not a speed between"),
        ({"segment_layers": [1, 3, 5]}, r"segment_layers 3 does not divide the model's 8 layers \(in 1 cell\); segm"),
        ({"segment_layers": [1, 3, 5]}, "would have been 3 cells. 2 of them are impossible"),
        ({"workers": [1, 16], "batch": [2, 4]}, r"workers 16 are more than the 8 segments of the model \(in 2 cells\)"),
        ({"workers": [1, 16], "batch": [2, 4]}, "would have been 4 cells. 2 of them"),
        ({"micro_batches": 3}, "micro_batches 3 does not divide batch 4"),
        ({"micro_batches": 2, "returns": "activations"}, "deferred"),
        ({"workers": list(range(1, 600))}, "would have been 599 cells. At most 500"),
        ({"batch": list(range(1, 1001)), "trainers": list(range(1, 1001))}, "would have been 1000000 cells. At most"),
        ({"bandwidth": "0.0001kbit"}, "not a bandwidth between 1 kbit/s and 1000 Gbit/s"),
        ({"bandwidth": f"{'9' * 400}Gbit"}, "not a bandwidth between"),
        ({"latency": "61s"}, "longer than the longest latency, 60 s"),
        ({"batch": 10**30}, "batch: a number above 1,000,000 is too large"),
        ({"trainers": 10**5}, "are 100001 nodes together, and a cell may have 250"),
        ({"returns": [["gradients"]]}, "is not one of"),
    ],
)  # fmt: skip
def test_an_impossible_matrix_is_named_and_counted(table: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        expand(table, 8)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"modell": {}}, r'"modell" is not a key of an experiment; did you mean model\?'),
        ({"model": {"layer": 3}}, r'"model.layer" is not a key of an experiment; did you mean model.layers\?'),
        ({"model": {"width": 100}}, "model.width: 100 is not a multiple of 32"),
        ({"model": {"function": "os.system('x')"}}, 'neither "demo" nor "module:function"'),
        ({"model": {"arguments": {"a": 1}}}, '"demo" takes none'),
        ({"nodes": {"kind": "docker"}}, "'docker' is not one of process, namespace, ray"),
        ({"nodes": {"session": {"worker": "a:1"}}}, "without worker"),
        ({"nodes": {"session": {"settings": {"notes": "mine"}}}}, "without tags and notes"),
        ({"nodes": {"session": {"settings": 3}}}, "fields of Settings"),
        ({"nodes": {"session": {"settings": {"boundaries": "send"}}}}, r"boundaries is an axis, so set it in"),
        ({"nodes": {"kind": "ray"}, "matrix": {"latency": ["0ms", "5ms"]}}, "1 of 2 cells set bandwidth, latency"),
        ({"nodes": {"start_timeout_s": 0}}, "0 is not a number of at least"),
        ({"charts": ["pie"]}, r"\['pie'\] is not a list of some of carried, step_time, peak"),
        ({"repeats": 0}, "repeats: 0 is not a whole number of at least 1"),
        ({"steps": 1}, "at least 2 steps"),
        ({"name": "a/b"}, 'name: "a/b"'),
        ({"matrix": []}, r"matrix: write it as \[matrix\]"),
        ({"events": {}}, r"write each as \[\[events\]\]"),
        ({"events": [{"kill_worker": 1}]}, "there is no worker 1 in a cell with 1"),
        ({"events": [{"at_step": 6}]}, "a repeat has 6 timed steps, which count from 0: 6 would never come"),
        ({"charts": [["peak"]]}, "is not a list of some of"),
        ({"nodes": {"start_timeout_s": float("nan")}}, "nodes.start_timeout_s: nan is not a number"),
        ({"nodes": {"step_timeout_s": float("inf")}}, "nodes.step_timeout_s: at most 86,400"),
        ({"repeats": 10**9}, "repeats: at most 10,000 is possible"),
        ({"seed": 2**70}, "seed: at most"),
        ({"seed": -1}, "seed: -1 is not a whole number of at least 0"),
        ({"title": {"a": 1}}, "title: {'a': 1} is not a text"),
        ({"nodes": {"token_file": 3}}, "nodes.token_file: 3 is not a text"),
        ({"nodes": {"session": {"returns": "activations"}}}, r"returns is an axis, so set it in \[matrix\]"),
        ({"nodes": {"worker_options": ["--listen=0.0.0.0:1"]}}, "leave out --listen=0.0.0.0:1"),
    ],
)
def test_a_wrong_key_is_named(table: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        parse(table, "name")


def test_a_file_that_is_no_toml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("workers = [")
    with pytest.raises(SpecError, match="it is not TOML"):
        read(tmp_path / "a.toml")
    with pytest.raises(SpecError, match="No such file"):
        read(tmp_path / "b.toml")
    for content in ("a = " + "[" * 100_000, "a = " + "9" * 5_000, "\udcff"):
        (tmp_path / "a.toml").write_text(content, errors="surrogateescape")
        with pytest.raises(SpecError, match="it is not TOML"):
            read(tmp_path / "a.toml")


def test_a_title_is_one_line() -> None:
    assert parse({"title": "Two\n# lines"}, "name").title == "Two # lines"


def test_the_digest_follows_the_content_and_not_comments(tmp_path: Path) -> None:
    texts = ("[matrix]\nworkers = [1, 2]\n", "# why\n[matrix]\nworkers = [1,2]\n", "[matrix]\nworkers = [1, 3]\n")
    digests = []
    for text in texts:
        (tmp_path / "a.toml").write_text(text)
        digests.append(read(tmp_path / "a.toml").digest)
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_a_shipped_experiment_can_be_read(path: Path) -> None:
    experiment = read(path)
    assert experiment.name == path.stem
    assert experiment.description
    assert experiment.title


@given(st.floats(1, 999), st.sampled_from(["kbit", "Mbit", "Gbit"]))
def test_a_bandwidth_is_shown_as_it_was_written(number: float, unit: str) -> None:
    number = float(f"{number:.3g}")
    shown = show_bandwidth(parse_bandwidth(f"{number:f}{unit}"))
    assert math.isclose(parse_bandwidth(shown), parse_bandwidth(f"{number:f}{unit}"), rel_tol=1e-5)


@given(st.integers(0, 10_000))
def test_a_latency_is_shown_in_milliseconds(number: int) -> None:
    assert math.isclose(parse_latency(show_latency(parse_latency(f"{number}us"))), number / 1e6, abs_tol=1e-9)


@given(st.integers(1, 64), st.integers(1, 64), st.floats(0.05, 20), st.integers(1, 128))
def test_shares_fit_the_cores_and_keep_the_speed(trainers: int, workers: int, speed: float, cores: int) -> None:
    shares = shares_of(cell(trainers=trainers, workers=workers, worker_speed=speed), cores)
    if shares.is_core_bound:
        assert shares.why
        unit = min(1.0, 1 / speed, cores * (1 - RESERVED) / (trainers + speed * workers))
        assert unit * min(1.0, speed) < SMALLEST
        return
    assert trainers * shares.trainer + workers * shares.worker <= cores * (1 - RESERVED) + 1e-9
    assert 0 < shares.trainer <= 1
    assert 0 < shares.worker <= 1 + 1e-12
    assert math.isclose(shares.speed, speed)


def test_a_fast_worker_needs_a_slow_trainer() -> None:
    shares = shares_of(cell(worker_speed=3.0), 2)
    assert (round(shares.trainer, 3), round(shares.worker, 3)) == (0.333, 1.0)


def test_proxies_that_delay_all_bytes_get_a_part_of_the_machine() -> None:
    near, far = shares_of(cell(workers=3), 2), shares_of(cell(workers=3, latency=0.01), 2)
    assert math.isclose(near.trainer * 4, 2 * (1 - RESERVED))
    assert math.isclose(far.trainer * 4, 2 * (1 - RESERVED - FOR_PROXIES))


def test_nodes_that_cannot_be_throttled_are_core_bound() -> None:
    shares = shares_of(cell(), 2, "cgroups and signals are forbidden")
    assert shares.is_core_bound
    assert shares.why == "cgroups and signals are forbidden"

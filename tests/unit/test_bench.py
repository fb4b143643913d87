"""Tests of the harness of `backhaul bench`: rounds, noise, verdicts and results. They measure nothing."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from backhaul._cli.main import main
from backhaul.demo.model import Block
from backhaul.doctor.profile.thread_times import ThreadTimes
from backhaul_lab.bench import child, command
from backhaul_lab.bench.figures import FIGURES, Figure, Kind, Verdict, chosen
from backhaul_lab.bench.groups import GROUPS, Group
from backhaul_lab.bench.outcomes import Outcome, as_table, is_failed, of_counts, of_rounds, without_value
from backhaul_lab.bench.overlap import Lane, exposed
from backhaul_lab.harness import rounds
from backhaul_lab.harness.core_times import Core, CoreTimes, foreign_share
from backhaul_lab.harness.rounds import (
    PACE,
    Alternative,
    Plan,
    Rounds,
    UnequalGradientsError,
    interleave,
    ratio_of,
)
from backhaul_lab.harness.stage import Stage
from backhaul_lab.harness.training import (
    BlockTraining,
    adapt,
    checkpoint_of_torch,
    compare,
    compare_gradients,
    differing,
)
from backhaul_proto.v1 import telemetry_pb2


def rounds_of(values: Sequence[tuple[float, bool]]) -> Rounds:
    taken = Rounds()
    for value, is_quiet in values:
        taken.add({"ours": value, "theirs": 2.0}, is_quiet=is_quiet)
    return taken


def test_each_group_has_a_measurement_and_each_measurement_figures() -> None:
    assert {figure.group for figure in FIGURES} == set(GROUPS)


@pytest.mark.parametrize(
    ("kind", "value", "verdict"),
    [
        (Kind.AT_MOST, 0.8, Verdict.REACHED),
        (Kind.AT_MOST, 0.81, Verdict.MISSED),
        (Kind.AT_LEAST, 0.8, Verdict.REACHED),
        (Kind.AT_LEAST, 0.79, Verdict.MISSED),
        (None, 100.0, Verdict.REPORTED),
    ],
)
def test_a_value_is_judged_by_its_limit(kind: Kind | None, value: float, verdict: Verdict) -> None:
    figure = Figure("f", "what", "group", kind, 0.8) if kind else Figure("f", "what", "group")
    assert figure.judge(value) is verdict


def test_only_names_figures_in_the_order_of_the_registry() -> None:
    assert [figure.name for figure in chosen(["growth", "peak_flat"])] == ["peak_flat", "growth"]
    assert chosen([]) == list(FIGURES)
    with pytest.raises(ValueError, match=r"no figure growht; there are step_vs_torch_gradients,"):
        chosen(["growht"])


def test_variants_take_turns_and_each_round_begins_with_another() -> None:
    ran: list[str] = []

    def measured(variant: Alternative, cores: Sequence[Core]) -> tuple[float, bool]:
        ran.append(variant.name)
        return 1.0, True

    interleave([Alternative(name, lambda: None) for name in "abc"], [], Plan(enough=3, warm=1), measured=measured)
    assert "".join(ran) == "abcbcacababc"


def test_rounds_with_a_disturbed_variant_are_dropped_whole_and_warm_ones_do_not_count() -> None:
    disturbed = iter(
        [False, False, True, False, False, False]
    )  # Two variants in three rounds, of which the first is a warm-up.

    def measured(variant: Alternative, cores: Sequence[Core]) -> tuple[float, bool]:
        return 1.0, not next(disturbed)

    variants = [Alternative("a", lambda: None), Alternative("b", lambda: None)]
    taken = interleave(variants, [], Plan(enough=7, most=2, warm=1), measured=measured)
    assert (taken.undisturbed, taken.dropped) == (1, 1)


def test_it_ends_with_enough_undisturbed_rounds_or_when_its_time_is_up_but_has_a_round() -> None:
    def run(plan: Plan, is_quiet: bool) -> Rounds:
        return interleave([Alternative("a", lambda: None)], [], plan, measured=lambda *_: (1.0, is_quiet))

    assert (run(Plan(enough=7, most=50), True).undisturbed, run(Plan(warm=2, limit_s=0.0), False).dropped) == (7, 1)


def test_unequal_gradients_end_the_measurement_even_in_a_warm_round() -> None:
    def unequal() -> None:
        raise UnequalGradientsError("2 of 3 gradients")

    with pytest.raises(UnequalGradientsError):
        interleave([Alternative("a", lambda: None)], [], Plan(warm=1), unequal, lambda *_: (1.0, True))


def test_what_a_variant_counts_replaces_its_time_and_its_lead_in_comes_first() -> None:
    ran: list[str] = []

    def run() -> float:
        ran.append("run")
        return 42.0

    taken, _ = rounds.timed(Alternative("a", run, lambda: ran.append("lead in")), [])
    assert (taken, ran) == (42.0, ["lead in", "run"])


def test_the_value_is_the_median_of_undisturbed_rounds_with_their_middle_half() -> None:
    quiet = [(value, True) for value in (1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 9.0)]
    outcome = of_rounds("growth", rounds_of([*quiet, (100.0, False)]), ratio_of("ours", "theirs"))
    assert (outcome.value, outcome.low, outcome.high) == (0.8, 0.6, 1.0)
    assert (outcome.undisturbed, outcome.dropped, outcome.verdict) == (7, 1, "reached")
    assert outcome.details == {"ours": 1.6, "theirs": 2.0}


def test_too_few_undisturbed_rounds_are_inconclusive_whatever_they_say() -> None:
    outcome = of_rounds("growth", rounds_of([(0.2, True)] * 4 + [(9.0, False)] * 8), ratio_of("ours", "theirs"))
    assert outcome.verdict == "inconclusive"
    assert (outcome.undisturbed, outcome.dropped, outcome.value) == (4, 8, 4.5)
    assert "(4.500)" in as_table([outcome])


def times(at_s: float, busy_s: float, *processes: dict[int, tuple[float, float]]) -> CoreTimes:
    """Of one core, with the seconds that each thread of our processes ran and was delayed."""
    ran = {pid: sum(ran_s for ran_s, _ in threads.values()) for pid, threads in enumerate(processes, 1)}
    known = {pid: {i: ThreadTimes(*t) for i, t in threads.items()} for pid, threads in enumerate(processes, 1)}
    return CoreTimes(at_s, busy_s, ran, known)


NOISE = {
    "waiting for a worker is none": (times(0, 0, {1: (0, 0)}), times(1, 0.3, {1: (0.3, 0)}), 0.0),
    "a neighbour delays the computing thread": (times(0, 0, {1: (0, 5)}), times(1, 0.9, {1: (0.9, 5.1)}), 0.1),
    "a thread of ours delays it": (
        times(0, 0, {1: (0, 0), 2: (0, 0)}),
        times(1, 1, {1: (0.75, 0.25), 2: (0.25, 0.75)}),
        0.0,
    ),
    "a process of ours runs on the same core": (
        times(0, 0, {1: (0, 0)}, {2: (0, 0)}),
        times(1, 1, {1: (0.5, 0.5)}, {2: (0.5, 0.5)}),
        0.0,
    ),
    # Without the allowance for ticks.
    "the core is busy and no thread is delayed": (times(0, 10, {1: (0, 0)}), times(1, 10.6, {1: (0.3, 0)}), 0.27),
}
"""Times before and after a measurement, and the share of the time that other programs took."""


@pytest.mark.parametrize(("before", "after", "share"), NOISE.values(), ids=NOISE)
def test_noise_is_what_other_programs_take(before: CoreTimes, after: CoreTimes, share: float) -> None:
    assert foreign_share(before, after) == pytest.approx(share)


def test_a_thread_of_ours_that_has_ended_is_no_noise() -> None:
    before, after = times(0, 0, {1: (0, 0)}), times(1, 1, {1: (0.75, 0.25)})
    after.processes_ran_s[1] = 1.0
    assert foreign_share(before, after) == 0.0


def test_accounts_are_read_of_this_process_on_its_core() -> None:
    core = Core(min(os.sched_getaffinity(0)), [os.getpid(), 2**22 + 1])  # the other process has ended
    before = core.times()
    while core.times().processes_ran_s[os.getpid()] < before.processes_ran_s[os.getpid()] + 0.02:
        sum(range(1000))
    after = core.times()
    assert after.at_s > before.at_s
    assert after.busy_s >= before.busy_s
    assert sum(thread.ran_s for thread in after.threads[os.getpid()].values()) > 0
    assert after.threads[2**22 + 1] == {}


def call(number: int, *spans: tuple["Lane.ValueType", float, float]) -> telemetry_pb2.SegmentCall:
    return telemetry_pb2.SegmentCall(
        number=number,
        spans=[telemetry_pb2.Span(lane=lane, started_at_s=begin, duration_s=end - begin) for lane, begin, end in spans],
    )


def test_recomputation_after_backward_asked_for_it_is_exposed() -> None:
    ahead = call(1, (Lane.LANE_RECOMPUTE, 1, 2), (Lane.LANE_WAIT, 3, 5), (Lane.LANE_BACKWARD, 3, 5))
    late = call(0, (Lane.LANE_WAIT, 6, 9), (Lane.LANE_RECOMPUTE, 5.5, 7), (Lane.LANE_BACKWARD, 7, 9))
    assert exposed([ahead, late]) == pytest.approx(1.0 / 2.5)


def test_a_worker_that_goes_on_by_itself_needs_a_segment_when_it_has_the_gradient_after_it() -> None:
    first = call(1, (Lane.LANE_RECOMPUTE, 1, 2), (Lane.LANE_WAIT, 3, 5), (Lane.LANE_BACKWARD, 3, 5))
    speculated = call(0, (Lane.LANE_RECOMPUTE, 4, 6), (Lane.LANE_BACKWARD, 6, 8), (Lane.LANE_WAIT, 7, 8))
    assert exposed([first, speculated]) == pytest.approx(1.0 / 3.0)


def test_what_the_trainer_recomputed_was_all_waited_for() -> None:
    assert exposed([call(0, (Lane.LANE_TRAINER, 1, 3))]) == 1.0
    with pytest.raises(RuntimeError, match="no recomputation"):
        exposed([call(0)])


def test_equal_trainings_are_equal_and_others_are_named() -> None:
    trainings = [
        BlockTraining("none", 2, (1, 8), None, width=32),
        BlockTraining("torch", 2, (1, 8), checkpoint_of_torch, segment_layers=2, width=32),
    ]
    for training in trainings:
        training.steps(2)
    compare(trainings)
    trainings[1].parameters[0].grad[0] += 1e-6  # type: ignore[index]
    with pytest.raises(UnequalGradientsError, match="1 of 25 gradients of torch and none are not equal"):
        compare(trainings)
    with pytest.raises(UnequalGradientsError):
        compare_gradients("nan", [torch.tensor([float("nan")])], [torch.tensor([0.0])])


def test_micro_batches_of_a_step_add_up_and_are_announced_between_forward_and_backward() -> None:
    plain, checkpointed = (
        BlockTraining(name, 2, (1, 8), way, width=32, rows=3, micro_batches=3)
        for name, way in (("none", None), ("torch", checkpoint_of_torch))
    )
    announced = []
    plain.happens = lambda number: announced.append((number, len(plain.losses)))
    for training in (plain, checkpointed):
        training.step()
    compare([plain, checkpointed])
    assert announced == [(0, 0), (1, 1), (2, 2)]
    assert len(set(map(float, plain.losses))) == 3  # each micro-batch draws its own dropout


def test_bits_are_compared_and_not_numbers() -> None:
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert differing([nan, zero, None], [nan.clone(), zero.clone(), None]) == 0
    assert differing([zero, zero, zero], [-zero, None, zero.double()]) == 3


def test_an_adapted_block_trains_only_what_was_added() -> None:
    block = adapt(Block(32, 0.0))
    assert {name.rpartition(".")[0].rpartition(".")[2] for name, p in block.named_parameters() if p.requires_grad} == {
        "down",
        "up",
    }


def test_unequal_gradients_leave_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(stage: Stage) -> None:
        raise UnequalGradientsError("1 of 2 gradients of ours and theirs are not equal")

    monkeypatch.setattr("backhaul_lab.bench.tenants.measure", measure)
    outcomes = child.measure("tenants", Stage.of(0, 1, os.getpid()))
    assert [outcome.name for outcome in outcomes] == ["tenants", "tenants_fair"]
    assert all(outcome.verdict == "failed" and outcome.value is None for outcome in outcomes)
    assert is_failed(outcomes)


def test_a_group_that_breaks_fails_its_own_figures_only() -> None:
    def run_group(group: str, cores: Sequence[int], pace: float) -> list[object]:
        if group == "growth":
            raise RuntimeError("the worker is gone")
        return [of_counts("peak_flat", [1.01])] if group == "peak_flat" else []

    outcomes = command.measure(chosen(["growth", "peak_flat", "wire_over_bound"]), [0, 1], run_group)  # type: ignore[arg-type]
    assert {outcome.name: outcome.verdict for outcome in outcomes} == {
        "peak_flat": "reached",
        "growth": "failed",
        "wire_over_bound": "failed",
    }


@pytest.mark.slow
def test_a_group_whose_process_fails_says_the_last_line_of_its_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "GROUPS", {"unknown": Group("")})
    core = min(os.sched_getaffinity(0))
    with pytest.raises(RuntimeError, match="^KeyError: 'unknown'$"):
        command.run_group("unknown", [core, core], 1.0)
    assert "Traceback" in capsys.readouterr().err


def test_figures_share_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.0, 600.0, 2 * command.WHOLE_S])
    monkeypatch.setattr(command, "monotonic", lambda: next(times))
    seconds = {"peak_flat": 700, "growth": 280, "wire": 20}
    monkeypatch.setattr(command, "GROUPS", {name: Group("", nominal_s) for name, nominal_s in seconds.items()})
    paces: dict[str, float] = {}

    def run_group(group: str, cores: Sequence[int], pace: float) -> list[Outcome]:
        paces[group] = pace
        return []

    command.measure(chosen(["peak_flat", "growth", "wire_over_bound"]), [0, 1], run_group)
    assert paces == {"peak_flat": 0.84, "wire": 240 / 300, "growth": 0.0}


def test_a_hurried_measurement_ends_earlier_but_has_a_round_after_all_warm_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(PACE, "0.0")
    values = iter([(1.0, True), (2.0, True), (3.0, True), (4.0, True)])
    rounds = interleave([Alternative("a", lambda: 1.0)], [], Plan(warm=3), measured=lambda *_: next(values))
    assert rounds.measured == [({"a": 4.0}, True)]


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(argv)


def test_the_json_has_each_figure_under_its_name_with_its_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes_of = {
        "wire": [of_counts("wire_over_bound", [1.5, 1.4, 1.6], "a note", {"bound_bytes": 10.0})],
        "shared_memory": [without_value("shm_vs_memcpy", Verdict.UNAVAILABLE, "not here")],
    }
    monkeypatch.setattr(command, "run_group", lambda group, cores, pace: outcomes_of[group])
    monkeypatch.setattr(command, "two_cores", lambda: [0, 1])
    file = tmp_path / "results.json"
    assert command.run(arguments("--only", "wire_over_bound", "shm_vs_memcpy", "--json", str(file))) == 0

    results = json.loads(file.read_text())
    assert list(results["figures"]) == ["wire_over_bound", "shm_vs_memcpy"]
    assert results["figures"]["wire_over_bound"] == {
        "what": "bytes that travelled / the least that must",
        "kind": "at_most",
        "limit": 1.02,
        "verdict": "missed",
        "value": 1.5,
        "low": 1.4,
        "high": 1.6,
        "undisturbed": 3,
        "dropped": 0,
        "note": "a note",
        "details": {"bound_bytes": 10.0},
    }
    assert results["figures"]["shm_vs_memcpy"]["value"] is None
    assert {"cpu", "cores", "memory_bytes", "trainer_core", "worker_core"} <= set(results["hardware"])
    assert {"python", "kernel", "torch", "grpcio", "backhaul"} <= set(results["versions"])
    assert results["format"] == 1
    assert "T" in results["date"]
    shown = capsys.readouterr().out
    assert "wire_over_bound" in shown
    assert "<= 1.02" in shown
    assert "unavailable" in shown


@pytest.mark.parametrize("argv", [["--only", "nothing"], ["--json", "/no/such/folder/results.json"]])
def test_what_can_not_be_done_is_said_before_anything_is_measured(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "two_cores", lambda: [0, 1])
    assert command.run(arguments(*argv)) == 2
    assert "backhaul bench:" in capsys.readouterr().err


def test_the_results_that_are_committed_can_be_read() -> None:
    folder = Path(__file__).parents[2] / "lab" / "results"
    files = sorted(folder.glob("*.json"))
    assert files
    for file in files:
        results = json.loads(file.read_text())
        if file.stem.endswith("-demo"):  # of `backhaul demo`, see tests/contract/test_measured.py
            continue
        assert results["figures"].keys() <= {figure.name for figure in FIGURES}
        verdicts = {verdict.value for verdict in Verdict}
        assert all(figure["verdict"] in verdicts for figure in results["figures"].values())


def test_the_command_and_the_clients_without_torch_do_not_import_it() -> None:
    modules = "backhaul_lab.bench.command, backhaul_lab.bench.bare, backhaul_lab.bench.tenant_client"
    said = subprocess.run(
        [sys.executable, "-c", f"import sys, {modules}; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == "False"


def test_without_an_accelerator_its_figures_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args(["--device", "cuda"])) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_an_accelerator_has_the_figures_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    figures = command._on_device(chosen([]), "cuda")
    assert {figure.group for figure in figures} == {name for name, group in GROUPS.items() if group.on_cuda}
    with pytest.raises(ValueError, match="is measured on cuda"):
        command._on_device(chosen(["tenants"]), "cuda")


@pytest.mark.parametrize("name", ["bench", "experiment", "plan", "simulate"])
@pytest.mark.parametrize("arguments", [[], ["--help"], ["--json=file", "--", "--version"]])
def test_without_the_lab_its_commands_name_its_extra(
    name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("backhaul._cli.registry.entry_points", lambda **_: ())
    with pytest.raises(SystemExit, match="2"):
        main([name, *arguments])
    assert capsys.readouterr().err.endswith(f"backhaul {name} needs pip install 'backhaul[lab]'\n")
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "needs pip install 'backhaul[lab]'" in capsys.readouterr().out

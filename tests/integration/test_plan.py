"""`backhaul plan`: from a model to a file, and from the file to a session."""

import json
import tomllib
from pathlib import Path

import pytest
import torch

import backhaul
from backhaul._cli.main import main
from support.example_models import Layer, plain
from support.processes import WorkerProcess

MODEL = "support.example_models:plain"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", "--rounds", "1", *arguments])
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err
    return code, said.out, said.err


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "plan.toml"


def test_plans_are_predicted_and_the_best_is_written(
    worker: WorkerProcess, capsys: pytest.CaptureFixture[str], output: Path
) -> None:
    path = output.with_suffix(".json")
    arguments = ["--worker", worker.address, "--model", MODEL, "--micro-batches", "4", "--output", str(output)]
    code, said, _ = run(capsys, "--budget", "1GiB", *arguments, "--json", str(path))
    assert code == 0
    assert "support.example_models:plain has 4 layers." in said
    plans = json.loads(path.read_text())["plans"]
    assert {plan["kind"] for plan in plans} == {"plain", "torch", "blocking", "deferred"}
    assert all(0 < plan["step_s"] < 60 and plan["peak_bytes"] > 0 and plan["fits"] for plan in plans)
    # These layers are so small that recording takes longer than recomputing them.
    assert "It fits, and no worker makes training faster. No plan was written." in said
    assert not output.exists()


@pytest.mark.nightly
def test_nothing_fits_into_too_small_a_budget(
    worker: WorkerProcess, capsys: pytest.CaptureFixture[str], output: Path
) -> None:
    arguments = ["--worker", worker.address, "--model", MODEL, "--output", str(output)]
    code, said, _ = run(capsys, "--budget", "1KiB", *arguments)
    assert (code, "Nothing fits into 1 KiB." in said) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--budget", "1GiB", "--model", "support.example_models:broken"], "the model raised RuntimeError"),
        (["--budget", "1GiB", "--model", "support.example_models:custom"], "the custom autograd function Scale"),
        (["--budget", "1GiB", "--model", MODEL, "--output", "/missing/plan.toml"], "not writable"),
    ],
)
def test_what_cannot_be_planned_is_explained(
    worker: WorkerProcess, capsys: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    code, _, error = run(capsys, "--worker", worker.address, *arguments)
    assert (code, why in error) == (2, True), error


def test_a_session_trains_by_its_plan(worker: WorkerProcess, output: Path) -> None:
    from backhaul.doctor.profile.target import Target
    from backhaul_lab.plan import text
    from backhaul_lab.plan.candidates import Candidate
    from backhaul_lab.plan.memory import Peak
    from backhaul_lab.plan.search import PredictedPlan
    from backhaul_lab.plan.workers import PlannedWorker

    planned = PlannedWorker(worker.address, 1.0, 1 << 30)
    candidate = Candidate("deferred", 2, kept_layers=1, boundaries="derive", local="keep", workers=(planned,))
    plan = PredictedPlan(candidate, 0.25, Peak(1 << 20, 2 << 20, 3 << 20))
    text.write(output, plan, {"model": MODEL, "micro_batches": 2}, 1 << 10)
    assert tomllib.loads(output.read_text())["prediction"]["peak_bytes"] == (1 << 20) + (1 << 10)
    said = text.advice(plan, output, Target("mine:example", Layer(8), lambda: torch.zeros(()), (Layer,)))
    assert "session.accumulate()" in said
    assert "session.wrap(model, Layer)" in said
    model, x = plain(layers=5)
    with backhaul.connect(plan=output, settings=backhaul.Settings(silence_s=240)) as session:
        assert (session.workers, session.config.local) == (worker.address, "keep")
        session.wrap(model, Layer)
        for _ in range(2):
            with session.accumulate() as step:
                for micro_batch in x.chunk(2):
                    step.backward(model(micro_batch).sum())
            model.zero_grad()
        # Four layers are segments at first, then two segments of two layers; the last layer is kept.
        calls = {segment.name: segment.calls for segment in session.report().segments}
        assert 0 < calls["Layer"] <= 4 + 3 * 2


def test_the_settings_of_a_plan_reach_backhaul_wrap(worker: WorkerProcess) -> None:
    model, x = plain(layers=4)
    with backhaul.connect(worker.address, settings=backhaul.Settings(segment_layers=4, silence_s=240)) as session:
        backhaul.wrap(model, Layer)
        for _ in range(2):
            model(x).sum().backward()
        assert session.report().segments[0].calls == 4 + 1

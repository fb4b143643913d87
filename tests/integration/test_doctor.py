"""`backhaul doctor`: what it says of good and of bad installations, workers and models."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from backhaul._cli.main import main
from backhaul._config import Config
from backhaul.doctor.advice import Surroundings, machine_check, model_checks, verdict
from backhaul.doctor.check import Check
from backhaul.doctor.installation import connection_checks
from backhaul.doctor.profile.costs import PlainProfile, SegmentTimes
from backhaul.doctor.profile.disturbance import Times, disturbed_share
from backhaul.doctor.profile.link import LinkProfile
from backhaul.doctor.profile.measurement import WorkerProfile
from backhaul.doctor.profile.thread_times import ThreadTimes
from backhaul_runtime.replay.schedule import Footprint
from backhaul_runtime.version import version
from backhaul_server.commands import certificates
from support.processes import WorkerProcess

ORDER = ["share", "speed", "segment length", "worker memory", "recording", "weights", "alternative"]
CONNECTION = ["installation", "machine", "worker", "versions", "numerics", "encryption", "link", "memory"]
GIB = 1 << 30
GBIT = 1e9 / 8


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["doctor", "--rounds", "1", *arguments])
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err
    return code, said.out, said.err


@pytest.mark.parametrize(
    "model",
    [
        "with_keywords_and_loss",
        *[pytest.param(model, marks=pytest.mark.nightly) for model in ("plain", "lora", "of_experiment")],
    ],
)
def test_a_model_that_travels(
    worker: WorkerProcess, capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str
) -> None:
    path = tmp_path / "checks.json"
    name = f"support.example_models:{model}"
    code, said, progress = run(capsys, "--worker", worker.address, "--model", name, "--json", str(path))
    assert (code, "No check failed." in said) == (0, True)
    assert said.splitlines()[-1].startswith("Verdict: with ")
    assert f"measuring segments of 1 of 4 layers on worker {worker.address} ...\n" in progress
    checks = json.loads(path.read_text())["checks"]
    assert [check["name"] for check in checks] == CONNECTION + ORDER
    assert checks[len(CONNECTION)]["values"]["share"] == 1.0
    assert all(check["text"].endswith(".") for check in checks)
    recording = checks[len(CONNECTION) + ORDER.index("recording")]["values"]
    assert {"recorded_s", "graphs_s"} <= recording.keys()
    assert recording["compile_s"] > 0


def test_without_a_worker_and_a_model_it_starts_a_worker(capsys: pytest.CaptureFixture[str]) -> None:
    code, said, _ = run(capsys)
    assert code == 0
    assert "started for these checks" in said
    assert "the worker computes four linear layers" in said


@pytest.mark.parametrize(("model", "share", "code"), [("custom", "0 of 2", 1), ("partly_custom", "1 of 3", 0)])
def test_the_library_that_blocks_segments_is_named(
    worker: WorkerProcess, capsys: pytest.CaptureFixture[str], model: str, share: str, code: int
) -> None:
    exit_code, said, _ = run(capsys, "--worker", worker.address, "--model", f"support.example_models:{model}")
    assert exit_code == code
    assert f"share: {share} segments run on the worker" in said
    assert "the custom autograd function Scale of support (a worker with --allow support.example_models:Scale" in said
    assert ("1 of 9 checks failed: share." in said) == bool(code)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("support.example_models", 'must be "module:function"'),
        ("support.nowhere:plain", "no module named 'support.nowhere'"),
        ("support.example_models:nowhere", "has no function 'nowhere'"),
        ("support.example_models:raising", "the function raised KeyError: 'config'"),
        ("support.example_models:nothing", "returned a NoneType, not a module and an example batch"),
        ("support.example_models:broken", "the model raised RuntimeError: the shapes do not fit"),
        ("support.example_models:without_layers", "the model has no segments"),
        ("support.example_models:without_gradients", "returned nothing that can be differentiated"),
    ],
)
def test_a_model_that_cannot_be_used_is_explained(
    worker: WorkerProcess, capsys: pytest.CaptureFixture[str], model: str, why: str
) -> None:
    code, _, error = run(capsys, "--worker", worker.address, "--model", model)
    assert code == 2
    assert why in error
    assert f"--model {model}" in error


def test_options_that_cannot_be_used_are_explained(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = "support.example_models:plain"
    code, _, error = run(capsys, "--worker", "nonsense")
    assert (code, error.startswith('backhaul doctor: the address "nonsense" can\'t be read: write')) == (2, True)
    assert "is not NAME=VALUE" in run(capsys, "--model", model, "--argument", "layers")[2]
    assert "no module of the class Nothing" in run(capsys, "--model", model, "--layers", "Nothing")[2]
    assert "unexpected keyword argument" in run(capsys, "--model", model, "--argument", "depth=3")[2]
    assert "not writable" in run(capsys, "--json", str(tmp_path / "missing/checks.json"))[2]
    assert "can't be read" in run(capsys, "--worker", "127.0.0.1:1", "--token-file", str(tmp_path / "token"))[2]


def test_a_worker_that_does_not_answer_is_a_failed_check(capsys: pytest.CaptureFixture[str]) -> None:
    code, said, _ = run(capsys, "--worker", "127.0.0.1:1")
    assert code == 1
    assert 'FAILED  worker: no worker answers at "127.0.0.1:1"' in said
    assert "1 of 2 checks failed: worker." in said


@pytest.mark.nightly
def test_a_wrong_token_is_a_failed_check(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("the-token-of-this-worker\n")
    wrong.write_text("the-token-of-another-worker\n")
    for file in (right, wrong):
        file.chmod(0o600)
    with WorkerProcess("--memory", "512MiB", "--token-file", str(right)) as process:
        code, said, _ = run(capsys, "--worker", process.address, "--token-file", str(wrong))
        assert code == 1
        assert "FAILED  worker: " in said
        assert "token" in said
        assert run(capsys, "--worker", process.address, "--token-file", str(right))[0] == 0


@pytest.mark.nightly
def test_a_wrong_authority_is_a_failed_check(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    certificates.make(tmp_path / "right", ["localhost", "127.0.0.1"], 30)
    certificates.make(tmp_path / "wrong", ["localhost", "127.0.0.1"], 30)
    files = tmp_path / "right/worker"
    options = ["--tls-cert", str(files / "tls.crt"), "--tls-key", str(files / "tls.key"), "--tls-ca"]
    with WorkerProcess("--memory", "512MiB", *options, str(files / "ca.crt")) as process:
        code, said, _ = run(capsys, "--worker", process.address, "--tls", str(tmp_path / "wrong/trainer"))
        assert code == 1
        assert "refuse each other" in said
        assert run(capsys, "--worker", process.address, "--tls", str(tmp_path / "right/trainer"))[0] == 0


@pytest.mark.nightly
def test_it_is_a_command_with_its_modules_beside_it(worker: WorkerProcess, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n\ndef example():\n"
        "    layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(2)]\n"
        "    return torch.nn.Sequential(torch.nn.Sequential(*layers)), torch.ones(1, 8)\n"
    )
    command = [sys.executable, "-m", "backhaul", "doctor", "--worker", worker.address, "--model", "mine:example"]
    done = subprocess.run([*command, "--rounds", "1"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, "No check failed." in done.stdout) == (0, True), done.stdout + done.stderr


PLAIN = PlainProfile(
    layers=8,
    forward_s=0.01,
    backward_s=0.02,
    outside_forward_s=0.0,
    outside_backward_s=0.0,
    boundary_bytes=1 << 20,
    saved_bytes=17 << 20,
    outside_bytes=0,
    transient_bytes=1 << 20,
    trained_bytes=1 << 20,
    frozen_bytes=0,
    model_bytes=8 << 20,
    gradient_bytes=8 << 20,
    trained_parameters=2 << 20,
    tokens=1024,
    footprint=Footprint(18 << 20, 18 << 20, 20 << 20),
)
TIMES = SegmentTimes(1, 8, 0.001, 0.01, 0.02, 0.0, 0.0, 8, {})
LINK = LinkProfile(10 * GBIT, 10 * GBIT, 1e-4, True)
WORKER = WorkerProfile("gpu-box:50051", version(), GIB, {}, LINK, (TIMES,))
AROUND = Surroundings(24 << 20, 0.0)


def checks_of(worker: WorkerProfile, plain: PlainProfile = PLAIN, around: Surroundings = AROUND) -> dict[str, Check]:
    return {check.name: check for check in model_checks(plain, worker, around)}


def test_a_good_worker_has_no_notes() -> None:
    checks = checks_of(replace(WORKER, memory_bytes=200 << 20))
    assert {name: check.state for name, check in checks.items()} == dict.fromkeys(ORDER, "ok")


def test_data_parallelism_is_better_if_the_model_fits_on_both_machines() -> None:
    fast = replace(WORKER, segment_times=(replace(TIMES, replay_s=0.002, replay_backward_s=0.004),))
    check = checks_of(fast)["alternative"]
    assert check.state == "note"
    assert check.todo.startswith("Use DistributedDataParallel")
    assert "DistributedDataParallel" not in checks_of(replace(fast, memory_bytes=24 << 20))["alternative"].text


def test_a_slow_worker_is_told_to_defer() -> None:
    slow = replace(WORKER, segment_times=(replace(TIMES, replay_s=0.03, replay_backward_s=0.06),))
    check = checks_of(slow)["speed"]
    assert check.state == "note"
    assert "0.33 times as fast" in check.text and "needs 0.75" in check.text
    assert "session.accumulate()" in check.todo


def test_a_thin_link_needs_long_segments_or_derived_boundaries() -> None:
    def of_link(rate: float) -> Check:
        return checks_of(replace(WORKER, link=LinkProfile(rate, rate, 1e-3, True)))["segment length"]

    assert of_link(40e6).todo == "Use segment_layers=3."
    assert 'boundaries="derive"' in of_link(1e6).todo


def test_memory_of_the_worker() -> None:
    assert checks_of(replace(WORKER, memory_bytes=30 << 20))["worker memory"].todo.startswith(
        "Give it a larger --memory"
    )
    assert checks_of(replace(WORKER, memory_bytes=1 << 20))["worker memory"].state == "failed"


def test_weights_need_tokens() -> None:
    thin = replace(WORKER, link=LinkProfile(10e6, 10e6, 1e-3, True))
    check = checks_of(thin)["weights"]
    assert check.values["tokens"] == pytest.approx(2 * (8 << 20) / 10e6 / (3 * 0.08 / 1024))
    assert "Accumulate 7 micro-batches" in check.todo


def test_graphs_are_recommended_if_they_cost_less_than_recording() -> None:
    def advice(graphs_s: float, remote: int = TIMES.remote) -> Check:
        graphs = replace(TIMES, record_s=graphs_s, remote=remote)
        recorded = replace(TIMES, record_s=0.02)
        return checks_of(replace(WORKER, segment_times=(recorded,), graph_times=graphs, compile_s=1.5))["recording"]

    assert advice(0.002).todo == 'Use connect(graphs="eager").'
    assert "adds 2.00 ms instead of 20.00 ms, once torch.compile has taken 1.5 s" in advice(0.002).text
    assert advice(0.002).values["graphs_s"] == 0.002
    assert "graphs" not in advice(0.019).todo
    assert "graphs" not in advice(0.002, remote=0).todo


@pytest.mark.parametrize(
    ("record_s", "disturbed", "said"),
    [
        (
            0.001,
            0.0,
            "so this worker pays. The trainer would keep 9 MiB of the layers' activations, and 136 MiB without",
        ),
        (0.1, 0.0, "so this worker does not pay."),
        (0.001, 0.2, "The machine was busy, so this is a guess."),
    ],
)
def test_the_verdict_names_time_and_memory(record_s: float, disturbed: float, said: str) -> None:
    worker = replace(WORKER, segment_times=(replace(TIMES, record_s=record_s),))
    text = verdict(PLAIN, [machine_check(disturbed), *model_checks(PLAIN, worker, AROUND)])
    assert said in text
    assert ("guess" in text) == (disturbed > 0)


def test_a_model_that_stays_has_a_verdict() -> None:
    stays = replace(WORKER, segment_times=(replace(TIMES, remote=0, reasons={"a custom function": 8}),))
    assert "no segment of this model runs" in verdict(PLAIN, [machine_check(0.0), *model_checks(PLAIN, stays, AROUND)])


def test_other_programs_are_a_note() -> None:
    check = machine_check(0.23)
    assert (check.state, "23%" in check.text) == ("note", True)
    assert machine_check(0.04).state == "ok"


@pytest.mark.parametrize(
    ("busy_s", "delayed_s", "share"),
    [
        (10.0, 2.5, 0.2),  # others ran for 10 seconds without our 10, so they may have delayed us all that time
        (1.0, 2.5, 0.08),  # they ran for one second, so our own threads were the others
        (0.0, 2.5, 0.0),
        (10.0, 0.0, 0.0),
    ],
)
def test_only_others_disturb_a_measurement(busy_s: float, delayed_s: float, share: float) -> None:
    before = Times(100.0, {1: {1: ThreadTimes(5.0, 1.0)}})
    after = Times(100.0 + 10.0 + busy_s, {1: {1: ThreadTimes(15.0, 1.0 + delayed_s)}})
    assert disturbed_share(before, after) == pytest.approx(share)


def test_a_fast_link_to_the_host_is_better() -> None:
    recording = replace(WORKER, segment_times=(replace(TIMES, record_s=0.03),), memory_bytes=40 << 20)
    check = checks_of(recording, around=replace(AROUND, host_bytes_per_s=25e9))["alternative"]
    assert "offloading" in check.todo
    here = replace(recording, link=replace(LINK, crosses_network=False), segment_times=(replace(TIMES, record_s=0.04),))
    assert "offload=True" in checks_of(here, around=replace(AROUND, host_bytes_per_s=1e6))["alternative"].todo


def states_of(worker: WorkerProfile, tls: str = "") -> dict[str, Check]:
    config = Config(worker="gpu-box:50051", tls=tls)
    return {check.name: check for check in connection_checks(worker, config)}


def test_another_build_of_torch_is_a_failed_check() -> None:
    checks = states_of(replace(WORKER, differences={"torch": ("2.13.0 a", "2.12.0 b"), "build": ("2.13.0", "2.12.0")}))
    assert checks["numerics"].state == "failed"
    assert "torch (2.13.0 a here, 2.12.0 b there)" in checks["numerics"].text
    checks = states_of(replace(WORKER, differences={"cpu": ("Intel", "AMD")}))
    assert checks["numerics"].state == "note"


def test_what_is_noted_of_a_connection() -> None:
    checks = states_of(replace(WORKER, version="0.0.9", link=None))
    assert checks["versions"].state == "note"
    assert checks["link"].state == "failed"
    assert "not encrypted" in checks["encryption"].text
    assert "uses TLS" in states_of(WORKER, tls="certificates/trainer")["encryption"].text

"""Commands on a machine with an accelerator: `backhaul demo --device cuda` and `backhaul doctor`."""

import json
from pathlib import Path

import pytest
import torch

from backhaul._cli.main import main
from integration.test_demo import VARIANTS, demo
from support.processes import WorkerProcess

pytestmark = pytest.mark.slow


def test_the_demo_is_remote_and_bitwise_equal(tmp_path: Path) -> None:
    process = demo("--device", "cuda", "--steps", "2", "--json", str(tmp_path / "results.json"))
    shown, said = process.communicate(timeout=500)
    assert process.returncode == 0, said
    assert "bitwise equal in all five" in shown
    results = json.loads((tmp_path / "results.json").read_text())
    assert [variant["name"] for variant in results["variants"]] == VARIANTS
    for variant in results["variants"]:
        assert (variant["segments_remote"] > 0) is variant["name"].startswith("backhaul")


def test_the_doctor_measures_a_model_on_the_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "checks.json"
    model = ("--model", "support.example_models:plain")
    with WorkerProcess("--memory", "1GiB", "--device", "cuda") as worker, torch.device("cuda"):
        code = main(["doctor", "--rounds", "1", "--worker", worker.address, "--json", str(path), *model])
    said = capsys.readouterr()
    assert (code, "Traceback" in said.out + said.err) == (0, False), said.out
    checks = {check["name"]: check for check in json.loads(path.read_text())["checks"]}
    assert checks["share"]["values"]["share"] == 1.0

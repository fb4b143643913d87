"""examples/integrations/with_llama_factory.py."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

import backhaul
from support.cuda_builds import hide_cuda_builds
from support.libraries import documented_share, example
from support.processes import WorkerProcess

hide_cuda_builds("torchaudio")
pytest.importorskip("llamafactory")


def test_the_example_trains_as_without_backhaul(worker: WorkerProcess) -> None:
    module = example("llama_factory")
    without, _ = module.train(None, remote=False)
    adapters, report = module.train(worker.address)
    assert without.keys() == adapters.keys()
    assert [name for name in without if not torch.equal(without[name], adapters[name])] == []
    assert any(adapter.any() for name, adapter in adapters.items() if "lora_B" in name)  # zero before the training
    assert report.travels >= documented_share("LLaMA-Factory `llama3_lora_sft.yaml`") >= 0.9
    assert report.remote > 0


def test_the_command_line_takes_a_yaml_file_and_the_environment(
    worker: WorkerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = example("llama_factory")
    module.prepare(tmp_path)
    (tmp_path / "config.yaml").write_text(json.dumps(module.arguments(tmp_path)))  # JSON is YAML too
    monkeypatch.setenv("BACKHAUL_WORKER", worker.address)
    monkeypatch.setattr(sys, "argv", ["llama_factory", str(tmp_path / "config.yaml"), "max_steps=1"])
    runpy.run_module("backhaul.integrations.llama_factory", run_name="__main__")
    session = backhaul.current_session()
    assert session.workers == worker.address
    assert session.report().remote > 0


@pytest.mark.parametrize("option", ["disable_gradient_checkpointing", "use_unsloth_gc", "use_unsloth"])
def test_arguments_without_gradient_checkpointing_are_an_error(option: str, tmp_path: Path) -> None:
    from backhaul.integrations.llama_factory import run

    with pytest.raises(ValueError, match=f"{option}: true"):
        run({**example("llama_factory").arguments(tmp_path), option: True})

"""examples/integrations/with_llama_factory.py."""

from pathlib import Path

import pytest
import torch

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
    assert report.travels >= documented_share("LLaMA-Factory `qwen3_lora_sft.yaml`") >= 0.9
    assert report.remote > 0


@pytest.mark.parametrize("option", ["disable_gradient_checkpointing", "use_unsloth_gc", "use_unsloth"])
def test_arguments_without_gradient_checkpointing_are_an_error(option: str, tmp_path: Path) -> None:
    from backhaul.integrations.llama_factory import run

    with pytest.raises(ValueError, match=f"{option}: true"):
        run({**example("llama_factory").arguments(tmp_path), option: True})

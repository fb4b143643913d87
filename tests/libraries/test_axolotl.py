"""examples/integrations/with_axolotl.py, and what the plugin does to a configuration."""

from pathlib import Path
from typing import Any

import pytest

from support.cuda_builds import hide_cuda_builds
from support.libraries import assert_trains_equally, documented_share
from support.processes import WorkerProcess

hide_cuda_builds()
pytest.importorskip("axolotl")
NAME = "backhaul.integrations.axolotl.BackhaulPlugin"
KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")


@pytest.mark.timeout(400)
def test_the_example_trains_as_without_backhaul(
    worker: WorkerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = assert_trains_equally("axolotl", worker.address)
    assert report.travels >= documented_share("Axolotl `lora-1b.yml`")


def registered(**settings: Any) -> Any:
    """A configuration after the plugin was registered with it."""
    from axolotl.utils.dict import DictDefault

    from backhaul.integrations.axolotl import BackhaulPlugin

    config = DictDefault({"plugins": [NAME], **settings})
    BackhaulPlugin().register(config)
    return config


def test_checkpointing_is_switched_on() -> None:
    assert registered().gradient_checkpointing is True


def test_lora_kernels_are_switched_off_unless_the_configuration_sets_one() -> None:
    assert [registered(adapter="qlora")[name] for name in KERNELS] == [False] * 4
    assert registered(adapter="lora", lora_o_kernel=True).lora_mlp_kernel is None
    assert registered().lora_mlp_kernel is None


@pytest.mark.parametrize(
    "settings", [{"gradient_checkpointing": False}, {"activation_offloading": True}, {"activation_offloading": "disk"}]
)
def test_a_configuration_without_checkpointing_is_an_error(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))}: "):
        registered(**settings)


def test_a_configuration_that_does_not_name_the_plugin_is_left_alone() -> None:
    from backhaul.integrations.axolotl import BackhaulPlugin

    config = registered(plugins=["other.Plugin"], activation_offloading=True)
    assert config.gradient_checkpointing is None
    assert BackhaulPlugin().add_callbacks_pre_trainer(config, None) == []


def test_the_options_are_those_of_the_callback() -> None:
    from backhaul.integrations.axolotl import BackhaulArgs, BackhaulPlugin

    assert BackhaulPlugin().get_input_args() == "backhaul.integrations.axolotl.BackhaulArgs"
    assert BackhaulArgs(backhaul={"worker": "gpu-box:1"}).backhaul == {"worker": "gpu-box:1"}
    config = registered(backhaul={"worker": "gpu-box:1", "if_nothing_travels": "warn", "strict": True})
    (callback,) = BackhaulPlugin().add_callbacks_pre_trainer(config, None)
    assert callback.session is None  # until the training begins

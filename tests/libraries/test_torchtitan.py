"""examples/integrations/with_torchtitan.py: torchtitan's own Trainer, on two ranks of a CPU."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import backhaul
from support.libraries import assert_ranks_train_equally, documented_share, example
from support.processes import WorkerProcess

pytest.importorskip("torchtitan")
UNCOMPILED = {"TORCH_COMPILE_DISABLE": "1"}
"""FlexAttention and its masks are compiled, which takes longer than everything else, and has no backward on a CPU."""


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The example's module, in a process that is the only rank."""
    rank = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    importlib.import_module("support.torchtitan_on_cpu")
    return example("torchtitan")


@pytest.mark.timeout(400)
def test_the_trainer_trains_as_without_backhaul(
    worker: WorkerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    share = assert_ranks_train_equally("torchtitan", worker.address, tmp_path, UNCOMPILED)
    assert share >= documented_share("torchtitan `llama3_debugmodel`")


def test_compiled_blocks_are_segments(on_cpu: ModuleType, worker: WorkerProcess) -> None:
    from backhaul.integrations.torchtitan import BackhaulAC
    from support.compiled import WIDTH, Block

    model = with_layers(Block())
    policy = BackhaulAC.Config(worker=worker.address).build()
    with policy.session:
        policy.apply(model)
        model.layers["0"].compile(backend="backhaul", fullgraph=True)
        for _ in range(2):
            model(torch.randn(2, WIDTH, requires_grad=True)).sum().backward()
        report = policy.session.report()
    assert report.remote == 2
    assert sum(segment.known for segment in report.segments) == 1


def test_parts_of_a_pipeline_share_a_session(on_cpu: ModuleType, worker: WorkerProcess) -> None:
    from backhaul.integrations.torchtitan import BackhaulAC

    config = BackhaulAC.Config(worker=worker.address, arguments={"settings": backhaul.Settings(silence_s=60.0)})
    first, second = config.build(), config.build()
    assert first.session is second.session
    first.session.close()
    third = config.build()
    assert third.session is not first.session
    third.session.close()


def test_names_stay_the_same(on_cpu: ModuleType, worker: WorkerProcess) -> None:
    from backhaul.integrations.torchtitan import BackhaulAC

    model = with_layers(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    before = [name for name, _ in model.named_parameters()]
    policy = BackhaulAC.Config(worker=worker.address).build()
    with policy.session:
        policy.apply(model)
    assert [name for name, _ in model.named_parameters()] == before == list(model.state_dict())


def test_a_model_of_which_nothing_travels_is_an_error_in_the_first_forward(
    on_cpu: ModuleType, worker: WorkerProcess
) -> None:
    from backhaul.integrations.torchtitan import BackhaulAC
    from support.calls import TimesOne

    class Custom(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return TimesOne.apply(x)

    policy = BackhaulAC.Config(worker=worker.address).build()
    with policy.session:
        model = with_layers(Custom())
        policy.apply(model)
        with pytest.raises(backhaul.NotRemoteError, match="custom autograd function TimesOne"):
            model(torch.randn(2, 4, requires_grad=True))


def test_the_configuration_goes_through_the_command_line(on_cpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.config import ConfigManager

    from backhaul.integrations.torchtitan import BackhaulAC, MaskedAttention

    config: Any = ConfigManager().parse_args(
        ["--module", "with_torchtitan", "--config", "llama3", "--training.steps=3"]
    )
    assert config.training.steps == 3
    assert isinstance(config.activation_checkpoint, BackhaulAC.Config)
    assert config.training.disable_cuda_graphs
    assert isinstance(config.model_spec.model.layers[0].attention.inner_attention, MaskedAttention.Config)
    assert config.to_dict()["activation_checkpoint"]["if_nothing_travels"] == "raise"


@pytest.mark.parametrize("heads_of_keys", [4, 2])
@pytest.mark.parametrize("mask", ["causal", "documents", "window"])
def test_masked_attention_computes_what_flex_attention_does(mask: str, heads_of_keys: int, on_cpu: ModuleType) -> None:
    from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention
    from torchtitan.models.common import attention

    from backhaul.integrations.torchtitan import MaskedAttention

    tokens = 12
    positions = torch.tensor([[*range(5), *range(7)], [*range(tokens)]])
    documents = and_masks(attention.get_causal_mask_mod(), attention.get_document_mask_mod(positions))
    mods = {
        "causal": attention.get_causal_mask_mod(),
        "documents": documents,
        "window": attention.get_sliding_window_mask_mod(3),
    }
    block_mask = create_block_mask(mods[mask], 2, None, tokens, tokens, device="cpu")
    query = torch.randn(2, tokens, 4, 8)
    key, value = torch.randn(2, 2, tokens, heads_of_keys, 8)
    ours = MaskedAttention.Config().build()(
        query, key, value, attention_masks=block_mask, enable_gqa=heads_of_keys != 4
    )
    expected = flex_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), block_mask=block_mask, enable_gqa=True
    )
    torch.testing.assert_close(ours, expected.transpose(1, 2))


def test_a_changed_score_is_an_error(on_cpu: ModuleType) -> None:
    from backhaul.integrations.torchtitan import MaskedAttention

    x = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match="score_mod or out_transform"):
        MaskedAttention.Config().build()(x, x, x, attention_masks=None, score_mod=lambda score, *_: score)


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def with_layers(*layers: torch.nn.Module) -> Layers:
    """A model of the form that torchtitan's policies expect."""
    model = Layers()
    model.layers.update({str(number): layer for number, layer in enumerate(layers)})
    return model

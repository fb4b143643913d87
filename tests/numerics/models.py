"""Architectures that people train, tiny and with random weights: what a step is, and which layers are segments.

transformers and diffusers are imported where a model is built, so that only the tests of models pay for them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from backhaul import Decision


@dataclass(frozen=True)
class Family:
    """An architecture.

    Attributes:
        build: Makes a model in training mode.
        step: Draws a batch and returns the loss.
        segments: Classes of the layers that are segments, and how often a step calls them.
        draws: Whether a forward draws random numbers, which is whether it has dropout.
        keeps: What of a segment's inside is used outside, so that it returns activations when asked for gradients.
        kept: Why the trainer keeps its segments' activations, as the report says it.
        further: Calls of layers that return what others of their outputs follow from: backward goes through each in two
            stages.
        autocast: The step runs under bfloat16 autocast.
        kinds: How many kinds of calls a step has with graphs="eager". Equal layers mostly have one.
        recorded: Why all of these calls are recorded, as the report begins to say it; empty if they are known.
    """

    build: Callable[[], nn.Module]
    step: Callable[[nn.Module], Tensor]
    segments: Mapping[str, int]
    draws: bool = True
    keeps: str = ""
    kept: str = ""
    further: Mapping[str, int] = field(default_factory=dict)
    autocast: bool = False
    kinds: int = 1
    recorded: str = ""

    def decisions(self, returns: str) -> dict[str, dict[Decision, int]]:
        """What becomes of its segments, by layer. What is kept may have a part that the trainer recomputes."""
        if self.kept:
            return {layer: {Decision.KEPT: calls, Decision.TRAINER: calls} for layer, calls in self.segments.items()}
        if returns == "activations" or self.keeps:
            return {layer: {Decision.ACTIVATIONS: calls} for layer, calls in self.segments.items()}
        return {layer: {Decision.GRADIENTS: n + self.further.get(layer, 0)} for layer, n in self.segments.items()}

    def returned(self, returns: str) -> str:
        """What the documentation says of its segments."""
        if self.kept:
            return "kept"
        return "activations" if self.keeps else returns

    def loss(self, model: nn.Module) -> Tensor:
        """A step's forward."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return self.step(model)


_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_LABELS: dict[str, Any] = {"num_labels": 5}
# Else a layer writes keys and values into a cache, for generation.
_FOR_TRAINING: dict[str, Any] = {"use_cache": False}
_DECODER: dict[str, Any] = {**_SIZES, **_FOR_TRAINING, "num_key_value_heads": 2, "attention_dropout": 0.1}


def _llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**_DECODER, **options}))


def _llama_with_cache() -> nn.Module:
    return _llama(use_cache=True)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=32, **_FOR_TRAINING)
    return GPT2LMHeadModel(config)


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**_SIZES, max_position_embeddings=32))


def _albert() -> nn.Module:
    from transformers import AlbertConfig, AlbertForMaskedLM

    dropout: dict[str, Any] = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    return AlbertForMaskedLM(AlbertConfig(**_SIZES, **dropout, embedding_size=16, max_position_embeddings=32))


def _bloom() -> nn.Module:
    from transformers import BloomConfig, BloomForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    dropout: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    return BloomForCausalLM(BloomConfig(**sizes, **dropout, **_FOR_TRAINING))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    tokens: dict[str, Any] = {"pad_token_id": 0, "decoder_start_token_id": 0}
    sizes: dict[str, Any] = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, **tokens, **_FOR_TRAINING))


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {name: size for name, size in _SIZES.items() if name != "vocab_size"}
    dropout: dict[str, Any] = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    return ViTForImageClassification(ViTConfig(**sizes, **dropout, **_LABELS, image_size=16, patch_size=8))


def _mixtral(**options: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**_DECODER, **options, num_local_experts=4, num_experts_per_tok=2))


def _mixtral_with_router_loss() -> nn.Module:
    return _mixtral(output_router_logits=True)


def _resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], **_LABELS)
    return ResNetForImageClassification(config)


def _mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=96, hidden_size=32, state_size=4, num_hidden_layers=2, **_FOR_TRAINING)
    return MambaForCausalLM(config)


def _unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    model: Any = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=8,
        norm_num_groups=8,
        dropout=0.1,
    )
    return model


def _text(model: nn.Module) -> Tensor:
    """Two sequences, the second padded."""
    ids = torch.randint(3, 96, (2, 8))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss


def _translation(model: nn.Module) -> Tensor:
    ids = torch.randint(3, 96, (2, 8))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return model(input_ids=ids, attention_mask=mask, labels=torch.randint(3, 96, (2, 6))).loss


def _images(model: nn.Module) -> Tensor:
    return model(pixel_values=torch.randn(2, 3, 16, 16), labels=torch.tensor([1, 3])).loss


def _denoising(model: nn.Module) -> Tensor:
    noisy, noise = torch.randn(2, 2, 4, 8, 8)
    prompt = torch.randn(2, 5, 16)
    predicted = model(noisy, torch.tensor([3, 700]), encoder_hidden_states=prompt).sample
    return functional.mse_loss(predicted.float(), noise)


_UNET_BLOCKS = ("DownBlock2D", "CrossAttnDownBlock2D", "UNetMidBlock2DCrossAttn", "CrossAttnUpBlock2D", "UpBlock2D")

FAMILIES: dict[str, Family] = {
    "Llama": Family(_llama, _text, {"LlamaDecoderLayer": 2}),
    "Llama, use_cache": Family(
        _llama_with_cache,
        _text,
        {"LlamaDecoderLayer": 2},
        keeps="the cache keeps keys and values",
        recorded="the graph of its inside stays on the trainer",
    ),
    "GPT-2": Family(_gpt2, _text, {"GPT2Block": 2}),
    "BLOOM": Family(
        _bloom,
        _text,
        {"BloomBlock": 2},
        kept="the custom autograd function GeLUFunction of transformers (a worker with --allow "
        "transformers.models.bloom.modeling_bloom:GeLUFunction would run it)",
        recorded="torch.compile cannot capture it whole: the graph holds autograd_function_apply",
    ),
    "BERT": Family(_bert, _text, {"BertLayer": 2}),
    "BERT, bf16 autocast": Family(_bert, _text, {"BertLayer": 2}, autocast=True),
    # One layer's weights in two segments.
    "ALBERT": Family(_albert, _text, {"AlbertLayer": 2}, kinds=2),
    # Two encoder and two decoder blocks; all of a stack share a position bias, the decoder's the encoder's states. The
    # first of each stack makes the bias and returns it.
    "T5": Family(_t5, _translation, {"T5Block": 4}, further={"T5Block": 2}, kinds=4),
    "T5, bf16 autocast": Family(_t5, _translation, {"T5Block": 4}, further={"T5Block": 2}, autocast=True, kinds=4),
    "ViT": Family(_vit, _images, {"ViTLayer": 2}),
    "Mixtral": Family(
        _mixtral,
        _text,
        {"MixtralDecoderLayer": 2},
        recorded="the graph of its inside stays on the trainer",
    ),
    "Mixtral, router loss": Family(
        _mixtral_with_router_loss,
        _text,
        {"MixtralDecoderLayer": 2},
        keeps="the loss takes the routers' logits",
        recorded="torch.compile cannot capture it whole: Unsupported method call",
    ),
    "ResNet": Family(_resnet, _images, {"ResNetBottleNeckLayer": 4}, draws=False, kinds=3),
    "Mamba": Family(
        _mamba,
        _text,
        {"MambaBlock": 2},
        draws=False,
        recorded="torch.compile cannot capture it whole: the graph holds lazy_load_decompositions",
    ),
    # Blocks on the way down return what they go on from, for those on the way up.
    "U-Net": Family(_unet, _denoising, dict.fromkeys(_UNET_BLOCKS, 1), further={"DownBlock2D": 1}, kinds=5),
}

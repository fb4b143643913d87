"""torchtitan's activation checkpointing, with workers that recompute. See docs/integrations/torchtitan.md."""

from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.models.common.attention import FlexAttention
from torchtitan.trainer import Trainer

from backhaul._api import connect
from backhaul._session import Session
from backhaul._torch_api.wrap import SegmentModule
from backhaul.integrations._first_pass import FirstPass, IfNothingTravels

_TODO = "its forward called none of its transformer blocks."
_sessions: dict[str, Session] = {}
"""Sessions by their settings. With pipelining, a policy is built for each part of the model: all share one session."""


def enable(
    config: Trainer.Config,
    worker: str | None = None,
    *,
    if_nothing_travels: IfNothingTravels = "raise",
    **arguments: Any,
) -> Trainer.Config:
    """Changes a configuration so that workers recompute the transformer blocks, and returns it.

    Sets `activation_checkpoint` to `BackhaulAC`, switches CUDA graphs off, in which nothing could be sent, and replaces
    FlexAttention, which is compiled code that workers cannot run, by `MaskedAttention`.

    Args:
        config: The configuration of torchtitan's Trainer.
        worker: The address of a worker, or several; see `backhaul.connect`. None: those in BACKHAUL_WORKER, or a worker
            on this machine.
        if_nothing_travels: What happens if the first forward shows that no segment can be recomputed by a worker:
            "raise" NotRemoteError, or "warn" with NotRemoteWarning.
        **arguments: Further arguments of `backhaul.connect`.
    """
    config.activation_checkpoint = BackhaulAC.Config(
        worker=worker, if_nothing_travels=if_nothing_travels, arguments=arguments
    )
    config.training.disable_cuda_graphs = True
    if config.model_spec is not None:
        for _, attention, parent, name in [*config.model_spec.model.traverse(FlexAttention.Config)]:
            options = {entry.name: getattr(attention, entry.name) for entry in fields(attention)}
            replaced = MaskedAttention.Config(**options)
            if isinstance(name, int):
                parent[name] = replaced
            else:
                setattr(parent, name, replaced)
    return config


class MaskedAttention(FlexAttention):  # type: ignore[misc] # torchtitan may be missing where types are checked
    """FlexAttention's masks with torch's scaled_dot_product_attention, which workers can recompute.

    The mask takes one byte for each pair of tokens of a sequence, while a block is computed.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):  # type: ignore[misc]
        """The settings of FlexAttention. They have no effect."""

    def forward(
        self,
        q_BLNH: Tensor,  # noqa: N803 # torchtitan shards by these names
        k_BLNH: Tensor,  # noqa: N803
        v_BLNH: Tensor,  # noqa: N803
        *,
        attention_masks: Any,
        score_mod: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Any = None,
        **_: Any,
    ) -> Tensor:
        """Returns the attention of each query. All tensors have the shape [batch, tokens, heads, width].

        Raises:
            ValueError: The model changes scores, or needs their sums, which this attention does not compute.
        """
        if score_mod is not None or out_transform is not None:
            raise ValueError(
                "the model uses score_mod or out_transform of FlexAttention, which workers cannot recompute. Train it "
                "without backhaul.integrations.torchtitan.enable"
            )
        query, key, value = (tensor.transpose(1, 2) for tensor in (q_BLNH, k_BLNH, v_BLNH))
        if enable_gqa:
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        mask = _dense(attention_masks.mask_mod, query.shape[0], query.shape[2], key.shape[2], query.device)
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale).transpose(1, 2)


def _dense(mask_mod: Any, batch: int, queries: int, keys: int, device: torch.device) -> Tensor:
    """Returns what `mask_mod` allows, of shape [batch, 1, queries, keys]. The mask must be the same for all heads."""
    sizes = (batch, 1, queries, keys)
    indices = [
        torch.arange(size, device=device).view([-1 if other == axis else 1 for other in range(4)])
        for axis, size in enumerate(sizes)
    ]
    mask: Tensor = mask_mod(*indices)
    return mask.expand(sizes)


class BackhaulAC(ActivationCheckpointing):  # type: ignore[misc]
    """Makes each transformer block a segment. Set `activation_checkpoint=BackhaulAC.Config()` in a Trainer's config.

    Args:
        config: The settings of the segments and of their session.
        dump_folder: The folder in which torchtitan's policies may write; nothing is written there.

    Attributes:
        session: The session that the segments belong to, opened here.

    Raises:
        ConnectError: No worker answers at one of the addresses.
        SettingError: A setting has an invalid value.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):  # type: ignore[misc]
        """Settings of the segments and of their session, in addition to those of torchtitan."""

        worker: str | None = None
        """The address of a worker, or several, see `backhaul.connect`. None: those in BACKHAUL_WORKER, or a worker on
        this machine."""

        if_nothing_travels: str = "raise"
        """What happens if the first forward shows that no segment can be recomputed by a worker: "raise" or "warn"."""

        arguments: dict[str, Any] = field(default_factory=dict)
        """Further arguments of `backhaul.connect`, such as {"returns": "activations"}."""

    def __init__(self, config: "BackhaulAC.Config", dump_folder: str = "") -> None:
        super().__init__(config, dump_folder)
        self.session = _session(config)

    def apply(self, model: nn.Module) -> None:
        """Makes each block of the model a segment, in place. The first forward is checked, see `if_nothing_travels`."""
        config = cast(BackhaulAC.Config, self.config)
        first = FirstPass(self.session, type(model).__name__, cast(Any, config.if_nothing_travels), _TODO)
        super().apply(model)
        if next(model.get_submodule("layers").children(), None) is not None:
            first.watch(model)

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        options = {
            "preserve_rng_state": self.config.preserve_rng_state,
            "determinism_check": self.config.determinism_check,
            "debug": self.config.debug,
        }
        return _Block(module, partial(self.session.checkpoint, **options))


class _Block(SegmentModule):
    """A transformer block that is a segment."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the block as a segment. Raises RuntimeError while a CUDA graph is captured."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "torchtitan captures the step as a CUDA graph, in which nothing can be sent to a worker. Set "
                "training.disable_cuda_graphs=True"
            )
        return super().forward(*args, **kwargs)


def _session(config: BackhaulAC.Config) -> Session:
    key = repr((config.worker, sorted(config.arguments.items())))
    session = _sessions.get(key)
    if session is None or session.closed:
        session = _sessions[key] = connect(config.worker, **config.arguments)
    return session

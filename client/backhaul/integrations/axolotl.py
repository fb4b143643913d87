"""A plugin of Axolotl, so that YAML alone is enough. See docs/integrations/axolotl.md.

plugins:
  - backhaul.integrations.axolotl.BackhaulPlugin
backhaul:
  worker: gpu-box:50051
"""

import logging
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, Field

from backhaul.integrations.transformers import BackhaulCallback

logger = logging.getLogger("backhaul")
_LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")


class BackhaulArgs(BaseModel):
    """What the plugin adds to Axolotl's configuration."""

    backhaul: dict[str, Any] | None = Field(
        default=None,
        description="Arguments of backhaul.integrations.transformers.BackhaulCallback, such as worker, strict or "
        "if_nothing_travels.",
    )


class BackhaulPlugin(BasePlugin):  # type: ignore[misc] # Axolotl has no types
    """Lets workers recompute the layers of the model that Axolotl trains."""

    def register(self, cfg: Any) -> None:
        """Switches gradient checkpointing on, and LoRA kernels off, unless the configuration sets them.

        Axolotl enables its LoRA kernels by itself. They are custom autograd functions, with which nothing would travel.

        Raises:
            ValueError: The configuration switches gradient checkpointing off, or replaces it.
        """
        if not self._is_named(cfg):
            return
        if cfg.get("activation_offloading"):
            raise ValueError(
                f"activation_offloading: {cfg['activation_offloading']} replaces gradient checkpointing, so no layer "
                "would be recomputed by a worker. Remove it, or remove Backhaul's plugin"
            )
        if cfg.get("gradient_checkpointing") is None:
            cfg["gradient_checkpointing"] = True
        if not cfg["gradient_checkpointing"]:
            raise ValueError(
                "gradient_checkpointing: false leaves nothing for workers to recompute. Set it to true, or remove "
                "Backhaul's plugin"
            )
        is_open = [name for name in _LORA_KERNELS if cfg.get(name) is None]
        if cfg.get("adapter") in {"lora", "qlora"} and len(is_open) == len(_LORA_KERNELS):
            cfg.update(dict.fromkeys(is_open, False))
            logger.info("Backhaul has set Axolotl's lora_*_kernel options to false, because workers cannot run them.")

    def get_input_args(self) -> str:
        """Returns the name of the class with the options that the plugin adds."""
        return f"{BackhaulArgs.__module__}.{BackhaulArgs.__qualname__}"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[BackhaulCallback]:
        """Returns the callback that connects to the workers when the training begins."""
        return [BackhaulCallback(**(cfg.backhaul or {}))] if self._is_named(cfg) else []

    def _is_named(self, cfg: Any) -> bool:
        """Whether a configuration names the plugin. Axolotl also calls plugins of earlier trainings in the process."""
        return f"{type(self).__module__}.{type(self).__qualname__}" in (cfg.get("plugins") or ())

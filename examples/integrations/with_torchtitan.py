"""A configuration of torchtitan that trains its smallest Llama 3 on random tokens.

    PYTHONPATH=examples/integrations BACKHAUL_WORKER=gpu-box:50051 torchrun --nproc-per-node 2 \
        -m torchtitan.train --module with_torchtitan --config llama3

The lines of Backhaul are marked. Without BACKHAUL_WORKER each rank starts a worker on its machine.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

import backhaul
from backhaul.integrations.torchtitan import enable  # <- Backhaul


class RandomTokens(BaseDataLoader):
    """Yields random tokens in place of a data set."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """No settings."""

    def __init__(
        self, config: "RandomTokens.Config", dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        self._generator = torch.Generator().manual_seed(dp_rank)
        self._shape = (local_batch_size, seq_len + 1)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            tokens = torch.randint(0, 2048, self._shape, generator=self._generator)
            positions = torch.arange(tokens.shape[1] - 1).expand_as(tokens[:, 1:])
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: the tokens are always the same."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing."""


class NoTokenizer(BaseTokenizer):
    """The tokens are random numbers, not text."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """No settings."""

    def __init__(self, config: "NoTokenizer.Config", **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        """Raises NotImplementedError."""
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        """Raises NotImplementedError."""
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        """Returns the number of tokens."""
        return 2048


def random_llama3() -> Trainer.Config:
    """Returns torchtitan's debug configuration of Llama 3 with random tokens."""
    config = llama3_debugmodel()
    config.dataloader, config.tokenizer = RandomTokens.Config(), NoTokenizer.Config()
    config.checkpoint = CheckpointManager.Config(enable=False)
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 64, 5
    config.debug.seed = 0
    config.parallelism.spmd_backend = "partial_dtensor"  # torchtitan's default needs a newer torch than 2.13
    return config


def llama3() -> Trainer.Config:
    """Returns the same with Backhaul."""
    return enable(random_llama3())  # <- Backhaul


def train(worker: str | None, *, remote: bool = True) -> tuple[nn.Module, backhaul.Report | None]:
    """Trains the model, and returns it with the report of the session; without Backhaul if `remote` is False."""
    config = enable(random_llama3(), worker)
    if not remote:
        config.activation_checkpoint = None
    trainer = config.build()
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()
    if not remote:
        return trainer.model_parts[0], None
    report = backhaul.current_session().report()
    backhaul.current_session().close()
    return trainer.model_parts[0], report

"""Trains a small language model with Lightning, after the first example of its documentation.

    python examples/integrations/with_lightning.py gpu-box:50051

The two lines of Backhaul are marked. Without an address a worker is started on this machine.
"""

import sys
import tempfile
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import backhaul.integrations.lightning  # <- Backhaul


class LanguageModel(lightning.LightningModule):
    """A transformer of four layers over random tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(4))
        self.head = nn.Linear(32, 64)

    def loss(self, tokens: Tensor) -> Tensor:
        """Returns the loss of a batch of tokens."""
        y = self.embedding(tokens)
        for layer in self.layers:
            y = layer(y)
        return nn.functional.cross_entropy(self.head(y).flatten(0, 1), tokens.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Returns the loss of a micro-batch."""
        (tokens,) = batch
        return self.loss(tokens)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Logs the loss of a batch that is not trained on."""
        (tokens,) = batch
        self.log("val_loss", self.loss(tokens))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer of all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(worker: str | None, *, remote: bool = True) -> tuple[nn.Module, backhaul.Report | None]:
    """Trains the model, and returns it with the report of the session; without Backhaul if `remote` is False."""
    torch.manual_seed(0)
    model = LanguageModel()
    rows = TensorDataset(torch.randint(0, 64, (22, 16)))
    callback = backhaul.integrations.lightning.LightningCallback(  # <- Backhaul
        worker, layers=nn.TransformerEncoderLayer
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            default_root_dir=folder,
            accelerator="cpu",
            max_epochs=2,
            accumulate_grad_batches=4,
            gradient_clip_val=0.5,
            callbacks=[callback] if remote else [],  # <- Backhaul
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
        )
        trainer.fit(model, DataLoader(rows, batch_size=2, shuffle=True), DataLoader(rows, batch_size=8))
    return model, callback.report() if remote else None


if __name__ == "__main__":
    print(train(sys.argv[1] if len(sys.argv) > 1 else None)[1])

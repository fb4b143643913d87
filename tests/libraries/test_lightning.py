"""examples/integrations/with_lightning.py, and other trainings with Lightning."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backhaul import Settings
from support.libraries import assert_equal_states, assert_trains_equally, example
from support.processes import WorkerProcess

lightning = pytest.importorskip("lightning")

from backhaul.integrations.lightning import LightningCallback  # noqa: E402

QUIET = Settings(silence_s=240.0)
BACKWARD = torch.autograd.backward


def test_the_example_trains_as_without_backhaul(worker: WorkerProcess) -> None:
    assert_trains_equally("lightning", worker.address)


def model_of(kind: str) -> Any:
    base: Any = example("lightning").LanguageModel

    class Model(base):  # type: ignore[misc]
        has_failed = False
        gradients: list[Tensor]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if kind == "a skipped micro-batch" and batch_idx in (2, 7):
                return None
            loss = super().training_step(batch, batch_idx)
            if kind == "an error" and batch_idx == 6 and not self.has_failed:
                self.has_failed = True
                raise ArithmeticError
            if kind == "manual":
                self.manual_backward(loss)
                self.optimizers().step()
                self.optimizers().zero_grad()
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            gradients = (parameter.grad for parameter in self.parameters())
            self.gradients += [gradient.clone() for gradient in gradients if gradient is not None]

    torch.manual_seed(0)
    model = Model()
    model.gradients = []
    model.automatic_optimization = kind != "manual"
    return model


def trained(callbacks: list[Any], folder: Path, kind: str, steps: int) -> Any:
    model = model_of(kind)
    torch.manual_seed(1)
    rows = torch.utils.data.TensorDataset(torch.randint(0, 64, (22, 16)))
    settings = {} if kind == "manual" else {"accumulate_grad_batches": steps, "gradient_clip_val": 0.1}
    for attempt in range(2 if kind == "an error" else 1):
        trainer = lightning.Trainer(
            default_root_dir=folder,
            accelerator="cpu",
            max_epochs=2,
            val_check_interval=3,
            callbacks=callbacks,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
            enable_checkpointing=False,
            **settings,
        )
        loaders = [torch.utils.data.DataLoader(rows, batch_size=size) for size in (2, 8)]
        if kind == "an error" and attempt == 0:
            with pytest.raises(ArithmeticError):
                trainer.fit(model, *loaders)
            model.zero_grad()
        else:
            trainer.fit(model, *loaders)
        assert torch.autograd.backward is BACKWARD
        assert all(type(layer) is nn.TransformerEncoderLayer for layer in model.layers)
    return model


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("kind", ["plain", "a skipped micro-batch", "an error", "manual"])
def test_gradients_of_steps(worker: WorkerProcess, tmp_path: Path, kind: str, steps: int) -> None:
    callback = LightningCallback(worker.address, layers=nn.TransformerEncoderLayer, settings=QUIET)
    expected, actual = (trained(callbacks, tmp_path, kind, steps) for callbacks in ([], [callback]))
    assert len(expected.gradients) == len(actual.gradients)
    assert all(map(torch.equal, expected.gradients, actual.gradients))
    assert_equal_states(expected, actual)
    assert callback.report().travels == 1
    assert (callback.report().block is not None) == (steps == 4 and kind != "manual")


def test_loggers_get_the_metrics(worker: WorkerProcess, tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    trainer = lightning.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_epochs=1,
        log_every_n_steps=1,
        callbacks=[LightningCallback(worker.address, layers=nn.TransformerEncoderLayer, settings=QUIET)],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=logger,
        enable_checkpointing=False,
    )
    rows = torch.utils.data.TensorDataset(torch.randint(0, 64, (8, 16)))
    trainer.fit(model_of("plain"), torch.utils.data.DataLoader(rows, batch_size=2))
    logger.save()
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        shares = [row["backhaul/remote_share"] for row in csv.DictReader(file) if row["backhaul/remote_share"]]
    assert shares == ["1.0"] * 4

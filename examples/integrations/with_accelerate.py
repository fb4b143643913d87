"""Trains a model of your own in a loop with Accelerate, after the gradient accumulation guide of its documentation.

    python examples/integrations/with_accelerate.py gpu-box:50051

The lines of Backhaul are marked. Without an address a worker is started on this machine.
"""

import sys

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import backhaul.integrations.accelerate  # <- Backhaul


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.inside = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of x."""
        return x + self.inside(x)


def train(worker: str | None, *, remote: bool = True) -> tuple[nn.Module, backhaul.Report | None]:
    """Trains the model, and returns it with the report of the session; without Backhaul if `remote` is False."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), *[Block() for _ in range(4)], nn.Linear(64, 4))
    rows = TensorDataset(torch.randn(88, 16), torch.randint(0, 4, (88,)))
    loader = DataLoader(rows, batch_size=8, shuffle=True)
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)

    accelerator = Accelerator(gradient_accumulation_steps=4)
    session = None
    if remote:
        session = backhaul.integrations.accelerate.enable(accelerator, model, worker, layers=Block)  # <- Backhaul
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for _epoch in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                outputs = model(inputs)
                loss = loss_function(outputs, targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return accelerator.unwrap_model(model), session and session.report()


if __name__ == "__main__":
    print(train(sys.argv[1] if len(sys.argv) > 1 else None)[1])

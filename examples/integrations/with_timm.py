"""Fine-tunes a small vision transformer of timm in a loop of your own.

    python examples/integrations/with_timm.py gpu-box:50051

The two lines of Backhaul are marked. Without an address a worker is started on this machine.
"""

import sys

import timm
import torch

import backhaul.integrations.timm  # <- Backhaul


def train(worker: str | None, *, remote: bool = True) -> tuple[torch.nn.Module, backhaul.Report | None]:
    """Trains the model, and returns it with the report of the session; without Backhaul if `remote` is False."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", num_classes=10, img_size=32, patch_size=8, embed_dim=48, depth=4, num_heads=3
    )
    session = backhaul.integrations.timm.enable(model, worker) if remote else None  # <- Backhaul
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_function = torch.nn.CrossEntropyLoss()

    model.train()
    for _step in range(4):
        images, targets = torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))
        loss = loss_function(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, session and session.report()


if __name__ == "__main__":
    print(train(sys.argv[1] if len(sys.argv) > 1 else None)[1])

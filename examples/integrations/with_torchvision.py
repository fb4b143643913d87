"""Trains a ResNet-18 of torchvision in a loop of your own.

    python examples/integrations/with_torchvision.py gpu-box:50051

The two lines of Backhaul are marked. Without an address a worker is started on this machine.
"""

import sys

import torch
import torchvision

import backhaul.integrations.torchvision  # <- Backhaul


def train(worker: str | None, *, remote: bool = True) -> tuple[torch.nn.Module, backhaul.Report | None]:
    """Trains the model, and returns it with the report of the session; without Backhaul if `remote` is False."""
    torch.manual_seed(0)
    model = torchvision.models.resnet18(weights=None, num_classes=10)
    session = backhaul.integrations.torchvision.enable(model, worker) if remote else None  # <- Backhaul
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_function = torch.nn.CrossEntropyLoss()

    model.train()
    for _step in range(3):
        images, targets = torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))
        loss = loss_function(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, session and session.report()


if __name__ == "__main__":
    print(train(sys.argv[1] if len(sys.argv) > 1 else None)[1])

"""`enable`, which all libraries share, with a model that checkpoints as those of timm do."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import backhaul
import backhaul.integrations.distributed
import backhaul.integrations.timm
from backhaul import Session
from support.processes import WorkerProcess

INPUT = torch.arange(8.0).reshape(2, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Model(nn.Module):
    """Three blocks, which it checkpoints if its checkpointing is on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.is_checkpointing = False

    def set_grad_checkpointing(self, enable: bool) -> None:
        self.is_checkpointing = enable

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointing else block(x)
        return x


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(INPUT).sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("layers", [None, Block], ids=["own checkpointing", "layers"])
def test_a_model_and_its_copies_train_as_without_backhaul(session: Session, layers: Any) -> None:
    expected, model = gradients(Model()), Model()
    assert backhaul.integrations.timm.enable(model, session=session, layers=layers) is session
    copy = deepcopy(model)  # before the first forward, as for an average of the weights
    assert all(map(torch.equal, gradients(model), expected))
    assert session.report().remote == 3
    assert all(map(torch.equal, gradients(copy), expected))
    assert session.report().remote == 6
    assert list(model.state_dict()) == list(Model().state_dict())


def test_only_the_forward_of_the_model_is_redirected(session: Session) -> None:
    backhaul.integrations.timm.enable(Model(), session=session)
    other = Model()
    other.set_grad_checkpointing(True)
    gradients(other)
    assert session.report().segments == ()


@pytest.mark.parametrize("if_nothing_travels", ["raise", "warn"])
def test_the_first_forward_in_training_says_if_nothing_is_checkpointed(
    session: Session, if_nothing_travels: Any
) -> None:
    model = Model()
    backhaul.integrations.timm.enable(model, session=session, if_nothing_travels=if_nothing_travels)
    model.set_grad_checkpointing(False)
    with torch.no_grad():
        model(INPUT)
    with (
        pytest.raises(backhaul.NotRemoteError, match="no part of Model")
        if if_nothing_travels == "raise"
        else (pytest.warns(backhaul.NotRemoteWarning, match="no part of Model"))
    ):
        model(INPUT)
    model(INPUT)  # it is said once


def test_a_model_without_such_layers_leaves_no_session(session: Session, worker: WorkerProcess) -> None:
    with pytest.raises(ValueError, match="no unwrapped module"):
        backhaul.integrations.distributed.wrap(Model(), nn.Conv2d, worker.address)
    assert backhaul.current_session() is session


def test_a_model_without_checkpointing_of_its_own_is_an_error(session: Session) -> None:
    with pytest.raises(ValueError, match="Linear does not support checkpointing"):
        backhaul.integrations.timm.enable(nn.Linear(4, 4), session=session)
    assert not session.closed

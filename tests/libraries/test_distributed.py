"""examples/integrations/with_ddp.py and with_fsdp2.py, on two ranks of torchrun with gloo."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import backhaul
import backhaul.integrations.distributed
from backhaul import Session
from support.calls import TimesOne
from support.libraries import assert_ranks_train_equally
from support.processes import WorkerProcess


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_the_example_trains_as_without_backhaul(name: str, worker: WorkerProcess, tmp_path: Path) -> None:
    assert_ranks_train_equally(name, worker.address, tmp_path)


class Untravelling(nn.Module):
    """What no program can express from its first op on."""

    def forward(self, x: Tensor) -> Tensor:
        return TimesOne.apply(x)


def test_a_model_of_which_nothing_travels_is_an_error_in_the_first_forward(session: Session) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Untravelling())
    backhaul.integrations.distributed.wrap(model, Untravelling, session=session)
    with pytest.raises(backhaul.NotRemoteError, match="no part of Sequential .* custom autograd function TimesOne"):
        model(torch.randn(2, 4))


def test_the_error_can_be_a_warning(session: Session) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Untravelling())
    backhaul.integrations.distributed.wrap(model, Untravelling, session=session, if_nothing_travels="warn")
    with pytest.warns(backhaul.NotRemoteWarning, match="custom autograd function TimesOne"):
        model(torch.randn(2, 4)).sum().backward()


def test_evaluation_before_the_training_is_no_error(session: Session) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    backhaul.integrations.distributed.wrap(model, nn.Tanh, session=session)
    with torch.no_grad():
        model(torch.randn(2, 4))
    model.eval()(torch.randn(2, 4)).sum().backward()
    model.train()(torch.randn(2, 4)).sum().backward()
    assert session.report().travels == 1


def test_a_model_without_such_layers_is_an_error(session: Session) -> None:
    with pytest.raises(ValueError, match="no unwrapped module"):
        backhaul.integrations.distributed.wrap(nn.Sequential(nn.Linear(4, 4)), nn.Tanh, session=session)

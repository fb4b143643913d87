"""Micro-batches that no worker gets whole: the trainer computes them, and the report says why."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from backhaul import Session
from support.bits import differing
from support.whole import WIDTH, Language, cross_entropy, reasons_in, train, whole_in

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("whole_share")]


CHANGED: list[Any] = []
COUNTS = {"calls": 0.0}


def appends(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    loss = cross_entropy(model, tokens, targets)
    CHANGED.append(loss.detach())
    return loss


def sets_an_attribute(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    loss = cross_entropy(model, tokens, targets)
    model.last = loss.detach()
    return loss


def counts_calls(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    COUNTS["calls"] += 1.0
    return cross_entropy(model, tokens, targets) * COUNTS["calls"]


def sets_a_global(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    global LAST
    loss = cross_entropy(model, tokens, targets)
    LAST = loss.detach()
    return loss


LAST: Tensor | None = None
WRITTEN = torch.zeros(())


def writes_to_a_tensor(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    loss = cross_entropy(model, tokens, targets)
    WRITTEN.copy_(loss.detach())
    return loss


def reads_what_it_wrote(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    loss = cross_entropy(model, tokens, targets) * (1 + WRITTEN)
    with torch.no_grad():
        WRITTEN.add_(0.25)
    return loss


def prints(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    print("a micro-batch")  # noqa: T201
    return cross_entropy(model, tokens, targets)


def draws_in_python(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    import random

    return cross_entropy(model, tokens, targets) * random.random()


def draws_in_numpy(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    import numpy as np

    return cross_entropy(model, tokens, targets) * float(np.random.rand())


def reads_a_value(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    loss = cross_entropy(model, tokens, targets)
    return loss * 2 if loss.item() > 1 else loss


def hooks_a_tensor(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(tokens)
    logits.register_hook(lambda gradient: gradient * 2)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    "loss",
    [
        appends,
        sets_an_attribute,
        counts_calls,
        sets_a_global,
        writes_to_a_tensor,
        reads_what_it_wrote,
        prints,
        draws_in_python,
        draws_in_numpy,
        reads_a_value,
        hooks_a_tensor,
    ],
    ids=lambda function: function.__name__,
)
def test_what_a_worker_cannot_do_runs_here_with_the_reason(
    session: Session, loss: Callable[..., Tensor], capfd: pytest.CaptureFixture[str]
) -> None:
    def results(session: Session | None) -> list[Any]:
        import random

        import numpy as np

        random.seed(0)
        np.random.seed(0)
        CHANGED.clear()
        COUNTS["calls"] = 0.0
        WRITTEN.zero_()
        trained = train(session, loss=loss)
        last = [] if LAST is None else [LAST]
        return [
            *trained,
            *CHANGED,
            *last,
            WRITTEN.clone(),
            torch.tensor(COUNTS["calls"]),
            torch.tensor(random.random()),
        ]

    assert differing(results(session), results(None)) == []
    assert whole_in(session) == 0
    (reason,) = reasons_in(session)
    assert reason
    if loss is prints:
        assert capfd.readouterr().out.count("a micro-batch") == 2 * 3 * 6


class Normed(Language):
    """With statistics that forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens).flatten(0, 1)).unflatten(0, tokens.shape)
        logits: Tensor = self.head(x)
        return logits


def test_statistics_are_written_here(session: Session) -> None:
    assert differing(train(session, build=Normed), train(None, build=Normed)) == []
    assert reasons_in(session) == ["it writes to an input, as BatchNorm does to its statistics"]


def test_hooks_of_parameters_are_called_here(session: Session) -> None:
    def hook(model: nn.Module) -> None:
        next(model.parameters()).register_hook(lambda gradient: gradient * 2)

    assert differing(train(session, prepare=hook), train(None, prepare=hook)) == []
    assert reasons_in(session) == ["a parameter has hooks, which see each gradient"]

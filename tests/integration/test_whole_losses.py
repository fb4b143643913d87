"""Losses of whole micro-batches: what a loop does with them waits where it must, and has the values of the loop."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from backhaul import Session
from backhaul._accumulate.whole_shares import LEARNING
from support.bits import differing
from support.whole import SHARE, Language, alone, batch, cross_entropy, most_remote, whole_in

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("whole_share")]


@pytest.mark.parametrize("is_seen", [False, True])
def test_a_sum_that_the_loop_keeps_waits_for_nothing(session: Session, *, is_seen: bool) -> None:
    """Unless somebody else sees its memory."""
    model = Language().eval()
    for step in range(2):
        total = torch.zeros(())
        seen = total.detach() if is_seen else None
        with session.accumulate() as block:
            for tokens, targets in batch(step, 6):
                total += block.run(cross_entropy, model, tokens, targets)
        expected = torch.zeros(())
        for one in batch(step, 6):
            expected += cross_entropy(model, *one).detach()
        assert type(total) is Tensor
        assert torch.equal(total, expected)
        assert seen is None or torch.equal(seen, expected)
    assert bool(sum(one.losses_read for one in session.report().segments)) == is_seen


def test_what_is_read_inside_the_block_waits_and_is_counted(session: Session) -> None:
    model, losses, means = Language(), [], []
    for step in range(2):
        total: Any = 0.0
        with session.accumulate() as block:
            for tokens, targets in batch(step, 6):
                loss = block.run(cross_entropy, model, tokens, targets)
                total += loss.detach()
                if step:
                    losses.append(loss.item())
            mean = total / 6
        means.append(float(mean))
        assert type(total) is type(mean) is Tensor
    expected = [cross_entropy(model, *one) for one in batch(1, 6)]  # dropout draws others
    assert len(losses) == len(expected)
    assert means[1] == pytest.approx(sum(losses) / 6)  # another order of additions, in float64
    assert whole_in(session) == SHARE * 2 - LEARNING
    assert sum(one.losses_read for one in session.report().segments) == SHARE  # of the second step


def writes_to_an_alias(total: list[Tensor], loss: Tensor) -> Tensor:
    alias = loss.detach()
    alias.mul_(3)
    return loss


def writes_to_what_has_an_alias(total: list[Tensor], loss: Tensor) -> Tensor:
    alias = loss.detach().detach()
    loss.mul_(3)
    return alias * 2


def adds_to_an_alias_of_the_first(total: list[Tensor], loss: Tensor) -> Tensor:
    if not total:
        total.append(loss.detach())
        return loss
    total[0] += loss
    return total[0].clone()


def adds_in_inference_mode(total: list[Tensor], loss: Tensor) -> Tensor:
    with torch.inference_mode():
        total.append(torch.zeros(()).add_(loss))
        return loss * 2 + loss.detach()


def calls_a_compiled_function(total: list[Tensor], loss: Tensor) -> Tensor:
    return torch.compile(lambda x: x * 2 + 1, backend="eager")(loss)


@pytest.mark.parametrize(
    "use",
    [
        writes_to_an_alias,
        writes_to_what_has_an_alias,
        adds_to_an_alias_of_the_first,
        adds_in_inference_mode,
        calls_a_compiled_function,
    ],
    ids=lambda use: use.__name__,
)
def test_what_a_block_does_with_a_loss(session: Session, use: Callable[[list[Tensor], Tensor], Tensor]) -> None:
    def results(session: Session | None) -> list[Tensor]:
        torch.manual_seed(0)
        model, used = Language(), list[Tensor]()
        for step in range(2):
            total: list[Tensor] = []
            with alone() if session is None else session.accumulate() as block:
                used += [use(total, block.run(cross_entropy, model, *one)) for one in batch(step, 6)]
            used += total
        assert all(type(one) is Tensor for one in used)
        return used

    assert differing(results(session), results(None)) == []
    assert whole_in(session) == most_remote(2, 6, SHARE)


def test_many_threads_read_a_loss(session: Session) -> None:
    model, values = Language().eval(), list[Tensor]()
    with session.accumulate() as block:
        losses = [block.run(cross_entropy, model, *one) for one in batch(0, 1) * SHARE]
        threads = [threading.Thread(target=lambda: values.append(losses[-1] / 1)) for _ in range(2)]
        threads += [threading.Thread(target=lambda: values.append(losses[-1].sqrt())) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    loss = cross_entropy(model, *batch(0, 1)[0])
    assert len(values) == len(threads)
    assert all(torch.equal(value, loss) or torch.equal(value, loss.sqrt()) for value in values)
    assert whole_in(session) == 1

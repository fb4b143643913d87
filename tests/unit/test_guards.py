"""Ctrl-C while the guards of accumulation blocks are installed or removed."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from backhaul import AccumulationError
from backhaul._accumulate import guards
from backhaul._accumulate.block import AccumulationBlock
from backhaul_runtime.torch_internals.clipping import clipping_cells
from backhaul_runtime.torch_internals.data_parallel import PRE_FORWARD
from support.interrupts import interrupted_at


class Block:
    """A block that has not delivered its gradients."""

    name, micro_batches, is_complete, ends_in_closure = "a block", 1, False, False

    def __init__(self) -> None:
        self.is_open = True

    def holds(self, _: Any) -> bool:
        return True


@contextmanager
def opened() -> Iterator[None]:
    block = Block()
    with guards.open_block(cast(AccumulationBlock, block)):
        yield
        block.is_open = False  # as `AccumulationBlock.close` does


def replaceable() -> list[Any]:
    """What a block replaces, as it is now."""
    names: list[tuple[Any, str]] = [
        (torch.autograd, "backward"),
        (torch.amp.GradScaler, "unscale_"),
        (torch.amp.GradScaler, "step"),
        (torch.Tensor, "register_hook"),
        (torch.Tensor, "retain_grad"),
        (DistributedDataParallel, PRE_FORWARD),
    ]
    return [getattr(*name) for name in names] + [cell.cell_contents for cell in CELLS]


def is_in_guards(frame: FrameType) -> bool:
    """Whether a line is one of the guards' methods, without the statements around their lock."""
    return frame.f_code.co_filename == guards.__file__ and frame.f_code.co_name not in ("enter", "leave")


def check_guards() -> None:
    """Checks that a block is guarded in every way, and that nothing is replaced after it."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight])
    with opened():
        assert not any(guard is own for guard, own in zip(replaceable(), OWN, strict=True))
        with pytest.raises(AccumulationError):
            clip_grad_norm_([weight], 1.0)
        with pytest.raises(AccumulationError):
            optimizer.step()
    assert all(now is own for now, own in zip(replaceable(), OWN, strict=True))


CELLS = list(clipping_cells())
OWN = replaceable()


def open_and_end() -> None:
    with opened():
        pass


def test_every_block_after_an_interrupted_one_is_guarded() -> None:
    line = 0
    while interrupted_at(line, open_and_end, is_in_guards):
        check_guards()
        line += 1
    assert line > 40
    check_guards()


def test_a_name_that_was_replaced_after_an_interrupt_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def users(*_: Any, **__: Any) -> None: ...

    line = 0
    while interrupted_at(line, open_and_end, is_in_guards):
        with monkeypatch.context() as patch:
            patch.setattr(torch.autograd, "backward", users)
            open_and_end()
            assert torch.autograd.backward is users
        torch.autograd.backward = OWN[0]
        line += 1

"""What is trained in the benchmarks: blocks in a row, a step of them, and whether two steps were the same.

Shapes: B batch, T length, C width.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from backhaul.demo.model import Block
from backhaul_bench.device import measured
from backhaul_bench.rounds import UnequalGradientsError

WIDTH = 512
DROPOUT = 0.1
LARGE = (4, 256)
"""Batch and length of 1,024 tokens."""
SMALL = (1, 64)
"""Likewise of 64."""
_RANK = 8
_SEED = 0

Checkpoint = Callable[..., Any]
checkpoint_of_torch = partial(torch_checkpoint, use_reentrant=False)


class Adapted(nn.Module):
    """A frozen Linear and a trainable low-rank change of it, as LoRA has them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, _RANK, bias=False)
        self.up = nn.Linear(_RANK, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] to [B, T, C]."""
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def adapt(block: nn.Module) -> nn.Module:
    """Freezes a block and puts a low-rank change beside each Linear, in place."""
    block.requires_grad_(False)
    for name, module in list(block.named_modules()):
        if isinstance(module, nn.Linear):
            parent = block.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], Adapted(module))
    return block


class Training:
    """Blocks, an optimizer, and a step: zero_grad, forward, loss, backward, AdamW.

    Equal arguments give equal trainings, whatever the checkpoint: weights, input and dropout come from one seed.

    Args:
        name: For messages.
        blocks: How many.
        tokens: Batch and length of the input.
        checkpoint: Runs a segment; None: plainly.
        per_segment: Blocks in each.
        width: Of the blocks.
        is_adapted: Frozen, with LoRA.
    """

    def __init__(
        self,
        name: str,
        blocks: int,
        tokens: tuple[int, int],
        checkpoint: Checkpoint | None,
        per_segment: int = 1,
        width: int = WIDTH,
        *,
        is_adapted: bool = False,
    ) -> None:
        torch.manual_seed(_SEED)
        self.name = name
        self._checkpoint = checkpoint
        made: list[nn.Module] = [Block(width, DROPOUT) for _ in range(blocks)]
        if is_adapted:
            made = [adapt(block) for block in made]
        made = [block.to(measured()) for block in made]
        self._segments = [
            made[i] if per_segment == 1 else nn.Sequential(*made[i : i + per_segment])
            for i in range(0, blocks, per_segment)
        ]
        self.parameters = [p for segment in self._segments for p in segment.parameters() if p.requires_grad]
        self.x = torch.randn(*tokens, width).to(measured()).requires_grad_()
        self._optimizer = torch.optim.AdamW(self.parameters, lr=1e-4)
        self._steps = 0

    def step(self) -> None:
        """One step of training. The gradients stay until the next."""
        self.clear_gradients()
        self.forward_backward()
        self.optimize()

    def clear_gradients(self) -> None:
        """A step begins with this."""
        self._optimizer.zero_grad()
        self.x.grad = None

    def forward_backward(self) -> None:
        """A step without the optimizer: gradients add to those that are there."""
        self.forward().backward()  # type: ignore[no-untyped-call]

    def optimize(self) -> None:
        """A step ends with this."""
        self._optimizer.step()

    def forward(self) -> Tensor:
        """The loss."""
        self._steps += 1
        torch.manual_seed(self._steps)  # the same dropout in every training
        y = self.x
        for segment in self._segments:
            y = segment(y) if self._checkpoint is None else self._checkpoint(segment, y)
        return y.square().mean()

    def steps(self, count: int) -> None:
        """So many steps."""
        for _ in range(count):
            self.step()

    def keep_gradients(self) -> None:
        """Makes gradients of zeros, so that their memory is not counted as the next step's."""
        for tensor in (self.x, *self.parameters):
            tensor.grad = torch.zeros_like(tensor)

    def gradients(self) -> list[Tensor]:
        """Of the input and of each parameter."""
        found = [tensor.grad for tensor in (self.x, *self.parameters)]
        assert all(gradient is not None for gradient in found)
        return [gradient for gradient in found if gradient is not None]

    @property
    def parameter_bytes(self) -> int:
        """Of those that are trained."""
        return sum(parameter.nbytes for parameter in self.parameters)


def compare(trainings: Sequence[Training]) -> None:
    """Raises UnequalGradientsError unless all have the gradients of the first, bit by bit."""
    first, *others = trainings
    for other in others:
        compare_gradients(f"{other.name} and {first.name}", other.gradients(), first.gradients())


def compare_gradients(who: str, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Raises UnequalGradientsError unless both are equal, bit by bit."""
    equal = [torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)]
    if not all(equal):
        raise UnequalGradientsError(f"{len(equal) - sum(equal)} of {len(equal)} gradients of {who} are not equal")

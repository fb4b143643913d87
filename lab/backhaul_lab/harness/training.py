"""The trainings of the benchmarks, which are chains of blocks, and the comparison of their gradients.

Shapes: B batch, T length, C width.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from backhaul.demo.model import Block
from backhaul_lab.harness.device import measured
from backhaul_lab.harness.rounds import UnequalGradientsError

WIDTH = 512
DROPOUT = 0.1
LARGE = (4, 256)
"""Batch size and length of inputs with 1,024 tokens."""
SMALL = (1, 64)
"""Batch size and length of inputs with 64 tokens."""
MICRO_BATCH = (1, 256)
"""Batch size and length of a micro-batch."""
_RANK = 8
_SEED = 0

Checkpoint = Callable[..., Any]
checkpoint_of_torch = partial(torch_checkpoint, use_reentrant=False)


class Adapted(nn.Module):
    """A frozen Linear with a trainable low-rank adapter, as in LoRA."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, _RANK, bias=False)
        self.up = nn.Linear(_RANK, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, T, C] to [B, T, C]."""
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def adapt(block: nn.Module) -> nn.Module:
    """Freezes a block and adds a low-rank adapter to each Linear, in place."""
    block.requires_grad_(False)
    for name, module in list(block.named_modules()):
        if isinstance(module, nn.Linear):
            parent = block.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], Adapted(module))
    return block


class Training:
    """A chain of blocks with an optimizer. A step is zero_grad, forward, loss, backward and AdamW.

    Trainings that differ only in `checkpoint` compute the same, because weights, input and dropout come from one seed.

    Args:
        name: Name of the training in messages.
        blocks: Number of blocks in the chain.
        tokens: Batch size B and length T of the input.
        checkpoint: Function that runs a segment. None: without checkpointing.
        per_segment: Number of blocks in each segment.
        width: Width C of the blocks.
        is_adapted: Whether blocks are frozen and have LoRA adapters.
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
        """Runs one step of training. The gradients stay until the next step."""
        self.clear_gradients()
        self.forward_backward()
        self.optimize()

    def clear_gradients(self) -> None:
        """Clears all gradients. It is the first part of a step."""
        self._optimizer.zero_grad()
        self.x.grad = None

    def forward_backward(self) -> None:
        """Runs a step without the optimizer. Gradients accumulate."""
        self.forward().backward()  # type: ignore[no-untyped-call]

    def optimize(self) -> None:
        """Runs the optimizer. It is the last part of a step."""
        self._optimizer.step()

    def forward(self) -> Tensor:
        """Runs forward and returns the loss, a scalar."""
        self._steps += 1
        torch.manual_seed(self._steps)  # All trainings draw the same dropout.
        y = self.x
        for segment in self._segments:
            y = segment(y) if self._checkpoint is None else self._checkpoint(segment, y)
        return y.square().mean()

    def steps(self, count: int) -> None:
        """Runs `count` steps."""
        for _ in range(count):
            self.step()

    def keep_gradients(self) -> None:
        """Allocates gradients of zeros, so that their memory is not counted as the next step's."""
        for tensor in (self.x, *self.parameters):
            tensor.grad = torch.zeros_like(tensor)

    def gradients(self) -> list[Tensor]:
        """Returns the gradients of the input and of each trainable parameter, which must exist."""
        gradients = [tensor.grad for tensor in (self.x, *self.parameters)]
        assert all(gradient is not None for gradient in gradients)
        return [gradient for gradient in gradients if gradient is not None]

    @property
    def parameter_bytes(self) -> int:
        """Size of the trainable parameters, in bytes."""
        return sum(parameter.nbytes for parameter in self.parameters)


def compare(trainings: Sequence[Training]) -> None:
    """Raises UnequalGradientsError unless all trainings have bitwise the same gradients as the first."""
    first, *others = trainings
    for other in others:
        compare_gradients(f"{other.name} and {first.name}", other.gradients(), first.gradients())


def compare_gradients(what: str, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Raises UnequalGradientsError unless both lists of gradients are bitwise equal."""
    equal = [torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)]
    if not all(equal):
        raise UnequalGradientsError(f"{len(equal) - sum(equal)} of {len(equal)} gradients of {what} are not equal")

"""Trainings that are compared: one loop of steps for all models, and the comparison of what they computed.

Shapes: B batch, T length, C width.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from backhaul.demo.model import Block
from backhaul_lab.harness.core_times import Core
from backhaul_lab.harness.device import measured
from backhaul_lab.harness.rounds import Alternative, Plan, Rounds, UnequalGradientsError, interleave

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
_DRAWS = 1_000_003  # apart from the seeds of other trainings

Checkpoint = Callable[..., Any]
checkpoint_of_torch = partial(torch_checkpoint, use_reentrant=False)


class ChainModel(Protocol):
    """A model that can be trained: a chain of layers between a beginning and a loss."""

    @property
    def layers(self) -> Sequence[nn.Module]:
        """Modules, each of which maps a tensor to the input of the next. Consecutive ones form a segment."""
        ...

    def begin(self, rows: int, seed: int) -> tuple[Tensor, Any]:
        """Returns the input of the first layer for some rows of data, and what `loss` needs of them."""
        ...

    def loss(self, x: Tensor, target: Any) -> Tensor:
        """Returns the loss, a scalar, of the output of the last layer."""
        ...

    def parameters(self) -> Iterable[nn.Parameter]:
        """Returns all parameters, as a module does."""
        ...


class Training:
    """A model with an optimizer. A step is zero_grad, forward and backward of all micro-batches, and AdamW.

    Trainings that differ only in how segments are run compute the same, because all of them draw from the same seeds.

    Args:
        name: Name of the training in messages.
        model: The model to train.
        checkpoint: Function that runs a segment. None: without checkpointing.
        segment_layers: Number of layers in each segment.
        rows: Rows of data in a step.
        micro_batches: Number of micro-batches in a step, a divisor of `rows`.
        accumulate: Opens an accumulation block for the micro-batches of a step. None: each backward blocks.
        is_whole: Whether the block runs whole micro-batches.
        seed: Seed of data and dropout.
        inputs: Leaf tensors besides the parameters that get gradients, but no updates.

    Attributes:
        parameters: The parameters of the model that get gradients.
        losses: The losses of the micro-batches of the last step.
        happens: Called with the number of each micro-batch between its forward and its backward.
    """

    def __init__(
        self,
        name: str,
        model: ChainModel,
        checkpoint: Checkpoint | None,
        *,
        segment_layers: int = 1,
        rows: int = 1,
        micro_batches: int = 1,
        accumulate: Callable[[], AbstractContextManager[Any]] | None = None,
        is_whole: bool = False,
        seed: int = 0,
        inputs: Sequence[Tensor] = (),
    ) -> None:
        self.name, self.model = name, model
        self._checkpoint, self._accumulate, self._is_whole = checkpoint, accumulate, is_whole
        self._seed, self._rows, self._micro_batches = seed, rows // micro_batches, micro_batches
        layers = list(model.layers)
        self._segments = [
            layers[i] if segment_layers == 1 else nn.Sequential(*layers[i : i + segment_layers])
            for i in range(0, len(layers), segment_layers)
        ]
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._leaves = [*inputs, *self.parameters]
        self._optimizer = torch.optim.AdamW(self.parameters, lr=1e-4)
        self._steps = 0
        self.losses: list[Tensor] = []
        self.happens: Callable[[int], None] = lambda _: None

    def step(self) -> None:
        """Runs one step of training. The gradients stay until the next step."""
        self.clear_gradients()
        self.forward_backward()
        self.optimize()

    def steps(self, count: int) -> None:
        """Runs `count` steps."""
        for _ in range(count):
            self.step()

    def clear_gradients(self) -> None:
        """Clears all gradients. It is the first part of a step."""
        for leaf in self._leaves:
            leaf.grad = None

    def forward_backward(self) -> None:
        """Runs a step without the optimizer. Gradients accumulate."""
        self._steps += 1
        self.losses = []
        if self._is_whole:
            self._run_whole()
            return
        with self._backwards() as backward:
            for number in range(self._micro_batches):
                loss = self.forward(self._seed + _DRAWS * self._steps + number)
                if self._micro_batches > 1:
                    loss = loss / self._micro_batches
                self.happens(number)
                backward(loss)
                self.losses.append(loss.detach())

    def optimize(self) -> None:
        """Runs the optimizer. It is the last part of a step."""
        self._optimizer.step()

    def forward(self, seed: int = 0) -> Tensor:
        """Runs forward of a micro-batch and returns the loss, a scalar."""
        torch.manual_seed(seed)  # All trainings draw the same dropout.
        x, target = self.model.begin(self._rows, seed)
        return self.model.loss(self._through(x), target)

    def _run_whole(self) -> None:
        assert self._accumulate is not None
        with self._accumulate() as block:
            for number in range(self._micro_batches):
                torch.manual_seed(self._seed + _DRAWS * self._steps + number)
                self.happens(number)
                self.losses.append(block.run(self._scaled_loss))

    def _scaled_loss(self) -> Tensor:
        x, target = self.model.begin(self._rows, self._seed)
        return self.model.loss(self._through(x), target) / self._micro_batches

    def _through(self, x: Tensor) -> Tensor:
        for segment in self._segments:
            x = segment(x) if self._checkpoint is None else self._checkpoint(segment, x)
        return x

    @contextmanager
    def _backwards(self) -> Iterator[Callable[[Tensor], None]]:
        """Yields the function that runs the backward of a micro-batch's loss."""
        if self._accumulate is None:
            yield Tensor.backward
        else:
            with self._accumulate() as block:
                yield block.backward

    def keep_gradients(self) -> None:
        """Allocates gradients of zeros, so that their memory is not counted as the next step's."""
        for leaf in self._leaves:
            leaf.grad = torch.zeros_like(leaf)

    def gradients(self) -> list[Tensor | None]:
        """Returns the gradients of the inputs and of each trainable parameter."""
        return [leaf.grad for leaf in self._leaves]

    @property
    def parameter_bytes(self) -> int:
        """Size of the trainable parameters, in bytes."""
        return sum(parameter.nbytes for parameter in self.parameters)


class BlockTraining(Training):
    """A chain of transformer blocks on one random input, as the benchmarks train it.

    Args:
        name: Name of the training in messages.
        blocks: Number of blocks in the chain.
        tokens: Batch size B and length T of the input.
        checkpoint: Function that runs a segment. None: without checkpointing.
        width: Width C of the blocks.
        dtype: Data type of parameters and input.
        is_adapted: Whether blocks are frozen and have LoRA adapters.
        **options: Further arguments of `Training`.

    Attributes:
        x: The input [B, T, C], which gets a gradient.
        module: The blocks as a module.
    """

    def __init__(
        self,
        name: str,
        blocks: int,
        tokens: tuple[int, int],
        checkpoint: Checkpoint | None,
        width: int = WIDTH,
        *,
        dtype: torch.dtype = torch.float32,
        is_adapted: bool = False,
        **options: Any,
    ) -> None:
        torch.manual_seed(_SEED)
        made: list[nn.Module] = [Block(width, DROPOUT) for _ in range(blocks)]
        if is_adapted:
            made = [adapt(block) for block in made]
        self.x = torch.randn(*tokens, width).to(measured(), dtype).requires_grad_()
        self.module = _Blocks([block.to(measured(), dtype) for block in made], self.x)
        super().__init__(name, self.module, checkpoint, inputs=[self.x], **options)


class _Blocks(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module], x: Tensor) -> None:
        super().__init__()
        self._blocks, self._x = nn.ModuleList(blocks), x

    @property
    def layers(self) -> list[nn.Module]:
        return list(self._blocks)

    def begin(self, rows: int, seed: int) -> tuple[Tensor, None]:
        return self._x, None

    def loss(self, x: Tensor, target: None) -> Tensor:
        return x.square().mean()

    def forward(self) -> Tensor:
        x = self._x
        for block in self._blocks:  # which a session may have wrapped since it was made
            x = block(x)
        return self.loss(x, None)


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


def take_turns(
    trainings: Sequence[Training], cores: Sequence[Core], plan: Plan, steps: int = 1, *, leads_in: bool = True
) -> Rounds:
    """Lets trainings take turns, and compares their gradients after each round.

    Args:
        trainings: The trainings in the order of the first round.
        cores: Cores that are checked for disturbances by other processes.
        plan: When the measurement ends.
        steps: Number of steps that are timed together.
        leads_in: Whether an untimed step runs before each turn.
    """
    variants = [
        Alternative(training.name, partial(training.steps, steps), training.step if leads_in else lambda: None)
        for training in trainings
    ]
    return interleave(variants, cores, plan, lambda: compare(trainings))


def compare(trainings: Sequence[Training]) -> None:
    """Raises UnequalGradientsError unless all trainings have bitwise the same gradients as the first."""
    first, *others = trainings
    for other in others:
        compare_gradients(f"{other.name} and {first.name}", other.gradients(), first.gradients())


def compare_gradients(what: str, ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> None:
    """Raises UnequalGradientsError unless both lists of gradients are bitwise equal."""
    if count := differing(ours, theirs):
        raise UnequalGradientsError(f"{count} of {len(ours)} gradients of {what} are not equal")


def differing(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> int:
    """Returns how many tensors differ from those of another list in their bits.

    So a NaN that both have computed is equal, as in a training that diverges, and 0 is not equal to -0.
    """
    return sum(not _is_equal(one, other) for one, other in zip(ours, theirs, strict=True))


def _is_equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    ours, theirs = (tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (one, other))
    return torch.equal(ours, theirs)

"""Functions people checkpoint, small: each gives a model and a step, and says what must not happen to it."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it

WIDTH = 32
Step = Callable[[Any, nn.Module], tuple[Tensor, Sequence[Tensor]]]


@dataclass(frozen=True)
class Case:
    """A step to be the same with and without checkpointing.

    Attributes:
        build: Makes the model.
        run: A step of it: loss and differentiable inputs.
        kept: Part of the reason why its activations stay on the trainer, empty where they don't.
        activations: Whether it takes activations even where gradients are asked for.
    """

    build: Callable[[], nn.Module]
    run: Step
    kept: str = ""
    activations: bool = False
    optimizer: Any = field(default=functools.partial(torch.optim.AdamW, lr=1e-2))


def blocks() -> nn.ModuleList:
    return nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True) for _ in range(2))


def inputs() -> tuple[Tensor, Tensor]:
    """A leaf and a non-leaf made from it, [2, 8, 32]."""
    x = torch.randn(2, 8, WIDTH, requires_grad=True)
    return x, x * 1.0


def stack(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    x, h = inputs()
    for block in model:
        h = checkpoint(block, h)
    return h.square().mean(), [x]


def autocast(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return stack(checkpoint, model)


def autocast_inside(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    def fn(block: nn.Module, h: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return block(h) + block(h)

    x, h = inputs()
    for block in model:
        h = checkpoint(fn, block, h).float()
    return h.square().mean(), [x]


def autocast_around_backward(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    x, h = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for block in model:
            h = checkpoint(block, h)
        gradient = torch.autograd.grad(h.float().square().mean(), x, retain_graph=True)[0]
    return h.float().square().mean() + gradient.sum() * 0, [x]


def keyword_mask(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    x, h = inputs()
    mask = torch.triu(torch.full((8, 8), float("-inf")), 1)
    for block in model:
        h = checkpoint(block, h, src_mask=mask, is_causal=True)
    return h.square().mean(), [x]


def closure(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    x, h = inputs()
    y = torch.randn(2, 8, WIDTH, requires_grad=True)
    z = y * 2
    for block in model:
        h = checkpoint(lambda t, block=block: block(t) + z * y, h)
        h = checkpoint(functools.partial(block, src_mask=None), h)
    return h.square().mean(), [x, y]


def nested(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    x, h = inputs()

    def fn(d: dict[str, Any]) -> dict[str, Any]:
        return {"a": [model[0](d["x"]), 3, None], "b": (model[1](d["x"]) * d["scale"], d["ids"])}

    outputs = checkpoint(fn, {"x": h, "scale": 2.5, "ids": torch.arange(3)})
    assert outputs["a"][1:] == [3, None]
    return outputs["a"][0].sum() + outputs["b"][0].square().mean(), [x]


def none_argument(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    x, h = inputs()

    def fn(h: Tensor, nothing: None, number: int, word: str) -> tuple[Tensor, None]:
        return model[0](h) * number + len(word), nothing

    output, nothing = checkpoint(fn, h, None, 3, "word")
    assert nothing is None
    return output.square().mean(), [x]


def set_items(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    x, h = inputs()

    def fn(h: Tensor) -> Tensor:
        out = torch.zeros(2, 8, WIDTH)
        out[:, ::2] = model[0](h)[:, ::2]
        out[0].mul_(2.0)
        return out * h

    return checkpoint(fn, h).square().mean(), [x]


def view_output(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    x, h = inputs()
    flat, moved = checkpoint(lambda h: (h.view(2, -1), model[0](h).transpose(0, 1)), h)
    return flat.sum() + moved.square().mean(), [x]


def writes_argument(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    x, h = inputs()

    def fn(h: Tensor) -> Tensor:
        h.mul_(2)
        return model[0](h)

    return checkpoint(fn, h).square().mean() + h.sum(), [x]


def auxiliary_loss(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    x, h = inputs()

    def fn(h: Tensor) -> Tensor:
        y = model[0](h)
        model.auxiliary = [y.square().mean()]
        return model[1](y)

    loss = checkpoint(fn, h).square().mean() + model.auxiliary[0]
    del model.auxiliary
    return loss, [x]


def own_randomness(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    x, h = inputs()
    generator = torch.Generator().manual_seed(3)

    def fn(h: Tensor) -> Tensor:
        noise = torch.rand(8, WIDTH, generator=generator)
        torch.manual_seed(5)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(6)
            noise = noise + torch.randn(WIDTH)
        return F.dropout(model[0](h * noise) * torch.rand(WIDTH), 0.3)

    return checkpoint(fn, h).square().mean(), [x]


def value_read_into_python(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    x, h = inputs()

    def fn(h: Tensor) -> Tensor:
        scale = float(h.sum().item())
        return model[0](h) * scale if scale > 0 else model[1](h) * h.tolist()[0][0][0]

    return checkpoint(fn, h).square().mean(), [x]


def routing(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    x, h = inputs()

    def fn(h: Tensor) -> Tensor:
        weights, experts = torch.topk(h.mean(1).softmax(-1)[:, :2], 1)
        rows = [model[int(expert)](h[row : row + 1]) * weights[row] for row, expert in enumerate(experts[:, 0])]
        return torch.cat(rows)

    return checkpoint(fn, h).square().mean(), [x]


def chunked(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    x, h = inputs()
    left, right = checkpoint(lambda h: model[0](h).chunk(2, -1), h)
    return left.square().sum() + right.sum(), [x]


def straight_through(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    x, h = inputs()
    for block in model:
        h = checkpoint(lambda h, block=block: _Round.apply(block(h) * 4) / 4, h)
    return h.square().mean(), [x]


def interior_hook(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    x, h = inputs()

    def fn(h: Tensor) -> Tensor:
        y = model[0](h)
        y.register_hook(lambda gradient: gradient * 2)
        return model[1](y)

    return checkpoint(fn, h).square().mean(), [x]


def written_by_numpy(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    x, h = inputs()

    def fn(h: Tensor) -> Tensor:
        scale = torch.empty(8, WIDTH)
        scale.numpy()[...] = 3
        return model[0](h * scale)

    return checkpoint(fn, h).square().mean(), [x]


def data_alias(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    x, h = inputs()

    def fn(h: Tensor) -> Tensor:
        y = model[0](h)
        return y * y.data

    return checkpoint(fn, h).square().mean(), [x]


def foreign_hooks(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    x, h = inputs()

    def fn(h: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return model[0](h)

    return checkpoint(fn, h).square().mean(), [x]


def torch_checkpoint_inside(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    from torch.utils.checkpoint import checkpoint as torch_checkpoint

    x, h = inputs()
    fn = lambda h: model[1](torch_checkpoint(model[0], h, use_reentrant=False))  # noqa: E731
    return checkpoint(fn, h).square().mean(), [x]


def own_checkpoint_inside(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    x, h = inputs()
    return checkpoint(lambda h: model[1](checkpoint(model[0], h)), h).square().mean(), [x]


def toggled_gradient(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    x, h = inputs()

    def fn(h: Tensor) -> Tensor:
        y = model[0](h).detach().requires_grad_()
        with torch.no_grad():
            scale = model[1](h)
        return y * scale + h

    return checkpoint(fn, h).square().mean(), [x]


def partial_backward(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    x, h = inputs()
    first, second = checkpoint(lambda h: (model[0](h), model[1](h)), h)
    torch.autograd.grad(first.sum(), x, retain_graph=True)
    first.sum().backward(retain_graph=True, inputs=[x])
    return second.square().mean(), [x]


def gradient_inside(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    x, h = inputs()

    def fn(h: Tensor) -> Tensor:
        y = model[0](h)
        (slope,) = torch.autograd.grad(y.tanh().sum(), h, create_graph=True)
        return model[1](y * slope)

    return checkpoint(fn, h).square().mean(), [x]


def backward_inside(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    x, h = inputs()

    def fn(h: Tensor) -> Tensor:
        probe = h.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model[0](probe).square().sum(), probe)
        return model[1](h + slope)

    return checkpoint(fn, h).square().mean(), [x]


class Shared(nn.Module):
    """Decoder-like layers that share encoder states, a projection, and a norm by hand, as T5's do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True) for _ in range(3))
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.encode = nn.Linear(WIDTH, WIDTH)

    def block(self, layer: nn.Module, h: Tensor, states: Tensor) -> Tensor:
        norm = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.tied(layer(norm, states, states)[0]) + h + self.tied(norm)


def shared(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    x, h = inputs()
    states = model.encode(torch.randn(2, 8, WIDTH))
    for layer in model.layers:
        h = checkpoint(model.block, layer, h, states)
    return h.square().mean() + states.sum() * 0.01, [x]


def convolutions() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    second = nn.Sequential(nn.Conv2d(8, 8, 3), nn.InstanceNorm2d(8, track_running_stats=True), nn.Dropout2d(0.2))
    return nn.Sequential(first, second)


def images(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    h = x * 1
    for part in model:
        h = checkpoint(part, h)
    return h.square().mean(), [x]


def recurrent() -> nn.Module:
    return nn.ModuleList(nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2, batch_first=True) for _ in range(2))


def states(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    x, h = inputs()
    for layer in model:
        h, (last, cell) = checkpoint(layer, h)
    return h.square().mean() + last.sum() + cell.sum(), [x]


class Averaging(nn.Module):
    """Reads a buffer that it also updates."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) - self.mean
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean((0, 1)), alpha=0.1)
        return y * self.mean.clone()


def averaging(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    x, h = inputs()
    return checkpoint(model, checkpoint(model, h)).square().mean(), [x]


def averaging_with_rounding(checkpoint: Any, model: Any) -> tuple[Tensor, Sequence[Tensor]]:
    x, h = inputs()
    return checkpoint(lambda h: _Round.apply(model(h) * 4), h).square().mean(), [x]


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 0.5


CASES = {
    "stack": Case(blocks, stack),
    "stack under SGD": Case(blocks, stack, optimizer=functools.partial(torch.optim.SGD, lr=0.1)),
    "fused AdamW": Case(blocks, stack, optimizer=functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)),
    "bf16 autocast": Case(blocks, autocast),
    "bf16 autocast, fused AdamW": Case(
        blocks, autocast, optimizer=functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)
    ),
    "autocast inside": Case(blocks, autocast_inside),
    "autocast around backward": Case(blocks, autocast_around_backward),
    "keyword mask": Case(blocks, keyword_mask),
    "closure and partial": Case(blocks, closure),
    "nested structures": Case(blocks, nested),
    "None and numbers": Case(blocks, none_argument),
    "written slices": Case(blocks, set_items),
    "view of an argument": Case(blocks, view_output, activations=True),
    "argument written to": Case(blocks, writes_argument, activations=True),
    "auxiliary loss": Case(blocks, auxiliary_loss, activations=True),
    "randomness of its own": Case(blocks, own_randomness),
    "values read into Python": Case(blocks, value_read_into_python),
    "expert routing": Case(blocks, routing),
    "chunked output": Case(blocks, chunked, activations=True),
    "partial backward": Case(blocks, partial_backward),
    "shared states and weights": Case(Shared, shared),
    "convolutions and norms": Case(convolutions, images),
    "recurrent": Case(recurrent, states),
    "buffer read and updated": Case(Averaging, averaging),
    "checkpoint inside": Case(blocks, own_checkpoint_inside),
    "straight-through": Case(blocks, straight_through, kept="custom autograd function"),
    "straight-through with a buffer": Case(Averaging, averaging_with_rounding, activations=True),
    "hook inside": Case(blocks, interior_hook, activations=True),
    "memory NumPy wrote": Case(blocks, written_by_numpy, kept="no op wrote"),
    "alias by .data": Case(blocks, data_alias, kept="alias"),
    "foreign hooks": Case(blocks, foreign_hooks, kept="saved-tensor hooks"),
    "torch's checkpoint inside": Case(blocks, torch_checkpoint_inside, kept="custom autograd function"),
    "gradient inside": Case(blocks, gradient_inside, kept="is not on the list"),
    "backward inside": Case(blocks, backward_inside, kept="no recorded op made"),
    "requires_grad inside": Case(blocks, toggled_gradient),
}

"""Small modules put together at random from what people write, and a step with them under random settings."""

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it

from support.bits import plainly, seed_generators

BATCH, LENGTH, WIDTH = 3, 4, 8


class Choices:
    """Numbers that are drawn before the call, so that torch.compile can follow what they choose."""

    def __init__(self, drawn: Sequence[float]) -> None:
        self.drawn, self.taken = drawn, 0

    def random(self) -> float:
        self.taken += 1
        return self.drawn[(self.taken - 1) % len(self.drawn)]

    def below(self, end: int) -> int:
        return int(self.random() * end)

    def between(self, least: float, most: float) -> float:
        return least + self.random() * (most - least)


class Scratch:
    """What the parts of one call work on: tensors of shape [BATCH, LENGTH, WIDTH], the arguments first."""

    def __init__(self, owner: "RandomModule", x: Tensor, options: dict[str, Any], choices: Choices) -> None:
        self.owner, self.options, self.choices, self.pool = owner, options, choices, [x]

    def pick(self) -> Tensor:
        # Late ones more often: modules are deep rather than wide.
        return self.pool[max(self.choices.below(len(self.pool)), self.choices.below(len(self.pool)))]

    def own(self) -> Tensor:
        """A pick in the dtype of the parameters, which autocast and others may have left."""
        return self.pick().to(self.owner.shared.dtype)

    def add(self, tensor: Tensor) -> None:
        self.pool.append(tensor)


Part = Callable[[Scratch, nn.Module | None], None]


def _layer(layer: nn.Module, s: Scratch) -> Tensor:
    return layer(s.own())


def _channels_first(layer: nn.Module, s: Scratch) -> Tensor:
    return layer(s.own().transpose(1, 2)).transpose(1, 2)


def _attention(layer: nn.Module, s: Scratch) -> Tensor:
    return layer(s.own(), s.own(), s.own(), need_weights=False)[0]


def _recurrent(layer: nn.Module, s: Scratch) -> Tensor:
    return layer(s.own())[0]


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Scratch], Tensor]]] = {
    "linear": (lambda: nn.Linear(WIDTH, WIDTH), _layer),
    "bilinear": (lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH), lambda layer, s: layer(s.own(), s.own())),
    "layer norm": (lambda: nn.LayerNorm(WIDTH), _layer),
    "rms norm": (lambda: nn.RMSNorm(WIDTH), _layer),
    "dropout": (lambda: nn.Dropout(0.3), _layer),
    "conv": (lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1), _channels_first),
    "batch norm": (lambda: nn.BatchNorm1d(WIDTH), _channels_first),
    "group norm": (lambda: nn.GroupNorm(2, WIDTH), _channels_first),
    "feature dropout": (lambda: nn.Dropout1d(0.3), _channels_first),
    "attention": (lambda: nn.MultiheadAttention(WIDTH, 2, 0.1, batch_first=True), _attention),
    "recurrent": (lambda: nn.GRU(WIDTH, WIDTH, batch_first=True), _recurrent),
    "prelu": (nn.PReLU, _layer),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), _layer),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), _layer),
    "embedding": (lambda: nn.Embedding(5, WIDTH), lambda layer, s: layer(s.options["ids"])),
}


def _inplace_view(s: Scratch) -> Tensor:
    h = s.pick() * 1
    h[:, s.choices.below(LENGTH)].mul_(s.choices.between(0.5, 2))
    return h


def _inplace_on_pool(s: Scratch) -> Tensor:
    """May write into what another op needs: then it fails without checkpointing too."""
    h = s.pick()
    if h is s.pool[0] or h.is_leaf:
        h = h + 1
    return h.mul_(0.5)


def _written_argument(s: Scratch) -> Tensor:
    with torch.no_grad():
        s.options["extra"].add_(0.1)
    return s.pick() * s.options["extra"]


def _route(s: Scratch) -> Tensor:
    x = s.pick()
    values, places = x.softmax(-1).topk(2, -1)
    return torch.zeros_like(x).scatter(-1, places, values)


def _branch(s: Scratch) -> Tensor:
    x = s.pick()
    return x.sin() if x.sum().item() > 0 else x.cos()


def _running_mean(s: Scratch) -> Tensor:
    x = s.pick()
    out = x - s.owner.mean
    with torch.no_grad():
        s.owner.mean.lerp_(x.detach().to(s.owner.mean.dtype).mean((0, 1)), 0.1)
    return out


def _auxiliary(s: Scratch) -> Tensor:
    x = s.pick().tanh()
    s.owner.auxiliary = x.square().mean()
    return x


def _own_generator(s: Scratch) -> Tensor:
    generator = torch.Generator().manual_seed(s.choices.below(100))
    x = s.pick()
    return x + torch.randn(x.shape, generator=generator, dtype=torch.float32).to(x.dtype)


def _autocast(s: Scratch) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=s.choices.random() < 0.7):
        return F.linear(s.own(), s.owner.shared) + F.linear(s.own(), s.owner.shared)


def _attention_over(s: Scratch) -> Tensor:
    query, key = s.own(), s.own()
    return F.scaled_dot_product_attention(query, key, key)


def _without_gradient(s: Scratch) -> Tensor:
    with torch.no_grad():
        gate = s.pick().sigmoid()
    return s.pick() * gate


def _inner_gradient(s: Scratch) -> Tensor:
    with torch.enable_grad():
        x = s.pick().detach().requires_grad_()
        (gradient,) = torch.autograd.grad((F.linear(x.to(s.owner.shared.dtype), s.owner.shared) ** 2).sum(), x)
    return s.pick() + gradient


def _rows(s: Scratch) -> Tensor:
    x = s.pick().clone()
    x[s.options["ids"] > 2] = 0.5
    return x


OPS: dict[str, Callable[[Scratch], Tensor]] = {
    "gelu": lambda s: F.gelu(s.pick()),
    "relu": lambda s: F.relu(s.pick() * 1, inplace=True),
    "softmax": lambda s: s.pick().softmax(s.choices.below(3)),
    "add": lambda s: s.pick() + s.pick(),
    "multiply": lambda s: s.pick() * s.pick(),
    "scale": lambda s: s.pick() * s.choices.between(-2, 2),
    "shared weight": lambda s: F.linear(s.own(), s.owner.shared),
    "tied weight": lambda s: s.own() @ s.owner.shared,
    "attention over": _attention_over,
    "masked": lambda s: s.pick().masked_fill(s.options["mask"], 0.0),
    "where": lambda s: torch.where(s.options["mask"], s.pick(), s.pick()),
    "extra": lambda s: s.pick() + s.options["extra"],
    "noise": lambda s: s.pick() + torch.randn_like(s.pick()),
    "dropped": lambda s: F.dropout(s.pick(), 0.2, s.owner.training),
    "chunks": lambda s: torch.cat(s.pick().chunk(2, -1)[::-1], -1),
    "narrowed": lambda s: s.pick().narrow(1, 0, 1).expand(BATCH, LENGTH, WIDTH),
    "transposed": lambda s: s.pick().mT.contiguous().reshape(BATCH, LENGTH, WIDTH),
    "flipped": lambda s: s.pick().flip(1).roll(1, 2),
    "cumulated": lambda s: s.pick().cumsum(1),
    "unbound": lambda s: torch.stack(s.pick().unbind(1)[::-1], 1),
    "einsum": lambda s: torch.einsum("btw,bsw->bts", s.own(), s.own()) @ s.own(),
    "detached": lambda s: s.pick() + s.pick().detach(),
    "normalised": lambda s: F.normalize(s.pick(), dim=-1),
    "complex": lambda s: torch.fft.ifft(torch.fft.fft(s.pick().float(), dim=1), dim=1).real,
    "to and fro": lambda s: s.pick().to(torch.float64).exp().clamp(max=9).to(s.pick().dtype),
    "in place on a view": _inplace_view,
    "in place": _inplace_on_pool,
    "written argument": _written_argument,
    "route": _route,
    "branch": _branch,
    "running mean": _running_mean,
    "auxiliary": _auxiliary,
    "own generator": _own_generator,
    "autocast": _autocast,
    "without gradient": _without_gradient,
    "inner gradient": _inner_gradient,
    "rows": _rows,
}
NAMES = sorted((*LAYERS, *OPS))


class RandomModule(nn.Module):
    """Runs the named parts in order; what each works on is drawn with a seed."""

    mean: Tensor
    shared: nn.Parameter

    def __init__(self, names: Sequence[str], seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.names, self.drawn = tuple(names), [rng.random() for _ in range(64)]
        self.shared = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.layers = nn.ModuleList([LAYERS[name][0]() for name in names if name in LAYERS])
        self.auxiliary: Tensor | None = None

    def forward(self, x: Tensor, options: dict[str, Any], *, form: str = "tensor") -> Any:
        """One tensor, or several in the given form."""
        scratch = Scratch(self, x, options, Choices(self.drawn))
        layers = iter(self.layers)
        for name in self.names:
            made = LAYERS[name][1](next(layers), scratch) if name in LAYERS else OPS[name](scratch)
            scratch.add(made)
        *_, before, last = [None, *scratch.pool]
        match form:
            case "tuple":
                return last, before, None
            case "dict":
                return {"last": last, "others": [before, 3]}
            case "view":
                return last.flatten(1), last
        return last


@dataclass(frozen=True)
class Setting:
    """How a step is made.

    Attributes:
        parts: Of each module.
        seed: Of weights, inputs and choices.
        dtype: Of input and parameters.
        autocast: bfloat16 around forward.
        training: Mode of the modules.
        leaf: The input is a leaf rather than some op's result.
        differentiable: The input takes gradients.
        form: Of the outputs.
        again: The last module is called twice.
        twice: Backward runs twice.
        overwritten: The input is overwritten after forward.
        steps: Training steps, with a fused optimizer between.
    """

    parts: tuple[tuple[str, ...], ...]
    seed: int
    dtype: torch.dtype
    autocast: bool
    training: bool
    leaf: bool
    differentiable: bool
    form: str
    again: bool
    twice: bool
    overwritten: bool
    steps: int


def run(setting: Setting, checkpoint: Callable[..., Any]) -> list[Tensor | None] | str:
    """All that must be equal: losses, gradients, buffers, generator state; or what kind of error ended it."""
    seed_generators(setting.seed)
    modules = nn.ModuleList([RandomModule(names, setting.seed + i) for i, names in enumerate(setting.parts)])
    modules.to(setting.dtype).train(setting.training)
    optimizer = torch.optim.AdamW(modules.parameters(), fused=True)
    results: list[Tensor | None] = []
    try:
        for _ in range(setting.steps):
            results += _step(setting, modules, checkpoint)
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        return "in place" if "inplace operation" in str(error) else str(error)
    return [*results, *modules.buffers(), torch.get_rng_state()]


def _step(setting: Setting, modules: nn.ModuleList, checkpoint: Callable[..., Any]) -> list[Tensor | None]:
    shape = (BATCH, LENGTH, WIDTH)
    root = torch.randn(shape, dtype=setting.dtype, requires_grad=setting.differentiable)
    x = root if setting.leaf else root * 1
    options: dict[str, Any] = {
        "mask": torch.rand(shape) > 0.5,
        "ids": torch.randint(5, shape[:2]),
        "extra": torch.randn(shape).to(setting.dtype),
        "nothing": None,
    }
    losses: list[Tensor] = []
    context = torch.autocast("cpu", torch.bfloat16) if setting.autocast else contextlib.nullcontext()
    with context:
        h = x
        for module in (*modules, *modules[-1:]) if setting.again else modules:
            module.auxiliary = None
            # Its own for each call: who writes to the argument of an earlier one gets an error, as in torch.
            own = {**options, "extra": options["extra"].clone()}
            returned = checkpoint(module, h, own, form=setting.form)
            outputs = [t for t in torch.utils._pytree.tree_leaves(returned) if isinstance(t, Tensor)]
            losses += [t.float().square().mean() for t in (*outputs[1:], module.auxiliary) if t is not None]
            h = outputs[0].reshape(shape)
    loss = torch.stack([h.float().square().mean(), *losses]).sum()
    if setting.overwritten and checkpoint is not plainly and not x.requires_grad:
        x.data.fill_(9)  # unseen by version counters; a segment has the value of forward
    if loss.requires_grad:
        loss.backward(retain_graph=setting.twice)
        if setting.twice:
            loss.backward()
    return [loss.detach(), *(None if t.grad is None else t.grad.clone() for t in (root, *modules.parameters()))]

"""Things that users write in a model and that once kept its segments on the trainer, each as a module and its input."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributions as draws
from torch.nn import functional as F  # noqa: N812  torch's own name for it

WIDTH = 8
Make = Callable[[], tuple[nn.Module, Tensor]]


class Construct(nn.Module):
    """A linear layer and something else, which a function applies.

    Args:
        apply: Takes this module and its input, and returns the output.
        other: The module besides the linear layer.
        width: The width of the linear layer's output.
    """

    def __init__(
        self, apply: Callable[[Any, Tensor], Tensor], other: nn.Module | None = None, width: int = WIDTH
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, width)
        self.other = other
        self.apply_to = apply

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_to(self, x)


def _make(apply: Callable[[Any, Tensor], Tensor], other: nn.Module | None = None, *shape: int, width: int = 8) -> Make:
    return lambda: (Construct(apply, other, width), torch.randn(shape or (4, WIDTH), requires_grad=True))


def _positive(module: Any, x: Tensor) -> Tensor:
    return F.softplus(module.linear(x)) + 0.1


def _packed(kind: Callable[..., nn.RNNBase], **options: Any) -> Make:
    def apply(module: Any, x: Tensor) -> Tensor:
        lengths = (x.detach().sum(2) < 1e9).sum(1) - torch.arange(3)  # computed inside
        pack = nn.utils.rnn.pack_padded_sequence(module.linear(x), lengths, batch_first=True, enforce_sorted=False)
        output, _ = nn.utils.rnn.pad_packed_sequence(module.other(pack)[0], batch_first=True)
        return output

    return _make(apply, kind(WIDTH, WIDTH, batch_first=True, **options), 3, 5, WIDTH)


def _ctc(lengths: Callable[[list[int]], Any]) -> Make:
    targets = torch.tensor([[1, 2, 2], [3, 1, -1]])
    loss = nn.CTCLoss(reduction="none", zero_infinity=True)
    return _make(
        lambda module, x: loss(module.linear(x).log_softmax(-1), targets, lengths([6, 5]), lengths([3, 2])),
        None,
        6,
        2,
        WIDTH,
    )


def _into_result(module: Any, x: Tensor) -> Tensor:
    y, scale = module.linear(x), torch.empty(4, WIDTH)
    with torch.no_grad():
        torch.div(y, 2.0, out=scale)
        torch.add(scale, x, out=scale)
    return y * scale


def _lists(module: Any, x: Tensor) -> Tensor:
    parts = torch._foreach_add([module.linear(x), x * 2], [x, x])
    torch._foreach_mul_(parts, 2.0)
    return torch.stack(torch._foreach_norm(parts)).sum() * torch.tanh(parts[0] + parts[1])


def _running_mean(module: Any, x: Tensor) -> Tensor:
    y = module.linear(x).tanh()
    with torch.no_grad():
        torch._foreach_lerp_([module.other.mean], [y.mean(0)], 0.1)
    return y - module.other.mean.clone()


def _with_buffer() -> nn.Module:
    module = nn.Module()
    module.register_buffer("mean", torch.zeros(WIDTH))
    return module


def _integers(module: Any, x: Tensor) -> Tensor:
    y = module.linear(x)
    whole = (y.detach() * 20).to(torch.int8)
    return torch._int_mm(whole, whole.t().contiguous()).float() @ y


def _binomial(module: Any, x: Tensor) -> Tensor:
    p = module.linear(x).sigmoid()
    return x * draws.Binomial(10, p.detach()).sample() + draws.Binomial(10, p).log_prob(torch.full_like(x, 3.0))


def _mask(module: Any, x: Tensor) -> Tensor:
    places = torch.arange(4)
    row = torch.vmap(torch.ge, in_dims=(None, 0))
    return torch.vmap(row, in_dims=(0, None))(places, places).float() @ module.linear(x)


def _ensemble(module: Any, x: Tensor) -> Tensor:
    weights = torch.stack([layer.weight for layer in module.other])
    biases = torch.stack([layer.bias for layer in module.other])
    batched = torch.vmap(lambda weight, bias, x: F.gelu(F.linear(x, weight, bias)), in_dims=(0, 0, None))
    return batched(weights, biases, module.linear(x)).sum(0)


def _computed_place(module: Any, x: Tensor) -> Tensor:
    y = module.linear(x).tanh()
    parts = torch.tensor_split(y, torch.tensor([1, 3]) + (x.detach().sum() > 1e9))
    return torch.narrow(y, 0, (x.detach() < 1e9).sum() // 32, 3) * 2 + parts[1].sum()


def _hooked_window(module: Any, x: Tensor) -> Tensor:
    window = torch.hann_window(16)
    spectrum = torch.stft(module.linear(x), 16, window=window, return_complex=True)
    return spectrum.abs().sum((1, 2)) + torch.istft(spectrum, 16, window=window).sum(1)


def _hooked(register: str, hook: Callable[..., Any]) -> Make:
    def make() -> tuple[nn.Module, Tensor]:
        inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        getattr(inner, register)(hook)
        construct = Construct(lambda module, x: module.other(module.linear(x).tanh()).tanh() * x, inner)
        return construct, torch.randn(4, WIDTH, requires_grad=True)

    return make


def _fixed_leaf(module: Any, x: Tensor) -> Tensor:
    bias = torch.zeros(4, WIDTH)
    bias.requires_grad = True
    return module.linear(x) * (x + bias)


def _detached_leaf(module: Any, x: Tensor) -> Tensor:
    y = module.linear(x)
    return y * y.detach().requires_grad_() + torch.ones(WIDTH, requires_grad=True)


CONSTRUCTS: dict[str, Make] = {
    "CTC, lengths as a list": _ctc(lambda lengths: lengths),
    "CTC, lengths as a tensor": _ctc(torch.tensor),
    "packed LSTM": _packed(nn.LSTM),
    "packed LSTM of two layers": _packed(nn.LSTM, num_layers=2, bidirectional=True, dropout=0.2),
    "packed GRU": _packed(nn.GRU),
    "packed RNN": _packed(nn.RNN),
    "packed RNN, ReLU": _packed(nn.RNN, nonlinearity="relu"),
    "spectral norm": _make(
        lambda module, x: module.other(module.linear(x)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    ),
    "out=": _make(_into_result),
    "embedding, max_norm": _make(
        lambda module, x: module.other(torch.tensor([1, 3, 3, 2])) * module.linear(x),
        nn.Embedding(5, WIDTH, max_norm=0.5),
    ),
    "fake quantization": _make(
        lambda module, x: torch.fake_quantize_per_tensor_affine(module.linear(x), 0.01, 0, -128, 127)
    ),
    "fake quantization by channel": _make(
        lambda module, x: torch.fake_quantize_per_channel_affine(
            module.linear(x), torch.full((WIDTH,), 0.01), torch.zeros(WIDTH, dtype=torch.int32), 1, -128, 127
        )
    ),
    "observer and fake quantization": _make(
        lambda module, x: module.other(module.linear(x)), torch.ao.quantization.FusedMovingAvgObsFakeQuantize()
    ),
    "FakeQuantize": _make(
        lambda module, x: module.other(module.linear(x)),
        torch.ao.quantization.FakeQuantize(
            torch.ao.quantization.MovingAverageMinMaxObserver, quant_min=0, quant_max=255
        ),
    ),
    "Gamma": _make(lambda module, x: draws.Gamma(_positive(module, x), x.abs() + 0.1).rsample()),
    "Gamma, sample": _make(lambda module, x: x * draws.Gamma(_positive(module, x), 1.0).sample()),
    "StudentT": _make(lambda module, x: draws.StudentT(_positive(module, x) + 1, x).rsample()),
    "Dirichlet, sample": _make(lambda module, x: x * draws.Dirichlet(_positive(module, x)).sample()),
    "Poisson": _make(lambda module, x: x * draws.Poisson(_positive(module, x)).sample()),
    "Binomial": _make(_binomial),
    "hann_window": _make(_hooked_window, width=64),
    "special.erfinv": _make(lambda module, x: torch.special.erfinv(module.linear(x).tanh() * 0.9)),
    "special.expit": _make(lambda module, x: torch.special.expit(module.linear(x))),
    "linalg.matrix_exp": _make(lambda module, x: torch.linalg.matrix_exp(module.linear(x) * 0.1), None, 8, WIDTH),
    "foreach": _make(_lists),
    "foreach in place": _make(_running_mean, _with_buffer()),
    "_int_mm": _make(_integers, None, 32, WIDTH),
    "narrow and tensor_split by tensors": _make(_computed_place),
    "vmap": _make(lambda module, x: torch.vmap(lambda row: module.linear(row).tanh() * row)(x)),
    "vmap of vmap, a mask": _make(_mask),
    "vmap over weights": _make(_ensemble, nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))),
    "vmap, other draws for each": _make(
        lambda module, x: torch.vmap(lambda row: F.dropout(module.linear(row), 0.3), randomness="different")(x) * x
    ),
    "vmap, the same draws for each": _make(
        lambda module, x: torch.vmap(lambda row: F.dropout(module.linear(row), 0.3), randomness="same")(x) * x
    ),
    "full backward hook": _hooked("register_full_backward_hook", lambda module, given, _: (given[0] * 2,)),
    "full backward pre-hook": _hooked("register_full_backward_pre_hook", lambda module, given: (given[0] * 2,)),
    "requires_grad of a tensor made inside": _make(_fixed_leaf),
    "requires_grad_ of a detached tensor": _make(_detached_leaf),
}
"""Constructs that run on workers, in both modes."""

INSIDE = {"foreach", "full backward hook", "full backward pre-hook"}
"""Those of which activations are returned in both modes, because a part of their graph must stay on the trainer."""

KEPT: dict[str, tuple[Make, str]] = {
    "sparse matrix": (
        _make(lambda module, x: torch.sparse.mm(torch.eye(4).to_sparse(), module.linear(x))),
        "aten.to_sparse",
    ),
    "Dirichlet": (_make(lambda module, x: draws.Dirichlet(_positive(module, x)).rsample()), "_Dirichlet"),
    "out= of another size": (
        _make(lambda module, x: module.linear(x).tanh() * torch.add(x.detach(), 1, out=torch.empty(0))),
        "its out= is of size",
    ),
    "out= of another op": (
        _make(lambda module, x: module.linear(x).tanh() * torch.exp(x.detach(), out=torch.empty(4, WIDTH))),
        "aten.exp.out",
    ),
    "segment_reduce": (
        _make(
            lambda module, x: torch.segment_reduce(module.linear(x).exp(), "sum", lengths=torch.tensor([1, 3])).log()
        ),
        "aten.segment_reduce",
    ),
    "antialiased interpolation": (
        _make(lambda module, x: F.interpolate(module.linear(x)[None, None], (2, 4), mode="bilinear", antialias=True)),
        "_upsample_bilinear2d_aa",
    ),
    "forward-mode derivative": (
        _make(lambda module, x: torch.func.jvp(lambda x: module.linear(x).tanh(), (x,), (x,))[1]),
        "_make_dual",
    ),
    "Parameter made inside": (_make(lambda module, x: module.linear(x) * nn.Parameter(torch.ones(8))), "alias"),
    "VonMises": (_make(lambda module, x: x * draws.VonMises(module.linear(x), torch.ones(())).sample()), "no op wrote"),
}
"""Constructs that keep activations on the trainer, with a part of the reason."""

"""Measures what a segment of a known program adds to the forward of a tiny block, beside what a recorded one adds."""

from functools import partial
from time import thread_time

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it

from backhaul_lab.bench.outcomes import Outcome, of_counts
from backhaul_lab.harness.rounds import Alternative, Plan, interleave
from backhaul_lab.harness.stage import Stage
from backhaul_lab.harness.training import Checkpoint, compare_gradients

BLOCKS, WIDTH, TOKENS, HEADS = 8, 64, 8, 4
PLAN = Plan(most=40, warm=6, limit_s=40.0)


class LlamaBlock(nn.Module):
    """Attention with rotated queries and keys, and a gated MLP, of some 58 ATen ops, as Transformers writes it."""

    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(WIDTH) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        angles = torch.outer(torch.arange(TOKENS), 1e4 ** -torch.linspace(0, 1, WIDTH // HEADS // 2)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        """Maps [1, TOKENS, WIDTH] to the same shape."""
        y = self._norm(x, 0)
        query, key, value = (
            of(y).view(1, TOKENS, HEADS, WIDTH // HEADS).transpose(1, 2) for of in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(self._turned(query), self._turned(key), value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().reshape(1, TOKENS, WIDTH))
        y = self._norm(x, 1)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]

    def _norm(self, x: Tensor, number: int) -> Tensor:
        y = x.to(torch.float32)
        scaled: Tensor = self.scales[number] * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return scaled

    def _turned(self, x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * self.cos + torch.cat((-high, low), -1) * self.sin


def measure(stage: Stage) -> list[Outcome]:
    """Measures what known calls add, with both checks. The least times of the rounds count: the work is the same."""
    session = stage.session(returns="gradients")
    torch.manual_seed(0)
    blocks = nn.ModuleList(LlamaBlock() for _ in range(BLOCKS))
    x = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    ways: dict[str, Checkpoint] = {
        "eager": lambda function, *args: function(*args),
        "recorded": partial(session.checkpoint, graphs="off"),
        "graph": partial(session.checkpoint, graphs="eager"),
        "outputs": partial(session.checkpoint, graphs="eager", determinism_check="outputs"),
    }
    gradients_of: dict[str, list[Tensor]] = {}

    def forward_s(way: str) -> float:
        blocks.zero_grad()
        x.grad, y, began_s = None, x, thread_time()
        for block in blocks:
            y = ways[way](block, y)
        took_s = thread_time() - began_s
        y.square().mean().backward()  # type: ignore[no-untyped-call]
        gradients_of[way] = [one.grad for one in (x, *blocks.parameters()) if one.grad is not None]
        return took_s

    def compare() -> None:
        for way, gradients in gradients_of.items():
            compare_gradients(f'"{way}" and "eager"', gradients, gradients_of["eager"])

    rounds = interleave([Alternative(way, partial(forward_s, way)) for way in ways], [stage.trainer], PLAN, compare)
    least = {way: min(taken[way] for taken, _ in rounds.measured) for way in ways}
    recorded_s = least["recorded"] - least["eager"]
    note = ", ".join(f"{way} {seconds / BLOCKS * 1e3:.2f} ms" for way, seconds in least.items())
    figures = {"graph_added": "graph", "graph_added_outputs": "outputs"}
    return [of_counts(name, [(least[way] - least["eager"]) / recorded_s], note) for name, way in figures.items()]

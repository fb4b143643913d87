"""The models of experiments: the demo's, one whose time is all transfers, and what a model of the user's own must have.

Shapes: B rows, T length, C width.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it

from backhaul.demo.corpus import batch, standard_library
from backhaul.demo.model import LanguageModel
from backhaul_lab.experiment.plan.spec import DEMO
from backhaul_lab.harness.training import ChainModel


class DemoModel(nn.Module):
    """The language model of `backhaul demo` on the source of Python's standard library.

    Args:
        layers: Number of transformer blocks.
        width: Width C, a multiple of 32.
        context: Length T of a row in bytes.
        dtype: Data type of parameters and activations.
    """

    def __init__(self, layers: int, width: int, context: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._model = LanguageModel(layers, width, context).to(dtype)
        self._context = context
        self._corpus = standard_library()
        self.layers = list(self._model.blocks)

    def begin(self, rows: int, seed: int) -> tuple[Tensor, Tensor]:
        """Returns embedded text [B, T, C] and the bytes that follow, int64 [B, T]."""
        text, target = batch(self._corpus, rows, self._context, seed)
        return self._model.bytes(text) + self._model.positions(torch.arange(self._context)), target

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        """Returns the cross entropy of the next byte."""
        logits = self._model.head(self._model.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())


class _Reading(nn.Module):
    """Adds a scaled sum of large data of its own to its input, which takes almost no time and needs all of the data."""

    data: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("data", torch.linspace(-1, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        """Maps a scalar to a scalar."""
        return x + self.scale * self.data.sum()


class WideModel(nn.Module):
    """A chain whose layers read large data that change in every step, so that links are all that matters.

    Each step sends the data of all layers to workers, which return next to nothing.

    Args:
        layers: Number of layers in the chain.
        batch: Number of rows in a step. It is not used, because the size of the data is fixed.
        seed: Seed of the weights. It is not used, because they are the same for every seed.
        width: Number of elements that a layer reads, 4 bytes each.
    """

    def __init__(self, layers: int, batch: int, seed: int, width: int = 1 << 20) -> None:
        super().__init__()
        del batch, seed
        self.chain = nn.ModuleList(_Reading(width) for _ in range(layers))

    @property
    def layers(self) -> list[nn.Module]:
        """The layers of the chain."""
        return list(self.chain)

    def begin(self, rows: int, seed: int) -> tuple[Tensor, None]:
        """Changes the data of all layers. Returns a scalar that requires gradients."""
        for number, layer in enumerate(self.chain):
            assert isinstance(layer, _Reading)
            layer.data[0] = (seed + number) % 1_000_003
        return torch.full((), float(rows)).requires_grad_(), None

    def loss(self, x: Tensor, target: None) -> Tensor:
        """Returns the square of the last layer's output."""
        return x.square()


def load(settings: Mapping[str, Any], batch_rows: int, dtype: torch.dtype, seed: int) -> ChainModel:
    """Returns the model of an experiment, with weights of a seed.

    Args:
        settings: The table `model` of the experiment, see `ModelSpec`.
        batch_rows: Number of rows in a step.
        dtype: Data type of parameters and activations.
        seed: Seed of the weights.

    Raises:
        ImportError, AttributeError: The user's function does not exist in this installation.
        TypeError: It does not take these arguments, or what it returns lacks something that `ChainModel` has.
    """
    torch.manual_seed(seed)
    if settings["function"] == DEMO:
        return DemoModel(settings["layers"], settings["width"], settings["context"], dtype)
    module, _, name = settings["function"].partition(":")
    function = getattr(import_module(module), name)
    model = function(layers=settings["layers"], batch=batch_rows, seed=seed, **settings["arguments"])
    missing = [need for need in ("layers", "begin", "loss", "parameters") if not hasattr(model, need)]
    if missing:
        raise TypeError(f"{settings['function']} returned a {type(model).__name__} without {', '.join(missing)}")
    if len(model.layers) != settings["layers"]:
        raise TypeError(f"{settings['function']} made {len(model.layers)} layers instead of {settings['layers']}")
    if isinstance(model, nn.Module):
        model.to(dtype)
    return cast("ChainModel", model)

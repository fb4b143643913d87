"""The user's model: loaded from "module:function", with the layers that become segments."""

import ast
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from backhaul_runtime.errors import SettingError
from backhaul_runtime.process.settings import names_code

_CHAIN = ("layers", "begin", "loss", "parameters")
"""What the model of an experiment has, see docs/experiments.md."""
_DEFAULTS = {"layers": 8, "batch": 8, "seed": 0}
"""Arguments for a function of an experiment that `--argument` does not give."""
_PAIR, _TRIPLE = 2, 3


@dataclass(frozen=True, slots=True)
class Target:
    """A model to measure.

    Attributes:
        name: What was given as --model, for messages.
        model: The model, in training mode.
        forward: Runs a forward with the example batch and returns its loss, a scalar.
        kinds: Classes of the modules that become segments.
    """

    name: str
    model: nn.Module
    forward: Callable[[], Tensor]
    kinds: tuple[type[nn.Module], ...]

    @property
    def layers(self) -> list[nn.Module]:
        """The modules that become segments, in the order of their definition. None is inside another one."""
        layers: list[nn.Module] = []

        def visit(parent: nn.Module) -> None:
            for child in parent.children():
                if isinstance(child, self.kinds):
                    layers.append(child)
                else:
                    visit(child)

        visit(self.model)
        return list(dict.fromkeys(layers))

    @property
    def device(self) -> torch.device:
        """The device of the layers' parameters; the CPU if they have none."""
        parameters = (parameter for layer in self.layers for parameter in layer.parameters())
        return next((parameter.device for parameter in parameters), torch.device("cpu"))


class _Chain(nn.Module):
    """The model of an experiment as a module."""

    def __init__(self, model: Any, rows: int) -> None:
        super().__init__()
        self._model, self._rows = [model], rows  # in a list, because the model may be no module
        if isinstance(model, nn.Module):
            self.inside = model
        self.chain = nn.ModuleList(model.layers)

    def forward(self) -> Tensor:
        """Returns the loss of some rows."""
        model = self._model[0]
        x, target = model.begin(self._rows, 0)
        for layer in self.chain:
            x = layer(x)
        loss: Tensor = model.loss(x, target)
        return loss


def load_target(name: str, layers: str = "", arguments: Mapping[str, Any] | None = None) -> Target:
    """Imports a function, calls it and returns its model.

    The function returns a module and an example batch, and as a third item, if it wants, a function from the module's
    output to the loss. It may also return the model of an experiment.

    Args:
        name: "module:function". The module may be in the working directory.
        layers: Names of the classes of the layers, separated by commas; empty to look for the longest list of layers.
        arguments: Arguments for the function.

    Raises:
        SettingError: The function does not exist, raises, or returns something else; or the model has no such layers.
    """
    function = _imported(name)
    made = _called(name, function, dict(arguments or {}))
    model, forward = _model_of(name, made, {**_DEFAULTS, **(arguments or {})})
    model.train()
    target = Target(name, model, forward, ())
    return Target(name, model, forward, _kinds(target, layers))


def parse_argument(text: str) -> tuple[str, Any]:
    """Parses "name=value". The value is a Python literal or, if it is none, a text. Raises ValueError."""
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise ValueError(f'"{text}" is not NAME=VALUE')
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def _imported(name: str) -> Callable[..., Any]:
    module, separator, function = name.partition(":")
    if not separator or not names_code(name):
        raise SettingError(f'--model {name}: it must be "module:function", such as mytraining.models:example')
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109  sys.path has texts
        sys.path.insert(0, here)
    try:
        loaded = import_module(module)
    except ModuleNotFoundError as error:
        raise SettingError(
            f"--model {name}: no module named {error.name!r}. Run the command in the directory that has it, or install "
            "it in this environment"
        ) from None
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise SettingError(f"--model {name}: importing {module} failed: {_text(error)}") from error
    if not callable(getattr(loaded, function, None)):
        raise SettingError(f"--model {name}: {module} has no function {function!r}")
    return getattr(loaded, function)  # type: ignore[no-any-return]


def _called(name: str, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    for parameter in parameters:
        is_missing = parameter.default is parameter.empty and parameter.name not in arguments
        if is_missing and parameter.name in _DEFAULTS:
            arguments[parameter.name] = _DEFAULTS[parameter.name]
    try:
        torch.manual_seed(0)
        return function(**arguments)
    except (Exception, SystemExit) as error:  # the user's function may raise anything
        raise SettingError(f"--model {name}: the function raised {_text(error)}") from error


def _model_of(name: str, made: Any, arguments: Mapping[str, Any]) -> tuple[nn.Module, Callable[[], Tensor]]:
    if all(hasattr(made, need) for need in _CHAIN):
        chain = _Chain(made, arguments["batch"])
        return chain, lambda: _scalar(name, chain())
    is_tuple = isinstance(made, tuple) and len(made) in {_PAIR, _TRIPLE} and isinstance(made[0], nn.Module)
    if not is_tuple:
        raise SettingError(
            f"--model {name}: the function returned a {type(made).__name__}, not a module and an example batch"
        )
    model, batch, loss = (*made, None)[:_TRIPLE]
    if isinstance(batch, Mapping):
        args, kwargs = (), dict(batch)
    else:
        args, kwargs = tuple(batch) if isinstance(batch, list | tuple) else (batch,), {}

    def forward() -> Tensor:
        output = model(*args, **kwargs)
        return _scalar(name, loss(output) if loss is not None else output)

    return model, forward


def _scalar(name: str, output: Any) -> Tensor:
    """Returns the loss in what a model or the user's loss returned. Without one, a sum stands for it."""
    value = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    value = output if value is None else value
    if isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad:
        return value
    tensors = output.values() if isinstance(output, Mapping) else output if isinstance(output, Sequence) else [output]
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.requires_grad:
            return tensor.float().square().mean()
    raise SettingError(
        f"--model {name}: the model returned nothing that can be differentiated. Return a loss, or a function that "
        "computes it as the third item, and leave some parameters trainable"
    )


def _kinds(target: Target, names: str) -> tuple[type[nn.Module], ...]:
    # The model itself would be a single segment, which spares no memory.
    modules = [module for module in target.model.modules() if module is not target.model]
    if wanted := {name.strip() for name in names.split(",") if name.strip()}:
        kinds = dict.fromkeys(type(module) for module in modules if type(module).__name__ in wanted)
        if missing := wanted - {kind.__name__ for kind in kinds}:
            raise SettingError(f"--layers {names}: the model has no module of the class {min(missing)}")
        return tuple(kinds)
    own = {*(getattr(target.model, "_no_split_modules", None) or ())}  # of Transformers: its layers
    if kinds := dict.fromkeys(type(module) for module in modules if type(module).__name__ in own):
        return tuple(kinds)
    best: type[nn.Module] | None = None
    most = 0
    for module in (target.model, *modules):
        children = list(module.children())
        # The list of the model's layers is the one with most parameters: others hold heads or parts of layers.
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(children) > 1:
            # The class of which all others are subclasses, if one is.
            kind = next(
                (type(one) for one in children if all(isinstance(child, type(one)) for child in children)), None
            )
            size = sum(parameter.numel() for child in children for parameter in child.parameters())
            if kind is not None and size > most:
                best, most = kind, size
    if best is None:
        raise SettingError(
            f"--model {target.name}: the model has no segments: it has no list of layers of one class. Name the "
            "classes of modules that can be checkpointed with --layers"
        )
    return (best,)


def _text(error: BaseException) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__

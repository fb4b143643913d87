"""Measures a model on the trainer alone: durations of layers, and the memory that they take.

NOTE [Clocks of measurements]
On a CPU the calling thread computes, in backward as well, so durations are its CPU time: then other programs do not
count. Threads of torch's pool compute at the same time, while the calling thread computes its part or waits for them
without sleeping. An accelerator computes by itself, so there durations are those of a clock, after waiting for it.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter, thread_time
from typing import Any

import torch
from torch import Tensor, nn

from backhaul.demo.peak_memory import peak_live_bytes
from backhaul.doctor.profile.costs import PlainProfile
from backhaul.doctor.profile.target import Target
from backhaul_runtime.program.op_list import allowed_ops
from backhaul_runtime.record.recorder import Recorder
from backhaul_runtime.replay.replay import Replay
from backhaul_runtime.replay.schedule import Footprint
from backhaul_runtime.tensors.layout import copy_exact
from backhaul_runtime.torch_internals.private import pytree

WARM_ROUNDS, ROUNDS = 1, 5
_LEARNING_RATE = 1e-6
_GROWTH = 2.0
"""The execution of a layer takes about this many times what autograd saves, if it cannot be measured."""


@dataclass(slots=True)
class _Round:
    """Times of one round, in seconds since an arbitrary moment, and what autograd saved in it."""

    entered: list[float] = field(default_factory=list)
    left: list[float] = field(default_factory=list)
    reached: list[float] = field(default_factory=list)  # by backward, after the last layer
    passed: list[float] = field(default_factory=list)  # by backward, before the first layer
    layer_bytes: int = 0
    outside_bytes: int = 0
    depth: int = 0
    inputs: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)


def undisturbed(values: Sequence[float]) -> float:
    """Returns the lower quartile of durations: disturbances of other programs only make them longer."""
    return statistics.quantiles(values, n=4, method="inclusive")[0] if len(values) > 1 else values[0]


def synchronise(device: torch.device) -> None:
    """Waits until an accelerator has finished its work."""
    if device.type == "cuda":  # times depend on it and nothing else, so no simulated device can show that it is missing
        torch.cuda.synchronize(device)


def now_on(device: torch.device) -> float:
    """Returns the seconds that the clock for a device shows, when its work so far has ended."""
    synchronise(device)
    return thread_time() if device.type == "cpu" else perf_counter()


def first_tensor(value: Any) -> Tensor | None:
    """Returns the first floating-point tensor in the arguments or the result of a layer."""
    leaves = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
    return next((leaf for leaf in leaves if leaf.is_floating_point()), None)


def update(parameters: Sequence[nn.Parameter]) -> None:
    """Changes parameters a little, as an optimizer does, and clears their gradients."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.add_(parameter.grad.to(parameter.dtype), alpha=-_LEARNING_RATE)
                parameter.grad = None


class PlainMeasurement:
    """Forwards and backwards of a model without checkpointing. `profile` returns what they cost.

    Run them several times, between other measurements: a machine may be slower for some seconds, and a model that was
    measured only then would seem to cost more than it does.

    Args:
        target: The model to measure.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._rounds: list[tuple[_Round, tuple[float, float], tuple[float, float]]] = []

    def run(self, rounds: int) -> None:
        """Runs some rounds after one that does not count. Changes the model's parameters a little.

        Raises:
            Exception: Whatever the model raises.
        """
        target = self._target
        trained = [parameter for parameter in target.model.parameters() if parameter.requires_grad]
        for number in range(WARM_ROUNDS + rounds):
            torch.manual_seed(number)
            measured = _round(target, target.layers, target.device)
            update(trained)
            if number >= WARM_ROUNDS:
                if self._rounds:
                    measured[0].inputs.clear()
                self._rounds.append(measured)

    def profile(self) -> PlainProfile:
        """Returns what the rounds so far cost. There must be one."""
        target, rounds = self._target, self._rounds
        layers = target.layers
        trained = [parameter for parameter in target.model.parameters() if parameter.requires_grad]
        layer, args, kwargs = rounds[0][0].inputs[len(rounds[0][0].inputs) // 2]
        boundary = first_tensor((args, kwargs))
        saved = [one.layer_bytes // len(layers) for one, _, _ in rounds]
        in_layers = [sum(b - a for a, b in zip(one.entered, one.left, strict=True)) for one, _, _ in rounds]
        backward_in_layers = [_backward_in_layers(one, ends) for one, _, ends in rounds]
        outside_forward = [took[0] - inside for (_, took, _), inside in zip(rounds, in_layers, strict=True)]
        outside_backward = [took[1] - inside for (_, took, _), inside in zip(rounds, backward_in_layers, strict=True)]
        by_layer = _own_tensors(layers)
        saved_bytes = max(saved)
        return PlainProfile(
            layers=len(layers),
            forward_s=undisturbed(in_layers) / len(layers),
            backward_s=undisturbed(backward_in_layers) / len(layers),
            outside_forward_s=max(0.0, undisturbed(outside_forward)),
            outside_backward_s=max(0.0, undisturbed(outside_backward)),
            boundary_bytes=boundary.nbytes if boundary is not None else 0,
            saved_bytes=saved_bytes,
            outside_bytes=max(one.outside_bytes for one, _, _ in rounds),
            transient_bytes=_peak_bytes(lambda: _without_gradients(layer, args, kwargs), target.device),
            trained_bytes=sum(tensor.nbytes for tensor in by_layer if tensor.requires_grad) // len(layers),
            frozen_bytes=sum(tensor.nbytes for tensor in by_layer if not tensor.requires_grad) // len(layers),
            model_bytes=sum(tensor.nbytes for tensor in _own_tensors([target.model])),
            gradient_bytes=sum(parameter.nbytes for parameter in trained),
            trained_parameters=sum(parameter.numel() for parameter in trained),
            tokens=boundary.numel() // max(1, boundary.shape[-1]) if boundary is not None and boundary.dim() else 1,
            footprint=_footprint(layer, args, kwargs)
            or Footprint(saved_bytes, saved_bytes, int(_GROWTH * saved_bytes)),
        )


def _round(
    target: Target, layers: Sequence[nn.Module], device: torch.device
) -> tuple[_Round, tuple[float, float], tuple[float, float]]:
    """Runs one forward and backward.

    Returns:
        The times of the layers, the durations of forward and backward, and when backward began and ended.
    """
    one = _Round()
    owned = {tensor.untyped_storage().data_ptr() for tensor in _own_tensors([target.model])}
    seen: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in owned and pointer not in seen:
            seen[pointer] = tensor  # keeps the storage, whose address could be used again otherwise
            size = tensor.untyped_storage().nbytes()
            if one.depth:
                one.layer_bytes += size
            else:
                one.outside_bytes += size
        return tensor

    def now_s() -> float:
        return now_on(device)

    def enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = first_tensor((args, kwargs))
        if x is not None:
            if (pointer := x.untyped_storage().data_ptr()) not in seen:
                seen[pointer] = x  # a boundary, which is counted apart
            if x.requires_grad:
                x.register_hook(lambda _: one.passed.append(now_s()))  # type: ignore[no-untyped-call]
        one.inputs.append((layer, args, kwargs))
        one.depth += 1
        one.entered.append(now_s())

    def leave(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        one.left.append(now_s())
        one.depth -= 1
        y = first_tensor(result)
        if y is not None and y.requires_grad:
            y.register_hook(lambda _: one.reached.append(now_s()))  # type: ignore[no-untyped-call]

    hooks = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in layers]
    hooks += [layer.register_forward_hook(leave, with_kwargs=True) for layer in layers]
    try:
        began_s = now_s()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = target.forward()
        forward_s = now_s() - began_s
    finally:
        for hook in hooks:
            hook.remove()
    seen.clear()
    began_s = now_s()
    loss.backward()  # type: ignore[no-untyped-call]
    ended_s = now_s()
    return one, (forward_s, ended_s - began_s), (began_s, ended_s)


def _backward_in_layers(one: _Round, ends: tuple[float, float]) -> float:
    """Returns the seconds from when backward reached the last layer until it had passed the first one."""
    began_s = min(one.reached, default=ends[0])
    # Without a gradient for the input of the first layer, its backward is the last thing that happens.
    ended_s = max(one.passed) if len(one.passed) == len(one.entered) else ends[1]
    return max(1e-9, ended_s - began_s)


def _own_tensors(modules: Sequence[nn.Module]) -> list[Tensor]:
    """Returns the parameters and buffers of modules, each once."""
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return list({id(tensor): tensor for tensor in tensors}.values())


def _without_gradients(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with torch.no_grad():
        layer(*args, **kwargs)


def _peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Returns the most bytes that are allocated at a time while a function runs."""
    if device.type != "cuda":
        return peak_live_bytes(work)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    return torch.cuda.max_memory_allocated(device) - before


def _footprint(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Footprint | None:
    """Measures the memory of a layer's replay by running one here; None if the layer cannot be recorded."""
    args, kwargs = pytree.tree_map(_fresh, (args, kwargs))
    arguments = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    recorder = Recorder(arguments, allowed_ops(), lambda tensor, layout, _: copy_exact(tensor, layout))
    with recorder:
        result = layer(*args, **kwargs)
    outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if recorder.recording.refusal is not None:
        return None
    program = recorder.finish(outputs)
    sources = [source.value for source in recorder.recording.sources]
    replay = Replay(program, sources, recorder.recording.generator_states, is_own=True, is_measured=True)
    return replay.footprint


def _fresh(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return value

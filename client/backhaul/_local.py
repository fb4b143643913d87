"""Recomputation on the trainer: by the program where there is one, else by calling the function again."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from backhaul._value_check import check_digests, check_values
from backhaul_runtime import ambient
from backhaul_runtime.digest import address_of, content_digest, saved_digest
from backhaul_runtime.errors import StaleTensorError
from backhaul_runtime.layout import copy_exact, layout_of, unsupported_reason
from backhaul_runtime.program import Program
from backhaul_runtime.recorder import RecordedSource, Recording, default_generator
from backhaul_runtime.replay import Contribution, Replay, Saved, entry, isolated

_WHERE = "on the trainer"


def replay_here(name: str, program: Program, recording: Recording, *, keep_saved: bool) -> Replay:
    """Replays a segment on the trainer's own devices and checks its values.

    Raises:
        StaleTensorError: A captured tensor no longer holds what it held at forward.
        CheckpointError: The replay gave other values than forward.
    """
    for source in recording.sources:
        if not source.is_copy and address_of(source.value) != source.address:
            raise StaleTensorError(
                f"segment {name}: a captured tensor of shape {list(source.layout.shape)} changed between forward and "
                "backward, and no worker holds its earlier value. Run backward before optimizer.step() and other "
                "writes to parameters",
                segment=name,
            )
    values = [source.value for source in recording.sources]
    replay = Replay(program, values, recording.generator_states, keep_saved=keep_saved)
    check_values(name, _WHERE, recording.saved, replay.saved_digests)
    return replay


def gradients_here(
    name: str, program: Program, recording: Recording, gradients: Mapping[int, Tensor]
) -> list[Contribution]:
    """The contributions of a segment, computed on the trainer. Called in backward."""
    state = ambient.capture()
    with isolated(_devices(recording)), torch.enable_grad():
        replay = replay_here(name, program, recording, keep_saved=False)
        ambient.apply(state, ambient.capture())
        return replay.backward(gradients)


def saved_here(name: str, program: Program, recording: Recording, positions: Sequence[int]) -> dict[int, Tensor]:
    """Saved tensors of a segment by position, computed on the trainer."""
    with isolated(_devices(recording)), torch.enable_grad():
        replay = replay_here(name, program, recording, keep_saved=True)
        return {position: replay.saved(position) for position in positions}


def saved_before(name: str, so_far: Program, recording: Recording, position: int) -> Tensor:
    """A saved tensor of a call that still runs, from the program recorded so far."""
    with isolated(_devices(recording)), torch.enable_grad():
        replay = Replay(
            so_far, [source.value for source in recording.sources], recording.generator_states, keep_saved=True
        )
        check_digests(name, _WHERE, recording.saved, {position: replay.saved_digests[position]})
        return replay.saved(position)


def _devices(recording: Recording) -> list[torch.device]:
    return list(dict.fromkeys(source.value.device for source in recording.sources))


@dataclass(slots=True)
class Call:
    """A call that can't be a program, kept so that it can be made again.

    Attributes:
        fn: The caller's function.
        leaves: Leaves of (args, kwargs); tensors among them are replaced by copies once the call has ended.
        spec: Rebuilds (args, kwargs), with containers of their own.
        state: Ambient settings when it began.
        generator_states: Of the devices of its tensors.
    """

    fn: Callable[..., Any]
    leaves: list[Any]
    spec: pytree.TreeSpec
    state: ambient.State
    generator_states: dict[torch.device, Tensor]

    @classmethod
    def begin(cls, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Call":
        """Takes the state a call starts from."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        devices = dict.fromkeys((torch.device("cpu"), *(leaf.device for leaf in leaves if isinstance(leaf, Tensor))))
        states = {device: default_generator(device).get_state() for device in devices if device.type in _RANDOM}
        return cls(fn, leaves, spec, ambient.capture(), states)

    def tensors(self) -> list[Tensor]:
        """The tensors among its arguments."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def keep(self, tensors: Sequence[Tensor], recording: Recording) -> None:
        """Replaces the caller's tensors by copies of what they held, for the caller may change them now.

        Args:
            tensors: The caller's object behind each source of the recording.
            recording: Of this call.
        """
        held = {id(tensor): source for tensor, source in zip(tensors, recording.sources, strict=True)}
        self.leaves = [_kept(leaf, held.get(id(leaf))) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]

    def saved_again(self, name: str, recording: Recording) -> dict[int, Tensor]:
        """Calls the function once more and returns everything autograd saved, by position.

        Buffers it writes to hold their earlier values meanwhile and their present ones afterwards.

        Raises:
            CheckpointError: It gave other values than the first time.
        """
        saved: list[Saved] = []
        digests: list[bytes] = []

        def pack(tensor: Tensor) -> Saved:
            plain = unsupported_reason(tensor) is None
            layout = layout_of(tensor) if plain else None
            digests.append(saved_digest(layout, content_digest(tensor, layout)) if layout else b"")
            saved.append(Saved(len(saved), tensor))
            return saved[-1]

        with isolated(list(self.generator_states)), _as_before(recording.sources):
            for device, state in self.generator_states.items():
                default_generator(device).set_state(state)
            ambient.apply(self.state, ambient.capture())
            args, kwargs = pytree.tree_unflatten([_fresh(leaf) for leaf in self.leaves], self.spec)
            with torch.autograd.graph.saved_tensors_hooks(pack, Saved.unpack):
                self.fn(*args, **kwargs)
        check_values(name, _WHERE, recording.saved, digests)
        return {found.index: found.unpack() for found in saved}


_RANDOM = {"cpu", "cuda"}


@dataclass(frozen=True, slots=True)
class _Kept:
    """An argument's value at forward."""

    value: Tensor
    requires_grad: bool
    is_leaf: bool


def _kept(tensor: Tensor, source: RecordedSource | None) -> Any:
    if source is not None:
        return _Kept(source.value, source.requires_grad, source.is_leaf)
    if unsupported_reason(tensor) is not None:
        return tensor
    return _Kept(copy_exact(tensor), tensor.requires_grad, tensor.is_leaf)


def _fresh(leaf: Any) -> Any:
    if not isinstance(leaf, _Kept):
        return leaf
    value = copy_exact(leaf.value)
    return entry(value, leaf.is_leaf) if leaf.requires_grad else value


@contextmanager
def _as_before(sources: Sequence[RecordedSource]) -> Iterator[None]:
    """Puts the values from before the call into captured tensors, past their version counters, and back."""
    written = [(source.written, source.value) for source in sources if source.written is not None]
    present = [tensor.detach().clone() for tensor, _ in written]
    try:
        for tensor, before in written:
            tensor.data.copy_(before)
        yield
    finally:
        for (tensor, _), after in zip(written, present, strict=True):
            tensor.data.copy_(after)

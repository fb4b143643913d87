"""The ambient state: the values of the settings that an op's numbers depend on.

The recorder reads them in forward, and a replay applies them. A state has the values of `settings_of_all`. If CUDA is
available, those of `settings_of_cuda` follow, unless the state belongs to a program that does not use CUDA. Such a
program can run where there is no CUDA, and there its state can be applied.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from backhaul_runtime.errors import ProgramError
from backhaul_runtime.torch_internals.ambient_settings import (
    Setting,
    Value,
    dispatch_modes,
    settings_of_all,
    settings_of_cuda,
)

State = tuple[Value, ...]
"""The value of each setting, in the order of `settings()`. A state without CUDA's settings is shorter."""


@cache
def settings() -> Mapping[str, Setting]:
    """Returns the settings of this process by name. They depend only on the build of torch and on having CUDA."""
    return {**settings_of_all(), **(settings_of_cuda() if torch.cuda.is_available() else {})}


def without_cuda(state: State) -> State:
    """Returns the state without CUDA's settings."""
    return state[: len(settings_of_all())]


def as_far_as(state: State, states: Sequence[State]) -> State:
    """Returns the state without CUDA's settings if the states of a program have none."""
    return state[: len(states[0])] if states else without_cuda(state)


_clears = itertools.count(1)
_cleared = 0
_clear_autocast_cache = torch.clear_autocast_cache


def _clear_and_count() -> None:
    global _cleared
    _cleared = next(_clears)
    _clear_autocast_cache()


# Autocast calls this when a thread leaves its outermost region, and nothing else shows where a region ends. Without the
# count, a replay of two regions would use the casts of the first one in the second.
torch.clear_autocast_cache = _clear_and_count


def cleared_casts() -> int:
    """Returns a number that changes whenever any thread clears autocast's cache, as on leaving its outermost region."""
    return _cleared


@cache
def _readers() -> tuple[Callable[[], Any], ...]:
    return tuple(setting.read for setting in settings().values())


def capture() -> State:
    """Returns the present settings of the calling thread."""
    return tuple([read() for read in _readers()])


@cache
def _autocast_switches() -> tuple[int, ...]:
    return tuple(i for i, name in enumerate(settings()) if name in {"autocast_cpu", "autocast_cuda"})


def is_autocast(state: State) -> bool:
    """Whether autocast is on for any kind of device in a state."""
    return any(state[position] for position in _autocast_switches() if position < len(state))


@cache
def _autocast_settings() -> tuple[int, ...]:
    return tuple(i for i, name in enumerate(settings()) if name.startswith("autocast_"))


def casts_alike(state: State, region: State) -> bool:
    """Whether autocast is off in a state, or on with the settings of the region around it."""
    return not is_autocast(state) or all(
        state[position] == region[position] for position in _autocast_settings() if position < len(state)
    )


def with_present_modes(state: State) -> State:
    """Returns the state with `dispatch_mode` as the calling thread has it at present."""
    return from_mapping({**to_mapping(state), "dispatch_mode": dispatch_modes.read()})


def with_grad(state: State) -> State:
    """Returns the state with gradients enabled."""
    return from_mapping({**to_mapping(state), "grad": True})


def apply(state: State, current: State) -> None:
    """Changes the calling thread's settings from `current` to `state`; only those that differ are written.

    CUDA's settings stay as they are if one of the states has none.

    Raises:
        ProgramError: This machine does not have one of the settings.
    """
    for (name, setting), value, present in zip(settings().items(), state, current, strict=False):
        if value != present:
            try:
                setting.write(value)
            except RuntimeError as error:
                raise ProgramError(f"the setting {name} can't be {value} on this machine: {error}") from error


def _restore(state: State) -> None:
    """Gives the calling thread the settings of a state. An error at one of them does not keep the others from it."""
    errors = list[BaseException]()
    for setting, value in zip(settings().values(), state, strict=True):
        try:
            if setting.read() != value:
                setting.write(value)
        except BaseException as error:  # Ctrl-C, too: with gradients left off, nothing would be trained any more
            errors.append(error)
    if errors:
        raise errors[0]


@contextmanager
def restored() -> Iterator[None]:
    """Restores on exit the settings that the calling thread had on entry.

    Also clears autocast's cache, unless the thread is inside an autocast region, whose casts the cache then holds.
    """
    before = capture()
    try:
        yield
    finally:
        try:
            _restore(before)
        finally:  # a later region must not use casts of this block
            if torch.autocast_increment_nesting() == 1:  # the thread is in no region
                torch.clear_autocast_cache()
            torch.autocast_decrement_nesting()


def threads_of(state: State) -> int:
    """Returns the number of threads that an op uses in a state."""
    return int(state[_place("threads")])


@cache
def _place(name: str) -> int:
    return list(settings()).index(name)


def to_mapping(state: State) -> dict[str, Value]:
    """Returns the values of a state by the names of its settings, which is the form that messages carry."""
    return dict(zip(settings(), state, strict=False))


def from_mapping(values: Mapping[str, Value]) -> State:
    """Returns the state of this process that a sender's values describe. The values are untrusted.

    A setting that the sender does not have keeps the present value of the calling thread. If the sender has none of
    CUDA's, neither has the state.

    Raises:
        ProgramError: This process does not have a setting, or a value has another type or is not allowed.
    """
    known = settings()
    present = to_mapping(capture())
    for name, value in values.items():
        setting = known.get(name)
        if setting is None:
            raise ProgramError(
                f'this process has no setting "{name}": its build of torch or its devices differ from the sender\'s',
                setting=name,
            )
        if type(value) is not type(present[name]):
            raise ProgramError(
                f'the setting "{name}" can\'t be {value!r}: not of type {type(present[name]).__name__}', setting=name
            )
        if not setting.is_possible(value):
            raise ProgramError(f'the setting "{name}" can\'t be {value!r}: it is {setting.possible}', setting=name)
    state = tuple({**present, **values}.values())
    return state if any(name not in settings_of_all() for name in values) else without_cuda(state)

"""A session's settings: argument over environment over default, resolved here and nowhere else. Free of torch."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any, Literal

from backhaul_runtime.errors import SettingError
from backhaul_runtime.process.settings import boolean, in_environment, variable_of

Returns = Literal["auto", "gradients", "activations"]
RETURNS: tuple[str, ...] = ("auto", "gradients", "activations")
Durability = Literal["lineage", "host", "none"]
DURABILITIES: tuple[str, ...] = ("lineage", "host", "none")
Numerics = Literal["auto", "exact"]
NUMERICS: tuple[str, ...] = ("auto", "exact")
Accumulate = Literal["trainer", "worker"]
ACCUMULATE: tuple[str, ...] = ("trainer", "worker")
_CHOICES = {"returns": RETURNS, "durability": DURABILITIES, "numerics": NUMERICS, "accumulate": ACCUMULATE}
SECRETS = frozenset({"token_file"})
"""Settings that no report shows."""


@dataclass(frozen=True, slots=True)
class Config:
    """How a session works.

    The environment can set each field, see NOTE [Names] in backhaul_runtime.process.settings.
    """

    worker: str = ""
    """Addresses of workers with commas between; empty starts one on this machine."""

    token_file: str = ""
    """File with the token that the workers want, or one for each of them with commas between. A worker that connect()
    starts wants none."""

    returns: Returns = "auto"
    """What comes back for a segment: "gradients", "activations", or "auto", gradients wherever a segment allows."""

    strict: bool = False
    """Raise NotRemoteError rather than recompute a segment on the trainer."""

    durability: Durability = "lineage"
    """What the trainer keeps in case a worker dies: "lineage", what it can't compute again from earlier segments;
    "host", a copy of each segment's inputs; "none", nothing, and a lost segment raises SegmentLostError."""

    numerics: Numerics = "auto"
    """Workers that compute other bits than this trainer: "auto" uses them, with the trainer's own random draws and its
    numbers compared within tolerances; "exact" leaves their segments on the trainer."""

    accumulate: Accumulate = "trainer"
    """Where gradients of parameters are summed over micro-batches: "worker" keeps them there until the optimizer steps
    or `Session.collect()` asks for them. What else reads `.grad`, such as clipping, needs `collect()` before."""

    connect_timeout_s: float = 30.0
    """How long connect() waits for the workers. A worker it starts itself needs some seconds to import torch."""

    silence_s: float = 2.0
    """A worker that sends neither progress nor bytes for so long is given up, and its segments run on the trainer."""

    inflight_bytes: int = 64 << 20
    """Copies of arguments, and of parameters that FSDP frees, that wait to be sent; beyond it forward waits."""

    inflight_boundaries: int = 4
    """Segments whose arguments wait to be sent; beyond it forward waits."""

    shared_memory: bool = True
    """Send large tensors to workers on this machine, and get them, through memory shared with those that offer it."""

    unix_socket: bool = True
    """Talk to a worker on this machine over the Unix socket that it offers, also where `worker` is a TCP address."""

    memory_bytes: int = 0
    """Budget of the worker that connect() starts, 0 for half of this machine's memory."""

    telemetry: bool = True
    """Tell workers of steps and segments, for dashboards to show."""

    traces: bool = False
    """Make OpenTelemetry spans of steps and segments, for the SDK that the training program configures. Needs
    `pip install 'backhaul[otel]'`."""


def resolve(**given: Any) -> Config:
    """The settings, from arguments (None: not given), the environment, and the defaults.

    Raises:
        SettingError: Naming the setting, its value, and what it takes.
    """
    values = {}
    for field in fields(Config):
        if given.get(field.name) is not None:
            values[field.name] = given[field.name]
        elif (text := in_environment(variable_of(field.name))) is not None:
            values[field.name] = _parse(field.name, type(field.default), text)
    config = Config(**values)
    for field in fields(Config):
        value, kinds = getattr(config, field.name), (int, float) if field.type is float else (type(field.default),)
        if not isinstance(value, kinds):
            raise SettingError(f"{field.name}={value!r} must be of type {kinds[-1].__name__}")
    for name, choices in _CHOICES.items():
        if (value := getattr(config, name)) not in choices:
            raise SettingError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}")
    for name in ("connect_timeout_s", "silence_s", "inflight_bytes", "inflight_boundaries"):
        if not 0 < getattr(config, name) < math.inf:
            raise SettingError(f"{name}={getattr(config, name)!r} must be more than 0, and finite")
    if config.memory_bytes < 0:
        raise SettingError(f"memory_bytes={config.memory_bytes!r} must not be negative")
    if config.traces and not _has_opentelemetry():
        raise SettingError("traces=True needs OpenTelemetry's API: pip install 'backhaul[otel]'")
    return config


def _parse(name: str, kind: Callable[[str], Any], text: str) -> Any:
    try:
        return boolean(text) if kind is bool else kind(text)
    except ValueError:
        raise SettingError(f"{variable_of(name)}={text!r} is no {getattr(kind, '__name__', 'value')}") from None


def _has_opentelemetry() -> bool:
    try:
        return find_spec("opentelemetry.trace") is not None
    except ModuleNotFoundError:  # not even the namespace
        return False

"""The settings of a session: argument over environment over plan over default. Does not import torch."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from importlib.util import find_spec
from os import PathLike
from typing import Any, Literal

from backhaul._plan_file import read_plan
from backhaul_runtime.errors import SettingError
from backhaul_runtime.process.settings import boolean, in_environment, items, names_code, variable_of
from backhaul_runtime.wire.protocol import MAX_CONNECTIONS
from backhaul_runtime.wire.telemetry import MAX_NOTES, MAX_RUN_NAME, MAX_TAG, MAX_TAGS

Returns = Literal["auto", "gradients", "activations"]
RETURNS: tuple[str, ...] = ("auto", "gradients", "activations")
Durability = Literal["lineage", "host", "none"]
DURABILITIES: tuple[str, ...] = ("lineage", "host", "none")
Boundaries = Literal["auto", "send", "derive"]
BOUNDARIES: tuple[str, ...] = ("auto", "send", "derive")
Numerics = Literal["auto", "exact"]
NUMERICS: tuple[str, ...] = ("auto", "exact")
Compressed = Literal["auto", "on", "off"]
COMPRESSED: tuple[str, ...] = ("auto", "on", "off")
Local = Literal["recompute", "keep"]
LOCALS: tuple[Local, ...] = ("recompute", "keep")
"""What the trainer does with its share of the segments of an accumulation block."""
_CHOICES = {
    "returns": RETURNS,
    "durability": DURABILITIES,
    "boundaries": BOUNDARIES,
    "numerics": NUMERICS,
    "compression": COMPRESSED,
    "local": LOCALS,
}
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
_LISTS = frozenset({"tags", "allow"})
SECRETS = frozenset({"token_file"})
"""Settings that reports must not show."""
DESCRIPTIVE = frozenset({"run", "tags", "notes"})
"""Settings that describe the run and change nothing of it."""


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of a session.

    The environment can set each field, see NOTE [Names] in backhaul_runtime.process.settings.
    """

    worker: str = ""
    """Addresses of workers, separated by commas; empty starts a worker on this machine. "file:/path" stands for the
    addresses in a file, "dns:///name:port" for all addresses of a name; both are looked at once a second."""

    token_file: str = ""
    """File with the token of the workers, or one file for each address, separated by commas. A worker that connect()
    starts needs no token."""

    tls: str = ""
    """Directory with `tls.crt`, `tls.key` and `ca.crt`, to speak TLS with workers; empty to speak without it.
    `backhaul certificates` makes them."""

    plan: str = ""
    """File that `backhaul plan` has written. Its settings count where neither the program nor the environment sets
    them."""

    segment_layers: int = 1
    """Number of consecutive modules that `wrap` joins into one segment, if each takes what the one before returns."""

    kept_layers: int = 0
    """Number of the last modules that `wrap` leaves as they are, without checkpointing. They take memory and time on
    the trainer, and no worker."""

    returns: Returns = "auto"
    """What workers return for a segment: "gradients", "activations", or "auto": gradients where possible."""

    strict: bool = False
    """Raise NotRemoteError instead of recomputing a segment on the trainer."""

    durability: Durability = "lineage"
    """What the trainer keeps in case a worker dies. "lineage" keeps what it cannot compute again from earlier segments,
    "host" keeps a copy of each segment's inputs, and "none" keeps nothing: a lost segment raises SegmentLostError."""

    boundaries: Boundaries = "auto"
    """How a worker gets the boundary between two of its segments. "send": from the trainer. "derive": it computes the
    boundary from the segment before, and the trainer sends only the digest. "auto": it derives boundaries in
    accumulation blocks if sending one takes longer than the segment's forward."""

    numerics: Numerics = "auto"
    """What to do with workers that compute other bits than this trainer. "auto" uses them: they get the trainer's
    random draws, and their numbers are compared within tolerances. "exact" recomputes such segments on the trainer."""

    compression: Compressed = "auto"
    """Whether a parameter that changed is sent as the compressed difference from its previous version. "auto": if the
    worker is reached over a link that is slow enough for that to save time. "on": always. "off": never."""

    compression_bytes: int = 2 << 30
    """Bytes of copies of previous versions that the trainer may keep for `compression`. Parameters without a copy are
    sent whole."""

    connect_timeout_s: float = 30.0
    """Seconds that connect() waits for the workers. A worker that it starts needs some seconds to import torch."""

    silence_s: float = 2.0
    """Seconds without progress or bytes from a worker after which its segments run on the trainer."""

    inflight_bytes: int = 64 << 20
    """Bytes of copies that may wait to be sent, of arguments and of parameters that FSDP frees. Two segments may always
    wait, whatever their bytes: one is sent while the next one is computed.

    Forward blocks beyond it.
    """

    inflight_boundaries: int = 4
    """Number of segments whose arguments may wait to be sent. Forward blocks beyond it."""

    inflight_micro_batches: int = 0
    """Micro-batches of an accumulation block whose backward may be unfinished; 0 for three more than there are workers.

    `backward` waits beyond it.
    """

    deferred_bytes: int = 0
    """Bytes that unfinished micro-batches of an accumulation block may hold on the trainer; 0 for any number. Inputs
    that it keeps in case a worker is lost count, gradients that workers start from, and activations kept with
    `local="keep"`.

    `backward` waits beyond it.
    """

    local: Local = "recompute"
    """What the trainer does with its share of an accumulation block: "recompute" its segments, or "keep" their
    activations, which takes memory and saves time. `accumulate(local=...)` overrides it."""

    held_bytes: int = 0
    """Bytes of gradients that an accumulation block may hold back on the trainer; 0 for any number."""

    shared_memory: bool = True
    """Exchange large tensors with workers on this machine through shared memory, if they offer it."""

    unix_socket: bool = True
    """Reach a worker on this machine over the Unix socket that it offers, even if `worker` is a TCP address."""

    connections: int = 0
    """Connections to each worker, at most 8, over which large tensors are striped. 0 opens more as long as that sends
    faster; a worker on this machine gets one, except for tensors on a GPU. See docs/links.md."""

    memory_bytes: int = 0
    """Memory budget in bytes of a worker that connect() starts; 0 for half of its device's memory, divided by the
    number of ranks that share the device under torchrun."""

    device: str = ""
    """Device of a worker that connect() starts: "cpu", "cuda" or "cuda:N". Empty: that of the first segment. Until then
    the worker runs on the GPU that the trainer has used, or on the CPU, and it is started anew if that was another."""

    allow: tuple[str, ...] = ()
    """What a worker that connect() starts runs beside torch's own ops: names of installed packages or modules, or of
    single classes as "module:name". Other workers have their operators' lists. See docs/allow.md."""

    telemetry: bool = True
    """Report steps and segments to workers, for dashboards."""

    run: str = ""
    """What people call the run on dashboards, at most 100 characters."""

    tags: tuple[str, ...] = ()
    """Tags by which dashboards find the run, at most 16 of at most 40 characters."""

    notes: str = ""
    """Notes on the run for dashboards, at most 2,000 characters."""

    traces: bool = False
    """Create OpenTelemetry spans of steps and segments, for the SDK that the training program configures. Needs
    `pip install 'backhaul[otel]'`."""


def resolve(**given: Any) -> Config:
    """Resolves the settings from arguments (None: not given), the environment, the plan and the defaults.

    Raises:
        SettingError: A setting has an invalid value. Names the setting, the value and what is allowed.
    """
    values: dict[str, Any] = {}
    for field in fields(Config):
        if given.get(field.name) is not None:
            values[field.name] = _as_tuple(given[field.name]) if field.name in _LISTS else given[field.name]
        elif (text := in_environment(variable_of(field.name))) is not None:
            values[field.name] = _parse(field.name, type(field.default), text)
    if isinstance(values.get("plan"), PathLike):
        values["plan"] = str(values["plan"])
    if isinstance(plan := values.get("plan"), str) and plan:
        values = read_plan(plan) | values
    config = Config(**values)
    _check(config)
    return config


def _check(config: Config) -> None:
    """Raises SettingError for a value that is not allowed."""
    for field in fields(Config):
        value, kinds = getattr(config, field.name), (int, float) if field.type is float else (type(field.default),)
        if not isinstance(value, kinds):
            raise SettingError(f"{field.name}={value!r} must be of type {kinds[-1].__name__}")
    for name, choices in _CHOICES.items():
        if (value := getattr(config, name)) not in choices:
            raise SettingError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}")
    for name in ("connect_timeout_s", "silence_s", "inflight_bytes", "inflight_boundaries", "segment_layers"):
        if not 0 < getattr(config, name) < math.inf:
            raise SettingError(f"{name}={getattr(config, name)!r} must be finite and greater than 0")
    counts = (
        "kept_layers",
        "memory_bytes",
        "held_bytes",
        "deferred_bytes",
        "inflight_micro_batches",
        "compression_bytes",
        "connections",
    )
    for name in counts:
        if getattr(config, name) < 0:
            raise SettingError(f"{name}={getattr(config, name)!r} must not be negative")
    if config.device and not _DEVICE.fullmatch(config.device):
        raise SettingError(f'device={config.device!r} is not "cpu", "cuda" or "cuda:N"')
    for name in config.allow:
        if not names_code(name):
            raise SettingError(f'allow has {name!r}: write the name of a package, module or class as "module:name"')
    _check_connections(config.connections)
    _check_description(config)
    if config.traces and not _has_opentelemetry():
        raise SettingError("traces=True needs OpenTelemetry's API: pip install 'backhaul[otel]'")


def _check_connections(connections: int) -> None:
    if connections > MAX_CONNECTIONS:
        raise SettingError(f"connections={connections} must be at most {MAX_CONNECTIONS}")


def _check_description(config: Config) -> None:
    for name, most in (("run", MAX_RUN_NAME), ("notes", MAX_NOTES)):
        if (length := len(getattr(config, name))) > most:
            raise SettingError(f"{name} has {length} characters, and may have {most}")
    if len(config.tags) > MAX_TAGS:
        raise SettingError(f"{len(config.tags)} tags are given, and a run may have {MAX_TAGS}")
    for tag in config.tags:
        if not isinstance(tag, str) or not 0 < len(tag) <= MAX_TAG:
            raise SettingError(f"tags has {tag!r}, which must be a text of 1 to {MAX_TAG} characters")


def _as_tuple(tags: Any) -> Any:
    """Returns tags as a tuple. A single text is split at commas, as in the environment."""
    if isinstance(tags, str):
        return tuple(items(tags))
    return tuple(tags) if isinstance(tags, Iterable) else tags


def _parse(name: str, kind: Callable[[str], Any], text: str) -> Any:
    try:
        if kind is tuple:
            return tuple(items(text))
        return boolean(text) if kind is bool else kind(text)
    except ValueError:
        raise SettingError(
            f"{variable_of(name)}={text!r} is not a valid {getattr(kind, '__name__', 'value')}"
        ) from None


def _has_opentelemetry() -> bool:
    try:
        return find_spec("opentelemetry.trace") is not None
    except ModuleNotFoundError:  # the namespace package is missing too
        return False

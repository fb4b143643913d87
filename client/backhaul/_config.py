"""The settings of a session: argument over Settings over environment over plan over default. Does not import torch.

Each setting is declared once: in `Settings` if it is rare, in `Config` if it is an argument of connect(). `make docs`
copies the arguments into the signature and the docstring of connect(), and writes docs/configuration.md.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from os import PathLike
from typing import Any, ClassVar, Literal, get_args

from backhaul._plan_file import read_plan
from backhaul._setting import (
    Default,
    checked,
    has_opentelemetry,
    names_device,
    names_of_code,
    no_longer_than,
    not_negative,
    parsed,
    positive,
    setting,
    share,
    texts,
)
from backhaul_runtime.errors import SettingError
from backhaul_runtime.process.settings import in_environment, variable_of
from backhaul_runtime.wire.telemetry import MAX_NOTES, MAX_RUN_NAME, MAX_TAG, MAX_TAGS

Returns = Literal["auto", "gradients", "activations"]
RETURNS: tuple[Returns, ...] = get_args(Returns)
Durability = Literal["lineage", "host", "none"]
DURABILITIES: tuple[Durability, ...] = get_args(Durability)
Boundaries = Literal["auto", "send", "derive"]
Check = Literal["values", "bytes", "outputs"]
CHECKS: tuple[Check, ...] = get_args(Check)
Numerics = Literal["auto", "exact"]
GraphUse = Literal["auto", "eager", "inductor", "off"]
GRAPHS: tuple[GraphUse, ...] = get_args(GraphUse)
Compressed = Literal["auto", "on", "off"]
Local = Literal["recompute", "keep"]
LOCALS: tuple[Local, ...] = get_args(Local)
"""What the trainer does with its share of the segments of an accumulation block."""
SECRETS = frozenset({"token_file"})
"""Settings that reports must not show."""
DESCRIPTIVE = frozenset({"run", "tags", "notes"})
"""Settings that describe the run and change nothing of it."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a session that few programs set, for `connect(settings=...)`.

    A field that is not given has the value that the environment or the plan sets, and else its default: see
    docs/configuration.md. `repr` shows the fields that were given. `dataclasses.replace` gives all of them.

    Raises:
        SettingError: A field has an invalid value. Names the field, the value and what is allowed.
    """

    _given: ClassVar[frozenset[str]] = frozenset()

    segment_layers: int = setting(1, positive)
    """Number of consecutive modules that `wrap` joins into one segment, if each takes what the one before returns."""

    kept_layers: int = setting(0, not_negative)
    """Number of the last modules that `wrap` leaves as they are, without checkpointing. They take memory and time on
    the trainer, and no worker."""

    boundaries: Boundaries = setting("auto")
    """How a worker gets the boundary between two of its segments. With "send" the trainer sends it. With "derive" the
    worker computes it from the segment before, and the trainer sends only the digest. With "auto" it is derived in
    accumulation blocks if sending it takes longer than the segment's forward."""

    compression: Compressed = setting("auto")
    """Whether a parameter that changed is sent as the compressed difference from its previous version. With "on"
    always, with "off" never, and with "auto" if the link to the worker is so slow that this saves time."""

    compression_bytes: int = setting(2 << 30, not_negative)
    """Bytes of copies of previous versions that the trainer may keep for `compression`. Parameters without a copy are
    sent whole."""

    determinism_check: Check = setting("values")
    """What is compared before a gradient counts. With "values" that is all that autograd saves in forward, with "bytes"
    also each result when it arrives, and with "outputs" only what a segment returns, if its program is known, which
    takes less time. See docs/compiled.md."""

    connect_timeout_s: float = setting(30.0, positive)
    """Seconds that connect() waits for the workers. A worker that it starts needs some seconds to import torch."""

    silence_s: float = setting(2.0, positive)
    """Seconds without progress or bytes from a worker after which its segments run on the trainer."""

    inflight_bytes: int = setting(64 << 20, positive)
    """Bytes of copies that may wait to be sent, of arguments and of parameters that FSDP frees. Two segments may always
    wait, whatever their bytes: one is sent while the next one is computed.

    Forward blocks beyond it.
    """

    inflight_boundaries: int = setting(4, positive)
    """Number of segments whose arguments may wait to be sent, if these have more than 1 MiB together. Forward blocks
    beyond it."""

    inflight_micro_batches: int = setting(0, not_negative)
    """Micro-batches of an accumulation block whose backward may be unfinished; 0 for three more than there are workers.

    `backward` waits beyond it.
    """

    deferred_bytes: int = setting(0, not_negative)
    """Bytes that unfinished micro-batches of an accumulation block may hold on the trainer; 0 for any number. Inputs
    that it keeps in case a worker is lost count, gradients that workers start from, and activations kept with
    `local="keep"`.

    `backward` waits beyond it.
    """

    local: Local = setting("recompute")
    """What the trainer does with its share of an accumulation block. With "recompute" it recomputes its segments, and
    with "keep" it keeps their activations, which takes memory and saves time. `accumulate(local=...)` overrides it."""

    pending_gradient_bytes: int = setting(0, not_negative)
    """Bytes of gradients that may be pending on the trainer until an accumulation block ends; 0 for any number."""

    shared_memory: bool = setting(True)
    """Exchange large tensors with workers on this machine through shared memory, if they offer it."""

    unix_socket: bool = setting(True)
    """Reach a worker on this machine over the Unix socket that it offers, even if `worker` is a TCP address."""

    memory_bytes: int = setting(0, not_negative)
    """Memory budget in bytes of a worker that connect() starts; 0 for half of its device's memory, divided by the
    number of ranks that share the device under torchrun."""

    telemetry: bool = setting(True)
    """Report steps and segments to workers, for dashboards."""

    tags: Sequence[str] = setting((), texts(MAX_TAGS, MAX_TAG))
    """Tags by which dashboards find the run, at most 16 of at most 40 characters."""

    notes: str = setting("", no_longer_than(MAX_NOTES))
    """Notes on the run for dashboards, at most 2,000 characters."""

    evidence: str | PathLike[str] = setting("")
    """Directory to which a share of the steps is written with all that is needed to compute them again, for
    `backhaul verify`; empty for none. It must be missing, empty, or from an earlier session. See docs/verify.md."""

    evidence_share: float = setting(0.01, share)
    """Share of the steps that `evidence` records, from 0 to 1: the first step, and then evenly."""

    evidence_bytes: int = setting(4 << 30, positive)
    """The most bytes that the files of `evidence` may have together. The recording ends before it would exceed them."""

    traces: bool = setting(False, has_opentelemetry)
    """Create OpenTelemetry spans of steps and segments, for the SDK that the training program configures. Needs
    `pip install 'backhaul[otel]'`."""

    whole_recheck: float = setting(0.02, share)
    """Share of the micro-batches that workers compute whole, from 0 to 1, that the trainer computes as well and
    compares. `recheck` counts instead if it is larger. See docs/whole-micro-batches.md."""

    def __post_init__(self) -> None:
        given = []
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Default):
                value = value.value
            else:
                given.append(field.name)
            object.__setattr__(self, field.name, checked(field, value))
        object.__setattr__(self, "_given", frozenset(given))

    def given(self) -> dict[str, Any]:
        """Returns the fields that were given, in the order of their declaration."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name in self._given}

    def __repr__(self) -> str:
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in self.given().items())})"


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """All settings of a session, resolved: those of `Settings` and the arguments of connect()."""

    worker: str = setting("")
    """Addresses of workers as "host:port" or "unix:/path", separated by commas; each worker gets a contiguous run of
    segments. Empty starts a worker on this machine that ends with the session. "file:/path" stands for the addresses in
    a file, "dns:///name:port" for all addresses of a name; both are looked at once a second."""

    token_file: str = setting("")
    """File with the token of the workers, or one file for each address, separated by commas. A worker that connect()
    starts needs no token."""

    tls: str = setting("")
    """Directory with `tls.crt`, `tls.key` and `ca.crt`, to speak TLS with workers; empty to speak without it.
    `backhaul certificates` makes them."""

    plan: str | PathLike[str] = setting("")
    """File that `backhaul plan` has written. Its settings count where neither the program nor the environment sets
    them."""

    returns: Returns = setting("auto")
    """What workers return for a segment: "gradients", "activations", or "auto": gradients where possible."""

    recheck: float = setting(0.0, share)
    """Share of the gradients from workers, from 0 to 1, that the trainer computes a second time and compares. A worker
    that was wrong gets nothing more. See docs/recheck.md."""

    strict: bool = setting(False)
    """Raise NotRemoteError instead of recomputing a segment on the trainer."""

    durability: Durability = setting("lineage")
    """What the trainer keeps in case a worker dies. "lineage" keeps what it cannot compute again from earlier segments,
    "host" keeps a copy of each segment's inputs, and "none" keeps nothing: a lost segment raises SegmentLostError."""

    numerics: Numerics = setting("auto")
    """What to do with workers that compute other bits than this trainer. "auto" uses them: they get the trainer's
    random draws, and their numbers are compared within tolerances. "exact" recomputes such segments on the trainer."""

    graphs: GraphUse = setting("auto")
    """Which segments are recorded once, not at each call. "auto": what is compiled with `backend="backhaul"`. "eager":
    also what Backhaul compiles itself, with eager kernels: every segment that torch.compile can capture whole. "off":
    none. See docs/compiled.md."""

    device: str = setting("", names_device)
    """Device of a worker that connect() starts: "cpu", "cuda" or "cuda:N". Empty: that of the first segment. Until then
    the worker runs on the GPU that the trainer has used, or on the CPU, and it is started anew if that was another."""

    allow: Sequence[str] = setting((), names_of_code)
    """What a worker that connect() starts runs beside torch's own ops: names of installed packages or modules, or of
    single classes as "module:name". Other workers have their operators' lists. See docs/allow.md."""

    run: str = setting("", no_longer_than(MAX_RUN_NAME))
    """What people call the run on dashboards, such as "lora-32k"; at most 100 characters."""


RARE = frozenset(field.name for field in fields(Settings))
"""The settings that are fields of `Settings`."""
ARGUMENTS = tuple(field.name for field in fields(Config) if field.name not in RARE)
"""The settings that are arguments of connect()."""


def resolve(settings: Settings | None = None, **arguments: Any) -> Config:
    """Resolves the settings from arguments (None: not given), `Settings`, the environment, the plan and the defaults.

    Raises:
        SettingError: A setting has an invalid value. Names the setting, the value and what is allowed.
    """
    if settings is not None and not isinstance(settings, Settings):
        raise SettingError(
            f"settings={settings!r} must be a backhaul.Settings, such as backhaul.Settings(silence_s=60)"
        )
    values = {} if settings is None else settings.given()
    values |= {name: value for name, value in arguments.items() if value is not None}
    for field in fields(Config):
        if field.name not in values and (text := in_environment(variable_of(field.name))) is not None:
            values[field.name] = parsed(field, text)
    if plan := Config(**values).plan:
        values = read_plan(str(plan)) | values
    return Config(**values)


def refuse_unknown(names: Iterable[str]) -> None:
    """Raises TypeError for a name that is no argument of connect(). Says where the setting of that name belongs."""
    for name in names:
        if name in RARE:
            raise TypeError(
                f"connect() has no argument {name!r}: it is a field of Settings, as in "
                f"connect(settings=backhaul.Settings({name}=...))"
            )
        if name not in {*ARGUMENTS, "settings"}:
            (nearest,) = get_close_matches(name, [*ARGUMENTS, "settings", *sorted(RARE)], n=1) or [""]
            kind = "a field of Settings" if nearest in RARE else "an argument"
            hint = f"did you mean {nearest!r}, {kind}?" if nearest else "docs/configuration.md lists all settings"
            raise TypeError(f"connect() has no argument {name!r}: {hint}")

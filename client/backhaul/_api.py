"""The functions of `backhaul` that use the current session."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from os import PathLike
from typing import Any

from torch import nn

from backhaul._cli.typos import warn_of_unknown
from backhaul._config import Boundaries, Compressed, Config, Durability, Local, Numerics, Returns, resolve
from backhaul._session import Session
from backhaul._torch_api import wrap as modules
from backhaul._torch_api.call_options import decorator, options_of
from backhaul_runtime.errors import SessionClosedError

_opened: list[Session] = []


def connect(
    worker: str | None = None,
    *,
    token_file: str | None = None,
    tls: str | None = None,
    plan: str | PathLike[str] | None = None,
    segment_layers: int | None = None,
    kept_layers: int | None = None,
    returns: Returns | None = None,
    strict: bool | None = None,
    durability: Durability | None = None,
    boundaries: Boundaries | None = None,
    numerics: Numerics | None = None,
    compression: Compressed | None = None,
    compression_bytes: int | None = None,
    connect_timeout_s: float | None = None,
    silence_s: float | None = None,
    inflight_bytes: int | None = None,
    inflight_boundaries: int | None = None,
    inflight_micro_batches: int | None = None,
    deferred_bytes: int | None = None,
    local: Local | None = None,
    held_bytes: int | None = None,
    shared_memory: bool | None = None,
    unix_socket: bool | None = None,
    connections: int | None = None,
    memory_bytes: int | None = None,
    device: str | None = None,
    allow: Sequence[str] | None = None,
    telemetry: bool | None = None,
    run: str | None = None,
    tags: Sequence[str] | None = None,
    notes: str | None = None,
    traces: bool | None = None,
) -> Session:
    """Opens a session and makes it the current one.

    Each argument can also be set in the environment, as `BACKHAUL_` followed by its name in capitals.
    docs/configuration.md lists all variables.

    Args:
        worker: Address as "host:port" or "unix:/path", or a source of addresses that may change: "file:/path" (one in
            each line) or "dns:///name:port" (all of the name). Several are separated by commas; each worker gets a
            contiguous run of segments. None: starts a worker process on this machine that ends with the session.
        token_file: File with the token of the workers, or one file for each worker, separated by commas.
        tls: Directory with `tls.crt`, `tls.key` and `ca.crt`. Workers then must speak TLS.
        plan: File that `backhaul plan` has written. Its settings count where neither an argument nor the environment
            sets them.
        segment_layers: Number of consecutive modules that `wrap` joins into one segment (default: 1).
        kept_layers: Number of the last modules that `wrap` leaves without checkpointing (default: 0).
        returns: What workers return: "gradients", "activations", or "auto" (default): gradients where possible.
        strict: Raise NotRemoteError instead of recomputing a segment on the trainer.
        durability: What the trainer keeps in case a worker dies: "lineage" (default) keeps what it cannot compute again
            from earlier segments; "host" keeps a copy of each segment's inputs; "none" keeps nothing.
        boundaries: How a worker gets the boundary between two of its segments: sent by the trainer ("send"), computed
            from the segment before ("derive"), or whatever takes less time ("auto", default).
        numerics: Whether workers that compute other bits are used ("auto", default) or not ("exact").
        compression: Whether changed parameters are sent as compressed differences: where that saves time ("auto",
            default), always ("on") or never ("off").
        compression_bytes: Bytes of copies of parameters that the trainer may keep for that.
        connect_timeout_s: Seconds that this call waits for the workers.
        silence_s: Seconds without a message after which a worker counts as lost.
        inflight_bytes: Bound of the copies that wait to be sent, of arguments and of parameters that FSDP frees. Two
            segments may wait in any case.
        inflight_boundaries: The most segments whose inputs may wait to be sent; forward blocks beyond it.
        inflight_micro_batches: Micro-batches of an accumulation block whose backward may be unfinished; 0 (default) for
            three more than there are workers.
        deferred_bytes: Bytes that unfinished micro-batches of an accumulation block may hold on the trainer; 0
            (default) for any number. `backward` waits beyond it.
        local: What the trainer does with its share of an accumulation block: "recompute" its segments (default), or
            "keep" their activations.
        held_bytes: Bytes of gradients that an accumulation block may hold back on the trainer; 0 (default) for any
            number.
        shared_memory: Whether large tensors for a worker on this machine use shared memory (default: yes).
        unix_socket: Whether a worker on this machine is reached over its Unix socket (default: yes).
        connections: Number of connections to each worker, over which large tensors are striped; 0 (default) chooses it
            by measurements.
        memory_bytes: Memory budget of a worker that this call starts.
        device: Device of a worker that this call starts: "cpu", "cuda" or "cuda:N". None: the device of the first
            segment.
        allow: What a worker that this call starts runs beside torch's own ops, as `backhaul worker --allow` takes it:
            names of installed packages or modules, or of single classes as "module:name". See docs/allow.md.
        telemetry: Whether steps and segments are reported to workers, for dashboards (default: yes).
        run: What people call the run on dashboards, such as "lora-32k"; at most 100 characters.
        tags: Tags by which dashboards find the run, at most 16 of at most 40 characters.
        notes: Notes on the run for dashboards, at most 2,000 characters.
        traces: Whether OpenTelemetry spans are created, for the SDK that the program configures. Needs the extra
            "otel".

    Raises:
        AddressError: An address is malformed.
        ConnectError: No worker answers at one of the addresses.
        CredentialError: A worker requires a token, and `token_file` is missing or holds another one.
        LimitError: Under `strict`: a worker accepts no further session. BudgetError if its memory is the reason.
        ProtocolVersionError: A worker speaks another protocol version.
        SettingError: A setting has an invalid value.

    Warns:
        NotRemoteWarning: Every segment will run on the trainer, because no worker has the same torch or, with
            numerics="exact", because no worker computes the same bits; or for now, because no worker accepts a further
            session.
    """
    warn_of_unknown()
    session = Session(
        resolve(
            worker=worker,
            token_file=token_file,
            tls=tls,
            plan=plan,
            segment_layers=segment_layers,
            kept_layers=kept_layers,
            returns=returns,
            strict=strict,
            durability=durability,
            boundaries=boundaries,
            numerics=numerics,
            compression=compression,
            compression_bytes=compression_bytes,
            connect_timeout_s=connect_timeout_s,
            silence_s=silence_s,
            inflight_bytes=inflight_bytes,
            inflight_boundaries=inflight_boundaries,
            inflight_micro_batches=inflight_micro_batches,
            deferred_bytes=deferred_bytes,
            local=local,
            held_bytes=held_bytes,
            shared_memory=shared_memory,
            unix_socket=unix_socket,
            connections=connections,
            memory_bytes=memory_bytes,
            device=device,
            allow=allow,
            telemetry=telemetry,
            run=run,
            tags=tags,
            notes=notes,
            traces=traces,
        )
    )
    _opened[:] = [*(other for other in _opened if not other.closed), session]
    return session


def current_session() -> Session:
    """Returns the open session that was opened last. Raises SessionClosedError if there is none."""
    for session in reversed(_opened):
        if not session.closed:
            return session
    if _opened:
        return _opened[-1]  # it is closed, or belongs to the parent process: its segments run on the trainer
    raise SessionClosedError("there is no open session: call backhaul.connect() first")


def checkpoint(
    function: Callable[..., Any] | None = None, *args: Any, session: Session | None = None, **kwargs: Any
) -> Any:
    """Calls `Session.checkpoint` of the given or current session.

    As a decorator: of the session current at each call.
    """
    if function is None:
        _, rest = options_of(Config(), kwargs)
        return decorator(partial(checkpoint, session=session), args, rest, kwargs)
    return (session or current_session()).checkpoint(function, *args, **kwargs)


def checkpoint_sequential(
    functions: nn.Sequential | Sequence[Callable[..., Any]],
    segments: int,
    input: Any,
    *inputs: Any,
    session: Session | None = None,
    **kwargs: Any,
) -> Any:
    """Calls `Session.checkpoint_sequential` of the given or current session."""
    return (session or current_session()).checkpoint_sequential(functions, segments, input, *inputs, **kwargs)


@contextmanager
def patched() -> Iterator[Session]:
    """Calls `Session.patched` of the current session."""
    with current_session().patched() as session:
        yield session


def wrap(
    model: nn.Module,
    layers: type[nn.Module] | tuple[type[nn.Module], ...],
    *,
    session: Session | None = None,
    segment_layers: int | None = None,
    kept_layers: int | None = None,
    **options: Any,
) -> nn.Module:
    """Makes each module of the given classes inside the model a checkpointed segment, in place. `unwrap` undoes it.

    Names of parameters, buffers and modules, keys of state_dict, copies and saved files stay the same.

    Args:
        model: The model to change. A model that is itself of one of the classes cannot be replaced: wrap a parent.
        layers: Classes of the modules to checkpoint. Modules inside a wrapped module are not wrapped.
        session: The session of the segments; None: the current session at each call.
        segment_layers: Number of consecutive modules that form one segment, where each takes what the one before
            returns. None: the setting of the session, or of the session that is open now; 1 if there is none. The first
            forward still runs each module as a segment, to see what it takes and returns.
        kept_layers: Number of the last modules that stay without checkpointing. None: as for `segment_layers`, or 0.
        **options: Options of `checkpoint`, such as `returns`.

    Raises:
        ValueError: The model has no module of these classes.
        SettingError: An argument has an invalid value.
    """
    opened = [session] if session is not None else [one for one in _opened if not one.closed]
    config = opened[-1].config if opened else Config()
    return modules.wrap(
        model,
        layers,
        partial(checkpoint, session=session, **options),
        segment_layers=config.segment_layers if segment_layers is None else segment_layers,
        kept_layers=config.kept_layers if kept_layers is None else kept_layers,
    )

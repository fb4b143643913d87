"""The functions of `backhaul` that work on the current session."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from backhaul._cli.typos import warn_of_unknown
from backhaul._config import Accumulate, Config, Durability, Numerics, Returns, resolve
from backhaul._session import Session
from backhaul._torch_api import wrap as modules
from backhaul._torch_api.options import decorator, options_of
from backhaul_runtime.errors import SessionClosedError

_opened: list[Session] = []


def connect(
    worker: str | None = None,
    *,
    token_file: str | None = None,
    returns: Returns | None = None,
    strict: bool | None = None,
    durability: Durability | None = None,
    numerics: Numerics | None = None,
    accumulate: Accumulate | None = None,
    connect_timeout_s: float | None = None,
    silence_s: float | None = None,
    inflight_bytes: int | None = None,
    inflight_boundaries: int | None = None,
    shared_memory: bool | None = None,
    unix_socket: bool | None = None,
    memory_bytes: int | None = None,
    telemetry: bool | None = None,
    traces: bool | None = None,
) -> Session:
    """Opens a session and makes it the current one.

    Each argument may also be set in the environment, as BACKHAUL_ and its name in capitals; docs/configuration.md has
    them all.

    Args:
        worker: "host:port", "unix:/path" or "dns:///host:port", several with commas between; each gets a contiguous
            run of segments. Without one a worker process is started on this machine and ends with the session.
        token_file: File with the token that the workers want, or one for each with commas between, in their order.
        returns: "gradients", "activations" or "auto" (the default), gradients wherever a segment allows.
        strict: Raise NotRemoteError rather than recompute a segment on the trainer.
        durability: What the trainer keeps in case a worker dies: "lineage" (the default), what it can't compute again
            from earlier segments; "host", a copy of each segment's inputs; "none", nothing.
        numerics: Whether workers that compute other bits are used ("auto", the default) or not ("exact").
        accumulate: Where gradients of parameters are summed over micro-batches: here ("trainer", the default), or on
            the worker, which returns them once, see docs/accumulation.md.
        connect_timeout_s: How long to wait for the workers here.
        silence_s: A worker that sends nothing for so long is given up.
        inflight_bytes: Bound of the copies of arguments, and of parameters that FSDP frees, that wait to be sent.
        inflight_boundaries: The most segments whose inputs may wait to be sent, before forward waits.
        shared_memory: Send large tensors to a worker on this machine through shared memory (the default).
        unix_socket: Talk to a worker on this machine over its Unix socket (the default), whatever its address.
        memory_bytes: Budget of a worker started here.
        telemetry: Tell workers of steps and segments (the default), for dashboards to show.
        traces: Make OpenTelemetry spans of them, for the SDK that the program configures. Needs the extra "otel".

    Raises:
        AddressError: An address can't be read.
        ConnectError: Nobody answers at one of them.
        CredentialError: One wants a token, and `token_file` is not given or holds another one.
        ProtocolVersionError: A worker of another version answers.
        SettingError: A setting has a value it can't have.

    Warns:
        NotRemoteWarning: Every segment will run on the trainer, because no worker has the trainer's torch or, with
            numerics="exact", because no worker computes the same bits.
    """
    warn_of_unknown()
    session = Session(
        resolve(
            worker=worker,
            token_file=token_file,
            returns=returns,
            strict=strict,
            durability=durability,
            numerics=numerics,
            accumulate=accumulate,
            connect_timeout_s=connect_timeout_s,
            silence_s=silence_s,
            inflight_bytes=inflight_bytes,
            inflight_boundaries=inflight_boundaries,
            shared_memory=shared_memory,
            unix_socket=unix_socket,
            memory_bytes=memory_bytes,
            telemetry=telemetry,
            traces=traces,
        )
    )
    _opened[:] = [*(other for other in _opened if not other.closed), session]
    return session


def current_session() -> Session:
    """The session opened last that is still open. Raises SessionClosedError where there is none."""
    for session in reversed(_opened):
        if not session.closed:
            return session
    if _opened:
        return _opened[-1]  # closed, or the parent's: what it is asked for runs on the trainer
    raise SessionClosedError("there is no session: call backhaul.connect() first")


def checkpoint(
    function: Callable[..., Any] | None = None, *args: Any, session: Session | None = None, **kwargs: Any
) -> Any:
    """`Session.checkpoint` of the current session, or of the one given. As a decorator: of that of each call."""
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
    """`Session.checkpoint_sequential` of the current session, or of the one given."""
    return (session or current_session()).checkpoint_sequential(functions, segments, input, *inputs, **kwargs)


@contextmanager
def patched() -> Iterator[Session]:
    """`Session.patched` of the current session."""
    with current_session().patched() as session:
        yield session


def wrap(
    model: nn.Module,
    layers: type[nn.Module] | tuple[type[nn.Module], ...],
    *,
    session: Session | None = None,
    **options: Any,
) -> nn.Module:
    """Makes each module of the given classes inside the model a checkpointed segment, in place. `unwrap` undoes it.

    Names of parameters, buffers and modules, keys of state_dict, copies and saved files stay as they were.

    Args:
        model: Changed and returned. If it is itself of one of the classes it can't be replaced in place: wrap a parent.
        layers: Classes of the modules to checkpoint. Modules inside a wrapped one stay as they are.
        session: Whose segments they are; None: the current session at each call.
        **options: As for `checkpoint`, `returns` among them.

    Raises:
        ValueError: The model has no module of these classes.
    """
    return modules.wrap(model, layers, partial(checkpoint, session=session, **options))

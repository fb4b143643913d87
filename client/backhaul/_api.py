"""The functions of `backhaul` that use the current session."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from os import PathLike
from typing import Any, ParamSpec

from torch import nn

from backhaul._cli.typos import warn_of_unknown
from backhaul._config import Config, Durability, GraphUse, Numerics, Returns, Settings, refuse_unknown, resolve
from backhaul._forward.graph_backend import GraphTarget
from backhaul._session import Session
from backhaul._torch_api import wrap as modules
from backhaul._torch_api.call_options import decorator, options_of
from backhaul_runtime.errors import SessionClosedError

_P = ParamSpec("_P")
_opened: list[Session] = []


def _refusing_unknown(function: Callable[_P, Session]) -> Callable[_P, Session]:
    """Makes an unknown argument raise an error that says where the setting of that name belongs."""

    @wraps(function)
    def with_known_names(*arguments: _P.args, **named: _P.kwargs) -> Session:
        refuse_unknown(named)
        return function(*arguments, **named)

    return with_known_names


@_refusing_unknown
def connect(
    worker: str | None = None,
    *,
    token_file: str | None = None,
    tls: str | None = None,
    plan: str | PathLike[str] | None = None,
    returns: Returns | None = None,
    recheck: float | None = None,
    strict: bool | None = None,
    durability: Durability | None = None,
    numerics: Numerics | None = None,
    graphs: GraphUse | None = None,
    device: str | None = None,
    allow: Sequence[str] | None = None,
    run: str | None = None,
    settings: Settings | None = None,
) -> Session:
    """Opens a session and makes it the current one.

    Settings that few programs set are fields of `Settings`. Each argument and each of these fields can also be set in
    the environment, as `BACKHAUL_` followed by its name in capitals: docs/configuration.md lists all variables. What
    the program sets has precedence over the environment, and the environment over the plan.

    Args:
        worker: Addresses of workers as "host:port" or "unix:/path", separated by commas; each worker gets a contiguous
            run of segments. Empty starts a worker on this machine that ends with the session. "file:/path" stands for
            the addresses in a file, "dns:///name:port" for all addresses of a name; both are looked at once a second.
        token_file: File with the token of the workers, or one file for each address, separated by commas. A worker that
            connect() starts needs no token.
        tls: Directory with `tls.crt`, `tls.key` and `ca.crt`, to speak TLS with workers; empty to speak without it.
            `backhaul certificates` makes them.
        plan: File that `backhaul plan` has written. Its settings count where neither the program nor the environment
            sets them.
        returns: What workers return for a segment: "gradients", "activations", or "auto": gradients where possible.
        recheck: Share of the gradients from workers, from 0 to 1, that the trainer computes a second time and compares.
            A worker that was wrong gets nothing more. See docs/recheck.md.
        strict: Raise NotRemoteError instead of recomputing a segment on the trainer.
        durability: What the trainer keeps in case a worker dies. "lineage" keeps what it cannot compute again from
            earlier segments, "host" keeps a copy of each segment's inputs, and "none" keeps nothing: a lost segment
            raises SegmentLostError.
        numerics: What to do with workers that compute other bits than this trainer. "auto" uses them: they get the
            trainer's random draws, and their numbers are compared within tolerances. "exact" recomputes such segments
            on the trainer.
        graphs: Which segments are recorded once, not at each call. "auto": what is compiled with `backend="backhaul"`.
            "eager": also what Backhaul compiles itself, with eager kernels: every segment that torch.compile can
            capture whole. "off": none. See docs/compiled.md.
        device: Device of a worker that connect() starts: "cpu", "cuda" or "cuda:N". Empty: that of the first segment.
            Until then the worker runs on the GPU that the trainer has used, or on the CPU, and it is started anew if
            that was another.
        allow: What a worker that connect() starts runs beside torch's own ops: names of installed packages or modules,
            or of single classes as "module:name". Other workers have their operators' lists. See docs/allow.md.
        run: What people call the run on dashboards, such as "lora-32k"; at most 100 characters.
        settings: Settings that few programs set, as in `backhaul.Settings(silence_s=60, compression="off")`.

    Raises:
        AddressError: An address is malformed.
        ConnectError: No worker answers at one of the addresses.
        CredentialError: A worker requires a token, and `token_file` is missing or holds another one.
        LimitError: Under `strict`: a worker accepts no further session. BudgetError if its memory is the reason.
        ProtocolVersionError: A worker speaks another protocol version.
        SettingError: A setting has an invalid value.
        TypeError: An argument is unknown. Says which field of `Settings` or which argument may be meant.

    Warns:
        NotRemoteWarning: Every segment will run on the trainer, because no worker has the same torch or, with
            numerics="exact", because no worker computes the same bits; or for now, because no worker accepts a further
            session.
    """
    warn_of_unknown()
    session = Session(
        resolve(
            settings,
            worker=worker,
            token_file=token_file,
            tls=tls,
            plan=plan,
            returns=returns,
            recheck=recheck,
            strict=strict,
            durability=durability,
            numerics=numerics,
            graphs=graphs,
            device=device,
            allow=allow,
            run=run,
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


def present_target() -> GraphTarget | None:
    """Returns where the graphs of `backend="backhaul"` become segments: the current session, None without one."""
    session = next((session for session in reversed(_opened) if not session.closed), None)
    return None if session is None else session.graphs.target


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

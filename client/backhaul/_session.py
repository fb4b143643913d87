"""A session: the workers of a trainer, and the public methods that use them."""

import atexit
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial
from time import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from backhaul._backward.lineage import Copies
from backhaul._config import SECRETS, Config
from backhaul._dispatch.dispatcher import Dispatcher
from backhaul._dispatch.worker_handle import WorkerHandle
from backhaul._forward.checkpoint import run_segment
from backhaul._observe.report import Journal, Report
from backhaul._observe.telemetry import Telemetry
from backhaul._observe.warnings import warn_not_remote
from backhaul._torch_api import fsdp, patched, sequential, wrap
from backhaul._torch_api.options import Options, decorator, names_of_torch, options_of
from backhaul._worker_client.connection import Connection, trainer_name
from backhaul._worker_client.deadlines import call_unary
from backhaul._worker_client.embedded import EmbeddedWorker
from backhaul_proto.v1 import telemetry_pb2
from backhaul_runtime.errors import BackhaulError, GradientsLostError
from backhaul_runtime.process.addresses import Address, parse_addresses
from backhaul_runtime.process.credentials import one_for_each
from backhaul_runtime.process.fingerprint import fingerprint
from backhaul_runtime.process.logs import about
from backhaul_runtime.version import version

if TYPE_CHECKING:
    from backhaul._observe.opentelemetry import Traces

logger = logging.getLogger("backhaul")


class Session:
    """Connects a trainer to its workers. Made by `backhaul.connect`; a context manager.

    After construction, a missing worker raises no error unless `strict` is set: its segments run on the trainer. All
    methods are thread-safe.

    Args:
        config: The resolved settings of the session.

    Raises:
        AddressError: An address is malformed.
        ConnectError: No worker answers at one of the addresses.
        CredentialError: A worker rejected the token, or requires one.
        ProtocolVersionError: A worker speaks another protocol version.
        SettingError: A token file cannot be read, or the number of token files does not match the workers.
    """

    def __init__(self, config: Config) -> None:
        if "GRPC_ENABLE_FORK_SUPPORT" in os.environ:
            logger.warning(
                "GRPC_ENABLE_FORK_SUPPORT is set. 1 can block a fork under traffic; 0 can hide the death of a trainer "
                "from its worker while child processes live. Leave it unset."
            )
        self.config = config
        self.run = secrets.token_hex(8)
        self._hooks: list[RemovableHandle] = []
        self.copies = Copies(self._fetch)
        self._closed = False
        self._embedded: EmbeddedWorker | None = None
        self._workers: list[WorkerHandle] = []
        self._dispatcher = Dispatcher(config, Journal(self.run), self._workers, self.copies, lambda: self._closed)
        connect_to = partial(
            Connection,
            silence_s=config.silence_s,
            run=self.run,
            shares_memory=config.shared_memory,
            takes_socket=config.unix_socket,
        )
        if config.worker:
            addresses = parse_addresses(config.worker)
            token_files = one_for_each([file.strip() for file in config.token_file.split(",") if file], len(addresses))
            connections = [
                connect_to(partial(_same, address), token_file=file)
                for address, file in zip(addresses, token_files, strict=True)
            ]
        else:
            self._embedded = EmbeddedWorker(config.memory_bytes, config.connect_timeout_s)
            connections = [connect_to(self._embedded.ensure)]
        try:
            for connection in connections:
                connection.open(config.connect_timeout_s)
                self._workers.append(WorkerHandle(connection, config.inflight_bytes, config.inflight_boundaries))
            self._warn_if_useless()
        except BaseException:
            self.close()
            raise
        if config.telemetry or config.traces:
            traces = _traces() if config.traces else None
            self._dispatcher.telemetry = Telemetry(self._deliver, self._describe(), traces)
            self._dispatcher.telemetry.start()
            # The hook sees all optimizers of the process. A step in which this session had no call is not reported.
            self._hooks.append(register_optimizer_step_post_hook(self._optimizer_stepped))
        if config.accumulate == "worker":
            self._hooks.append(register_optimizer_step_pre_hook(self._before_step))
        _sessions.add(self)

    def checkpoint(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Runs `function(*args, **kwargs)` and lets a worker recompute it in backward.

        Args:
            function: The function to run. It is called once, now, with the caller's own objects. None: returns a
                decorator.
            *args: Arguments of the function. Tensors among them must not be changed in place before backward.
            **kwargs: Keyword arguments of the function, and options of torch's checkpoint: `use_reentrant`,
                `preserve_rng_state`, `context_fn`, `determinism_check`, `debug`, `early_stop` and
                `respect_saved_tensors_hooks`. Further options are `returns`, `strict` and `durability`, which default
                to those of the session.

        Returns:
            The return value of the function.

        Raises:
            NotRemoteError: Under `strict`, if the trainer would have to recompute the segment.
            SegmentLostError: Raised by backward, not by this method: the worker is gone, and the trainer has not kept
                what it needs to recompute the segment.
            ValueError: An option is one that torch rejects too.
        """
        options, rest = options_of(self.config, kwargs)
        if function is None:
            return decorator(self.checkpoint, args, rest, kwargs)
        return self._run(function, args, rest, options)

    def _instead_of_torchs(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Runs a call that `patched` redirected. Only the options of torch's function are treated as options.

        The decorator form returns a function that calls torch's function, so it is redirected only inside a `patched`
        block.
        """
        options, rest = options_of(self.config, kwargs, names_of_torch())
        if function is None:
            return decorator(torch.utils.checkpoint.checkpoint, args, rest, kwargs)
        return self._run(function, args, rest, options)

    def _run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
    ) -> Any:
        return fsdp.call(partial(run_segment, self._dispatcher, options=options), function, args, kwargs)

    def checkpoint_sequential(
        self,
        functions: nn.Sequential | Sequence[Callable[..., Any]],
        segments: int,
        input: Any,
        *inputs: Any,
        **kwargs: Any,
    ) -> Any:
        """Runs functions in a row, in `segments` chunks. All chunks but the last are checkpointed.

        Works as `torch.utils.checkpoint.checkpoint_sequential`, but also with several inputs, as torch 0.4 did: then
        each function is called with all of them, and a returned tuple is passed to the next function. The keyword
        arguments are those of `checkpoint`.

        Raises:
            ValueError: There are more segments than functions, or fewer than one.
        """
        return sequential.checkpoint_sequential(self.checkpoint, functions, segments, input, *inputs, **kwargs)

    def wrap(
        self, model: nn.Module, layers: type[nn.Module] | tuple[type[nn.Module], ...], **options: Any
    ) -> nn.Module:
        """Checkpoints each module of the given classes inside the model, in place. See `backhaul.wrap`."""
        return wrap.wrap(model, layers, partial(self.checkpoint, **options))

    @contextmanager
    def patched(self) -> Iterator[Self]:
        """Redirects `torch.utils.checkpoint.checkpoint` to this session, for code that you cannot edit.

        This includes calls by code that imported torch's function before the block, for example a model whose
        checkpointing is switched on. The options are those of the installed torch's function; all other keyword
        arguments are passed to the checkpointed function. The redirection applies to all threads.

        If nothing called torch's function, leaving the block issues a `NotRemoteWarning`.

        Raises:
            NotRemoteError: Under `strict`, if nothing called torch's function inside the block.
        """
        with patched.patched(self._instead_of_torchs, strict=self.config.strict):
            yield self

    @property
    def telemetry(self) -> Telemetry | None:
        """The telemetry of the session; None if it neither sends telemetry nor creates traces."""
        return self._dispatcher.telemetry

    @property
    def workers(self) -> str:
        """The addresses of the workers, separated by commas, as `connect` accepts them."""
        return ",".join(worker.connection.name for worker in self._workers)

    def report(self) -> Report:
        """Returns what has run where so far, why, and at what cost."""
        return self._dispatcher.journal.report()

    def step(self, loss: Tensor | float | None = None) -> None:
        """Reports that a training step has ended. Only dashboards and traces depend on it.

        Without this call, each step of an optimizer ends a training step. Call it after the step to report the loss, or
        if a step uses no optimizer or several. From the first call on, optimizers no longer end steps.

        Args:
            loss: A scalar. A tensor is read later by another thread, so it must not be changed in place.
        """
        if self.telemetry is not None and not self._closed:
            self.telemetry.step(loss)

    def collect(self) -> None:
        """Fetches gradients kept under `accumulate="worker"` and adds them to `.grad` as autograd does.

        It is called automatically before each step of an optimizer of this process. Call it before anything else that
        reads or clears `.grad`: clipping, `GradScaler.unscale_` and `GradScaler.step`, and `zero_grad` without a step.

        Raises:
            GradientsLostError: A worker is gone with some of the gradients. Then none are added and none are kept: set
                the gradients to zero and repeat the backwards of this step.
        """
        sums: list[tuple[Tensor, Tensor]] = []
        lost: dict[str, str] = {}
        for worker in self._workers:
            try:
                sums += worker.uploader.uncollected.collect(partial(self._received, "Session.collect"))
            except BackhaulError as error:
                lost[worker.connection.name] = error.message
        if lost:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in lost.items())
            raise GradientsLostError(
                f"gradients that workers kept since the last step are lost ({reasons}), so .grad holds only a part of "
                "the sum. Call zero_grad() and repeat the forwards and backwards of this step",
                workers=list(lost),
            )
        while sums:
            parameter, gradient = sums.pop()
            torch.autograd.backward(parameter, gradient.to(parameter.device))

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or this process is the child of a fork."""
        return self._closed

    def close(self) -> None:
        """Ends threads and connections, and a worker that connect() started. It may be called twice.

        Segments between forward and backward remain usable: the trainer recomputes them.

        Raises:
            GradientsLostError: Everything is closed, but gradients were lost; see `collect`.
        """
        if self._closed:
            return
        try:
            self.collect()
        finally:
            self._end()

    def _end(self) -> None:
        self._closed = True
        _sessions.discard(self)
        for hook in self._hooks:
            hook.remove()
        if self.telemetry is not None:
            self.telemetry.close()
        if self._embedded is not None:
            self._embedded.interrupt()
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.uploader.close()
        if self._embedded is not None:
            self._embedded.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except GradientsLostError:
            if error is None:
                raise
            logger.warning(
                "Gradients were lost when the session was closed after an error.", exc_info=True, extra=about(self.run)
            )

    def _warn_if_useless(self) -> None:
        if why := self._dispatcher.why_useless():
            is_exact = self.config.numerics == "exact"
            todo = 'Drop numerics="exact"' if is_exact else "Install the same torch on both sides"
            warn_not_remote(
                f"every segment will run on the trainer, because no worker computes the same bits: {why}. {todo}, "
                "or connect to other workers"
            )

    def _optimizer_stepped(self, *_: Any) -> None:
        if self.telemetry is not None and not self._closed:
            self.telemetry.step(is_explicit=False)

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Collects gradients before an optimizer's step, and after each call of its closure."""
        self.collect()

        def collecting(closure: Any) -> Any:
            def call() -> Any:
                loss = closure()
                self.collect()
                return loss

            return call if callable(closure) else closure

        given = {name: collecting(value) if name == "closure" else value for name, value in kwargs.items()}
        return (args[0], *map(collecting, args[1:])), given  # the first argument is the optimizer itself

    def _fetch(self, address: bytes) -> Tensor | None:
        """Fetches a tensor by address from a worker that still stores it. Returns None if there is none."""
        if self._closed:  # checked first: in the child of a fork a lock may stay locked for ever
            return None
        fetched = (
            worker.fetch(address, partial(self._received, "boundaries of lost segments")) for worker in self._workers
        )
        return next((tensor for tensor in fetched if tensor is not None), None)

    def _received(self, name: str, size_bytes: int) -> None:
        self._dispatcher.journal.log(name).traffic(down_bytes=size_bytes)
        if self.telemetry is not None:
            self.telemetry.moved(0, size_bytes)

    def _describe(self) -> telemetry_pb2.Run:
        settings = {field.name: str(getattr(self.config, field.name)) for field in fields(self.config)}
        return telemetry_pb2.Run(
            id=self.run,
            trainer=trainer_name(),
            client_version=version(),
            started_at_s=time(),
            settings={name: value for name, value in settings.items() if name not in SECRETS},
            fingerprint=fingerprint(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
            workers=[worker.connection.name for worker in self._workers],
        )

    def _deliver(self, report: telemetry_pb2.TrainerReport) -> bool:
        """Sends a report to a worker that is up.

        Returns whether it was delivered; True if telemetry is switched off.
        """
        if not self.config.telemetry:
            return True
        for worker in self._workers:
            if (worker_session := worker.connection.up) is not None:
                request = telemetry_pb2.PutReportsRequest(session=worker_session.session, report=report)
                try:
                    call_unary(
                        worker.connection.stubs(worker_session).telemetry.PutReports, request, self.config.silence_s
                    )
                except BackhaulError as error:
                    logger.debug(
                        "Worker %s did not take a report: %s", worker.connection.name, error, extra=about(self.run)
                    )
                else:
                    return True
        return False

    def _forked(self) -> None:
        self._closed = True
        self._dispatcher.journal = Journal(self.run)  # threads of the parent may have held the locks of the old one
        if self.telemetry is not None:
            self.telemetry.forked()
        for worker in self._workers:
            worker.connection.forked()
            worker.uploader.uncollected.forked()


def _traces() -> "Traces":
    from backhaul._observe.opentelemetry import Traces  # its package is an optional extra

    return Traces()


def _same(address: Address) -> Address:
    return address


# Keeps sessions alive until they are closed, because their threads and workers run until then.
_sessions: set[Session] = set()


def _after_fork() -> None:
    for session in _sessions:
        session._forked()
    _sessions.clear()


def _at_exit() -> None:
    for session in list(_sessions):
        with suppress(GradientsLostError):  # no training will follow that could use them
            session.close()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)

"""A session: the workers of a trainer, and the public methods that use them."""

import atexit
import itertools
import logging
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from functools import partial
from time import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from backhaul._accumulate import guards
from backhaul._accumulate.block import AccumulationBlock
from backhaul._accumulate.block_times import EndedBlock
from backhaul._accumulate.plan import MORE_OPEN, Shares
from backhaul._accumulate.whole import WholeMicroBatches
from backhaul._accumulate.whole_shares import WholeShares
from backhaul._backward.lineage import Copies
from backhaul._backward.recheck import Rechecks
from backhaul._config import DESCRIPTIVE, LOCALS, SECRETS, Config, Local
from backhaul._dispatch.dispatcher import Dispatcher
from backhaul._dispatch.roster import Roster
from backhaul._dispatch.worker_handle import WorkerHandle
from backhaul._evidence.evidence import Evidence
from backhaul._forward.graphs import Graphs, keep_own_code_out
from backhaul._forward.whole_call import WholeCalls
from backhaul._observe.journal import Journal
from backhaul._observe.ranks import rank_and_world
from backhaul._observe.report import Report
from backhaul._observe.run_events import RunEvents
from backhaul._observe.telemetry import Telemetry
from backhaul._observe.warnings import warn_not_remote
from backhaul._torch_api import fsdp, patched, sequential, wrap
from backhaul._torch_api.call_options import NAMES, TORCHS, Options, decorator, names_of_torch, options_of
from backhaul._torch_api.inlining import is_inlined
from backhaul._torch_api.patched import Redirect
from backhaul._worker_client.connection.calls import call_unary
from backhaul._worker_client.connection.connection import Connection, trainer_name
from backhaul._worker_client.connection.embedded import EmbeddedWorker
from backhaul._worker_client.upload.compression import Compression, CopyMemory
from backhaul_proto.v1 import telemetry_pb2
from backhaul_runtime.errors import AccumulationError, BackhaulError, SessionClosedError
from backhaul_runtime.process.addresses import Address
from backhaul_runtime.process.credentials import one_for_each
from backhaul_runtime.process.discovery import parse_resolvers
from backhaul_runtime.process.fingerprint import fingerprint
from backhaul_runtime.process.logs import about
from backhaul_runtime.process.tls import files_of
from backhaul_runtime.record.contents import FixedDigests
from backhaul_runtime.tensors.stopwatch import Stopwatch, device_of_work
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
        LimitError: Under `strict`: a worker accepts no further session. BudgetError if its memory is the reason.
        ProtocolVersionError: A worker speaks another protocol version.
        SettingError: A token file cannot be read, the number of token files does not match the workers, or the
            directory for evidence cannot be used.
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
        self._blocks = itertools.count(1)
        self._shares = {local: Shares(config.pending_gradient_bytes) for local in LOCALS}
        self._unmeasured: tuple[Shares, EndedBlock] | None = None  # the last block, while its device is at work
        self._block_lock = threading.Lock()  # guards the field below
        self._block: tuple[int, AccumulationBlock] | None = None  # the open block, after the thread that opened it
        self.copies = Copies(self._fetch)
        self._closed = False
        self._has_explicit_steps = False  # from the first on, optimizers no longer end steps
        self._embedded: EmbeddedWorker | None = None
        events = RunEvents()
        connect_to = partial(
            Connection,
            silence_s=config.silence_s,
            run=self.run,
            tls=files_of(config.tls),
            shares_memory=config.shared_memory,
            takes_socket=config.unix_socket,
            events=events,
        )
        self._copy_memory = CopyMemory(config.compression_bytes)
        self._workers = Roster(
            self.run,
            lambda address, token_file: connect_to(partial(_same, address), token_file=token_file),
            lambda connection: WorkerHandle(
                connection,
                config.inflight_bytes,
                config.inflight_boundaries,
                Compression(config.compression, self._copy_memory),
            ),
            config.connect_timeout_s,
        )
        self._dispatcher = Dispatcher(
            config, Journal(self.run), self._workers, self.copies, lambda: self._closed, self._follow
        )
        if "torch._dynamo" in sys.modules:  # code that is compiled may call the session
            keep_own_code_out()
        options = options_of(config, {})[0]
        self.graphs = Graphs(self._dispatcher, options)
        self._whole_calls, self._whole_shares = WholeCalls(self.graphs, self._dispatcher, options), WholeShares()
        whole_recheck = max(config.recheck, config.whole_recheck)
        self._whole_rechecks = Rechecks(whole_recheck) if whole_recheck else None
        resolvers = parse_resolvers(config.worker) if config.worker else []
        files = [file.strip() for file in config.token_file.split(",") if file]
        token_files = one_for_each(files, len(resolvers)) if resolvers else []
        try:
            if not resolvers:
                self._embedded = EmbeddedWorker(
                    config.memory_bytes, config.connect_timeout_s, config.allow, config.device
                )
                self._workers.add(connect_to(self._embedded.ensure, is_embedded=True))
            self._workers.open(dict(zip(resolvers, token_files, strict=True)), strict=config.strict)
            self._warn_if_useless()
            if config.evidence:
                self._dispatcher.evidence = Evidence(
                    str(config.evidence), config.evidence_bytes, config.evidence_share, self.run
                )
        except BaseException:
            self.close()
            raise
        if config.telemetry or config.traces:
            traces = _traces() if config.traces else None
            self._dispatcher.telemetry = Telemetry(
                self._deliver,
                self._describe(),
                traces,
                events,
                lambda: [worker.connection.link() for worker in self._workers],
            )
            self._dispatcher.telemetry.start()
        if self._dispatcher.telemetry is not None or self._dispatcher.evidence is not None:
            # The hook sees all optimizers of the process. A step in which this session had no call is not reported.
            self._hooks.append(register_optimizer_step_post_hook(self._optimizer_stepped))
        _sessions.add(self)

    def checkpoint(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Runs `function(*args, **kwargs)` and lets a worker recompute it in backward.

        Args:
            function: The function to run. It is called once, now, with the caller's own objects. None: returns a
                decorator.
            *args: Arguments of the function. Tensors among them must not be changed in place before backward.
            **kwargs: Keyword arguments of the function, and options of torch's checkpoint: `use_reentrant`,
                `preserve_rng_state`, `context_fn`, `determinism_check`, `debug`, `early_stop` and
                `respect_saved_tensors_hooks`. Further options are `returns`, `strict`, `durability` and `graphs`. These
                and `determinism_check` default to those of the session.

        Returns:
            The return value of the function.

        Raises:
            NotRemoteError: Under `strict`, if the trainer would have to recompute the segment.
            SegmentLostError: Raised by backward, not by this method: the worker is gone, and the trainer has not kept
                what it needs to recompute the segment.
            ValueError: An option is one that torch rejects too.
        """
        if function is not None and is_inlined():
            return function(*args, **{name: value for name, value in kwargs.items() if name not in NAMES})
        options, rest = options_of(self.config, kwargs)
        if function is None:
            return decorator(self.checkpoint, args, rest, kwargs)
        return self._run(function, args, rest, options)

    def _instead_of_torchs(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Runs a call that `patched` redirected. Only the options of torch's function are treated as options.

        The decorator form returns a function that calls torch's function, so it is redirected only inside a `patched`
        block.
        """
        if function is not None and is_inlined():
            return function(*args, **{name: value for name, value in kwargs.items() if name not in TORCHS})
        options, rest = options_of(self.config, kwargs, names_of_torch())
        if function is None:
            return decorator(torch.utils.checkpoint.checkpoint, args, rest, kwargs)
        return self._run(function, args, rest, options)

    def _run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
    ) -> Any:
        return fsdp.call(partial(self.graphs.call, options=options), function, args, kwargs)

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
        self,
        model: nn.Module,
        layers: type[nn.Module] | tuple[type[nn.Module], ...],
        *,
        segment_layers: int | None = None,
        kept_layers: int | None = None,
        **options: Any,
    ) -> nn.Module:
        """Checkpoints the modules of the given classes inside the model, in place. See `backhaul.wrap`."""
        return wrap.wrap(
            model,
            layers,
            partial(self.checkpoint, **options),
            segment_layers=self.config.segment_layers if segment_layers is None else segment_layers,
            kept_layers=self.config.kept_layers if kept_layers is None else kept_layers,
        )

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

    def _redirecting(self) -> AbstractContextManager[Redirect]:
        """Does what `patched` does, for integrations: they check themselves whether calls were redirected."""
        return patched.redirect(self._instead_of_torchs)

    @property
    def telemetry(self) -> Telemetry | None:
        """The telemetry of the session; None if it neither sends telemetry nor creates traces."""
        return self._dispatcher.telemetry

    @property
    def workers(self) -> str:
        """The addresses of the workers, separated by commas, as `connect` accepts them."""
        return ",".join(worker.connection.name for worker in self._workers)

    def __repr__(self) -> str:
        if self.closed:
            return f"<backhaul.Session {self.run}: closed>"
        workers = [f"{one.connection.name} ({'up' if one.connection.up else 'down'})" for one in self._workers]
        report = self._dispatcher.journal.report()
        recomputed = f"{report.remote} segments recomputed on workers, {report.fallbacks} fallbacks"
        return f"<backhaul.Session {self.run}: {', '.join(workers) or 'no worker'}; {recomputed}>"

    def report(self) -> Report:
        """Returns what has run where so far, why, and at what cost."""
        steps = None if self.telemetry is None else self.telemetry.steps
        return self._dispatcher.journal.report(self._copy_memory.used_bytes, steps)

    def step(self, loss: Tensor | float | None = None) -> None:
        """Reports that a training step has ended. Only dashboards, traces and evidence depend on it.

        Without this call, each step of an optimizer ends a training step. Call it after the step to report the loss, or
        if a step uses no optimizer or several. From the first call on, optimizers no longer end steps.

        Args:
            loss: A scalar. A tensor is read later by another thread, so it must not be changed in place.
        """
        self._has_explicit_steps = True
        self._end_step(loss)

    def _end_step(self, loss: Tensor | float | None = None) -> None:
        if self._closed:
            return
        if self.telemetry is not None:
            self.telemetry.step(loss)
        if self._dispatcher.evidence is not None:
            self._dispatcher.evidence.step_ended()

    @contextmanager
    def accumulate(self, local: Local | None = None) -> Iterator[AccumulationBlock]:
        """Opens a block of micro-batches whose backward passes workers finish while the trainer goes on.

        Call `backward(loss)` of the returned object instead of `loss.backward()`. When the block ends, `.grad` holds
        exactly what the loop with `loss.backward()` would have left there. If it ends by an exception, none of its
        gradients are added; buffers and random state are not rolled back. Clip gradients and step the optimizer after
        the block. See docs/accumulation.md.

        Args:
            local: What the trainer does with its share of the segments: "recompute" them in backward, or "keep" their
                activations, which takes memory for those of all unfinished micro-batches and saves their recomputation.
                None: the setting `local`, by default "recompute".

        Raises:
            ValueError: `local` is neither of the two.
            AccumulationError: A block is open already, a parameter was changed inside the block, or gradients are used
                before they are complete.
            SegmentLostError: A worker was lost, and the trainer has not kept what it needs to recompute a segment.
        """
        if self._closed:
            raise SessionClosedError("the session is closed")
        local = self.config.local if local is None else local
        if local not in LOCALS:
            raise ValueError(f"local={local!r} is not one of {', '.join(map(repr, LOCALS))}")
        shares = self._shares[local]
        self._measure_block()

        def take_last(micro_batch: int, parts: Mapping[str, int], left: Mapping[str, int], own: int) -> int:
            # The gradients of these segments would count as bytes of an unfinished micro-batch.
            last = 0 if self.config.deferred_bytes else shares.last_segments(micro_batch, parts, left, own)
            self._dispatcher.take_last(last)
            return last

        fixed = FixedDigests()
        whole = WholeMicroBatches(
            self._whole_calls,
            self._whole_shares,
            self._whole_rechecks,
            self._dispatcher.journal,
            self._dispatcher.take_all,
            has_workers=any(worker.up is not None for worker in self._workers),
        )
        block = AccumulationBlock(
            f"accumulation block {next(self._blocks)} of session {self.run}",
            self._dispatcher.micro_batch_ended,
            take_last,
            lambda frame: frame.lineage is not None and frame.lineage.session == self.run,
            self._dispatcher.journal.log("ends of accumulation blocks"),
            fixed,
            [one for one in (self._dispatcher.rechecks, self._whole_rechecks) if one is not None],
            whole,
            self.config.inflight_micro_batches or MORE_OPEN + sum(not worker.is_leaving for worker in self._workers),
            self.config.deferred_bytes,
            self.config.pending_gradient_bytes,
        )
        trainers_share = 0 if self.config.strict else shares.trainers_share()
        accumulating = self._dispatcher.accumulating(trainers_share, shares.speeds, fixed, keeps_share=local == "keep")
        with block.all_or_nothing(), guards.open_block(block), self._only_block(block), accumulating:
            stopwatch = Stopwatch(device_of_work(()))
            try:
                yield block
            except BaseException:
                block.close(is_failed=True)
                raise
            block.close(is_failed=False)
            ended = block.ended(stopwatch.stop())
            self._dispatcher.journal.block = ended.report
            self._unmeasured = shares, ended
            self._measure_block()
            if self.telemetry is not None:
                self.telemetry.block_ended(ended.report)

    def _measure_block(self) -> None:
        """Lets the next block's share follow from what the last one took, once the device has done it."""
        unmeasured = self._unmeasured
        if unmeasured is not None and unmeasured[1].is_over:
            self._unmeasured = None
            shares, ended = unmeasured
            shares.measured(ended.report())

    @contextmanager
    def _only_block(self, block: AccumulationBlock) -> Iterator[None]:
        """Refuses a second block, because a worker has one set of sums for each session."""
        this = threading.get_ident(), block
        try:
            with self._block_lock:
                # The guards know of no block of this thread. If one is still noted here, Ctrl-C has ended it.
                if self._block is not None and self._block[0] != this[0]:
                    raise AccumulationError(
                        f"{block.name} can't be opened: another thread has a block of this session open"
                    )
                self._block = this
            yield
        finally:
            if self._block is this:
                self._block = None

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or this process is the child of a fork."""
        return self._closed

    def close(self) -> None:
        """Ends threads and connections, and a worker that connect() started. It may be called twice.

        Segments between forward and backward remain usable: the trainer recomputes them.
        """
        if self._closed:
            return
        self._closed = True
        _sessions.discard(self)
        for hook in self._hooks:
            hook.remove()
        if self.telemetry is not None:
            self.telemetry.close()
        if self._dispatcher.evidence is not None:
            self._dispatcher.evidence.close()
        if self._embedded is not None:
            self._embedded.interrupt()
        self._workers.close()
        if self._embedded is not None:
            self._embedded.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _follow(self, device: torch.device) -> None:
        """Moves a worker that this session has started to the device of the first segment, and waits for it."""
        if self._embedded is not None and self._embedded.follow(device):
            for worker in self._workers:
                worker.connection.restarted(f"the worker is started on {device}", self.config.connect_timeout_s)

    def _warn_if_useless(self) -> None:
        if all(worker.connection.up is None for worker in self._workers):
            why_down = "; ".join(worker.connection.why_down for worker in self._workers)
            warn_not_remote(f"every segment runs on the trainer for now: {why_down}")
        if why := self._dispatcher.why_useless():
            warn_not_remote(f"every segment will run on the trainer, because no worker computes the same bits: {why}")

    def _optimizer_stepped(self, *_: Any) -> None:
        if not self._has_explicit_steps:
            self._end_step()

    def _fetch(self, address: bytes) -> Tensor | None:
        """Fetches a tensor by address from a worker that still stores it. Returns None if there is none."""
        if self._closed:  # checked first: in the child of a fork a lock may stay locked for ever
            return None
        fetched = (worker.fetch(address, partial(self._received, "fetched boundaries")) for worker in self._workers)
        return next((tensor for tensor in fetched if tensor is not None), None)

    def _received(self, name: str, size_bytes: int) -> None:
        self._dispatcher.journal.log(name).traffic(down_bytes=size_bytes)
        if self.telemetry is not None:
            self.telemetry.moved(0, size_bytes)

    def _describe(self) -> telemetry_pb2.Run:
        rank, world_size = rank_and_world()
        settings = {field.name: str(getattr(self.config, field.name)) for field in fields(self.config)}
        return telemetry_pb2.Run(
            id=self.run,
            trainer=trainer_name(),
            client_version=version(),
            started_at_s=time(),
            settings={name: value for name, value in settings.items() if name not in SECRETS | DESCRIPTIVE},
            fingerprint=fingerprint(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
            workers=[worker.connection.name for worker in self._workers],
            name=self.config.run,
            tags=self.config.tags,
            notes=self.config.notes,
            rank=rank,
            world_size=world_size,
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
        self._dispatcher.evidence = None
        self._dispatcher.journal = Journal(self.run)  # threads of the parent may have held the locks of the old one
        if self.telemetry is not None:
            self.telemetry.forked()
        self._workers.forked()


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
        session.close()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)

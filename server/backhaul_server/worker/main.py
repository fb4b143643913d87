"""The worker process: starts the server, and stops it without losing requests."""

import asyncio
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import torch

from backhaul_runtime.errors import AddressError, SettingError
from backhaul_runtime.process.addresses import socket_address
from backhaul_runtime.process.logs import about
from backhaul_runtime.process.resources import resident_bytes
from backhaul_runtime.process.units import size_text
from backhaul_runtime.program.custom.names import OfferedNames
from backhaul_runtime.tensors.digest import weighted_sums
from backhaul_runtime.torch_internals import inductor
from backhaul_runtime.torch_internals.ambient_settings import max_threads
from backhaul_runtime.wire.shared_memory import IS_AVAILABLE
from backhaul_server.worker.allowed import import_allowed
from backhaul_server.worker.announcement import announcement
from backhaul_server.worker.audit import AuditLog
from backhaul_server.worker.config import DRAIN_S, END_S, WorkerConfig, host_memory_bytes
from backhaul_server.worker.credentials import Credentials
from backhaul_server.worker.engine.bounds import ExecutionMemory
from backhaul_server.worker.engine.device_memory import DeviceMemory
from backhaul_server.worker.engine.executor import GRACE_S
from backhaul_server.worker.engine.fair_queue import Job
from backhaul_server.worker.engine.heap import keep_freed_memory
from backhaul_server.worker.engine.worker import Worker
from backhaul_server.worker.listening import (
    Listener,
    ListenError,
    connections_of_a_peer,
    raise_file_limit,
    server_options,
    take_beside,
)
from backhaul_server.worker.memory_sharing.handover import Handover
from backhaul_server.worker.rpc.access import CredentialInterceptor
from backhaul_server.worker.rpc.health import Health
from backhaul_server.worker.rpc.peers import Peers
from backhaul_server.worker.rpc.service import add_services
from backhaul_server.worker.supervisor import OVERDUE_CODE

logger = logging.getLogger("backhaul.worker")

_HEADROOM_BYTES = 1 << 30  # on top of the budget: gRPC's buffers, programs being decoded, torch's tables
_STACK_BYTES = 8 << 20  # the stack of each thread that a program may run ops on
_NO_LIMIT = 1 << 62
_PARENT_POLL_S = _LOOK_S = 1.0
_PULSE_S, _STANDSTILL_S = 1.0, 60.0


def serve(config: WorkerConfig) -> int:
    """Runs a worker until a signal stops it. Returns the exit code: 0, or 2 if the worker could not start.

    Args:
        config: The settings of this worker.
    """
    if not config.address.is_local and config.tls is None:
        logger.warning(
            "Without TLS, everyone who can observe the network can read tensors and tokens, and use the worker with "
            "these."
        )
    try:
        device = _device(config.device)
    except ValueError as error:
        print(f"backhaul worker: {error}", file=sys.stderr)
        return 2
    try:
        asyncio.run(_serve(config, device))
    except (ListenError, SettingError) as error:
        print(f"backhaul worker: {error}", file=sys.stderr)
        return 2
    return 0


def _allowed(config: WorkerConfig, device: torch.device) -> OfferedNames:
    """Returns what programs may name. Raises SettingError for what cannot be imported, and without a compiler."""
    allowed = replace(import_allowed(config.allow), compiles=config.compiles)
    if not config.compiles or config.parent:  # the trainer of a worker of its own may never need it
        return allowed
    try:
        inductor.facts(device)
        return allowed
    except Exception as error:  # Inductor may raise any type of error
        first = next(iter(str(error).strip().splitlines()), "")
        raise SettingError(
            f"--compile: Inductor can't compile here: {type(error).__name__}: {first}. It needs a C++ compiler such as "
            "g++, or Triton for a GPU"
        ) from error


async def _serve(config: WorkerConfig, device: torch.device) -> None:
    memory = _memory_bytes(device)
    budget = config.memory_bytes or memory // 2 // config.sharers
    if budget > memory:
        sizes = size_text(budget), size_text(memory)
        logger.warning("--memory %s is more than the device's %s: the operating system may kill the worker.", *sizes)
    allowed = _allowed(config, device)
    _warm_up(device)
    keep_freed_memory(budget)
    _limit_memory(device, budget)
    files = raise_file_limit()
    audit, credentials = AuditLog(config.audit_log), config.credentials
    interceptors = [CredentialInterceptor(credentials, audit)] if credentials is not None else []
    server = grpc.aio.server(interceptors=interceptors, options=server_options(files))
    listener = Listener(config.address, config.tls)
    execution_memory = ExecutionMemory(budget) if device.type == "cpu" else DeviceMemory(device, budget)

    def overdue(job: Job) -> None:
        _exit_because_of(job, worker, config.execution_limit_s)

    worker = Worker(
        device,
        budget,
        config.lease_s,
        config.execution_limit_s,
        overdue,
        execution_memory,
        is_trainers_own=bool(config.parent),
    )
    worker.allowed = allowed
    offers: list[Callable[[], None]] = []
    health = Health(server, reflects=credentials is None)
    add_services(server, worker, audit)
    tasks: list[asyncio.Task[None]] = []
    try:
        address = listener.bind(server)
        offers.extend(_offer(config, server, worker, address))
        await server.start()
        stop = _Stop(config.parent or config.supervisor)
        tasks.extend(map(asyncio.create_task, _watches(config, worker, audit, address, files)))
        await health.serving(True)
        print(announcement(address, device, budget), flush=True)
        await stop.requested.wait()
        logger.info("The worker is stopping: it finishes requests in flight, and accepts no new ones.")
        worker.draining = True
        await health.serving(False)
        await _drained(worker, stop)
    finally:
        await server.stop(1.0)  # this ends streams that are still open and idle
        for end in offers:
            end()
        listener.close()
        if config.parent:  # the trainer made the directory of the socket, and may have died
            with suppress(OSError):
                Path(config.address.unix_path).parent.rmdir()
        try:
            await asyncio.wait_for(worker.close(), END_S)
        except TimeoutError:
            logger.warning("An execution does not end: the process exits without it.")
            os._exit(1)  # a normal exit would wait for the executor's thread
        for task in tasks:
            task.cancel()


def _offer(config: WorkerConfig, server: grpc.aio.Server, worker: Worker, address: str) -> Iterator[Callable[[], None]]:
    """Offers trainers on this machine a Unix socket and shared memory. Yields functions that end the offers."""
    try:
        if config.unix_socket and not config.address.unix_path:
            path = take_beside(address, "sock")
            yield path.release
            server.add_insecure_port(socket_address(str(path.path)).target)
            worker.socket_path = str(path.path)
        if config.shared_memory and IS_AVAILABLE:
            handover = Handover(worker, take_beside(address, "memory"))
            yield handover.close
            worker.memory_path = handover.path
    except (AddressError, ListenError, OSError, RuntimeError) as error:
        logger.info("Trainers on this machine are offered no Unix socket or shared memory: %s", error)


def _warm_up(device: torch.device) -> None:
    """Runs a first backward, which imports 500 modules, and a first digest, for which a GPU compiles a kernel.

    A trainer must not be charged with their time and memory.
    """
    weighted_sums(torch.zeros(4, dtype=torch.uint8, device=device))
    x = torch.ones((), requires_grad=True)
    torch.autograd.grad(x * x, x, torch.ones(()))
    gc.freeze()  # modules live as long as the process, and each full collection would take 86 ms to visit them


def _watches(
    config: WorkerConfig, worker: Worker, audit: AuditLog, address: str, files: int
) -> Iterator[Coroutine[Any, Any, None]]:
    """Yields what runs beside the server for as long as it serves."""
    yield _beat(config.execution_limit_s + GRACE_S + _STANDSTILL_S)
    if config.credentials is not None:
        yield _watch(config.credentials, worker, audit)
    if not config.address.unix_path:
        yield Peers(int(address.rpartition(":")[2]), connections_of_a_peer(files)).watch()


async def _watch(credentials: Credentials, worker: Worker, audit: AuditLog) -> None:
    """Looks each second whether the files of the credentials have changed."""
    while True:
        await asyncio.sleep(_LOOK_S)
        if credentials.refresh():
            closed = worker.close_revoked(credentials.accepts)
            logger.info("The credentials have changed: %d sessions of revoked tokens are closed.", closed)
            audit.changed(credentials.names, closed)


async def _beat(longest_s: float) -> None:
    """Renews a timer whose signal (SIGALRM) ends this process if the event loop stands still for this many seconds."""
    try:
        while True:
            signal.setitimer(signal.ITIMER_REAL, longest_s)
            await asyncio.sleep(_PULSE_S)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _exit_because_of(job: Job, worker: Worker, limit_s: float) -> None:
    """Ends this process, because nothing else can stop a thread that executes an op."""
    session = worker.sessions.get(job.session)
    logger.error(
        "An op of %s for %s still runs after %g s. An execution may take %g s, and a single op cannot be cancelled, so "
        "this process ends now.",
        job.name or "a segment",
        session.trainer if session is not None else "a trainer that has left",
        limit_s + GRACE_S,
        limit_s,
        extra=about(session.run if session is not None else "", job.name),
    )
    os._exit(OVERDUE_CODE)


async def _drained(worker: Worker, stop: "_Stop") -> None:
    """Waits until no request is in flight, for `DRAIN_S` at most or until the second signal."""
    deadline = asyncio.get_running_loop().time() + DRAIN_S
    while worker.is_busy and not stop.now.is_set() and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.01)


class _Stop:
    """The signals that stop a worker: SIGTERM, SIGINT, or the end of its parent process.

    Args:
        parent: Process id of the parent, 0 if the worker does not end with it.

    Attributes:
        requested: Set when the worker must finish requests in flight, and then stop.
        now: Set when it must not finish them either: the parent is gone, or the signal came twice.
    """

    def __init__(self, parent: int) -> None:
        self.requested = asyncio.Event()
        self.now = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signal)
        if parent:
            self._watch(parent)

    def _signal(self) -> None:
        (self.now if self.requested.is_set() else self.requested).set()

    def _orphaned(self) -> None:
        self.now.set()
        self.requested.set()

    def _watch(self, parent: int) -> None:
        """Watches the parent by a pidfd, which reports its end within a millisecond.

        PR_SET_PDEATHSIG would fire when the thread that started the worker ends, even if the parent lives on.
        """
        loop = asyncio.get_running_loop()

        def check() -> None:
            if os.getppid() != parent:
                self._orphaned()
            else:
                loop.call_later(_PARENT_POLL_S, check)

        if hasattr(os, "pidfd_open"):
            with suppress(ProcessLookupError):
                loop.add_reader(os.pidfd_open(parent), self._orphaned)
        check()  # the parent may have ended before the watch began, and not every system has pidfds


def _device(name: str) -> torch.device:
    """Returns the device of an option that was parsed. Raises ValueError if it cannot be used, with what to do."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f'--device "{name}" can\'t be used: {_why_no_cuda()}, or use --device cpu')
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ValueError(f'--device "{name}" can\'t be used: this machine has {count} CUDA devices, counted from 0')
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else device


def _why_no_cuda() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is a build without CUDA. Install one with CUDA"
    return f"torch {torch.__version__} finds no CUDA device. Check the driver with nvidia-smi"


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory_bytes()


def _limit_memory(device: torch.device, budget_bytes: int) -> None:
    """Sets a memory limit for the process behind the store's accounts, so that only an op far above its size fails."""
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(min(1.0, 2 * budget_bytes / _memory_bytes(device)), device)
        return
    stacks = max_threads() * _STACK_BYTES
    limit = resident_bytes("VmData") + 2 * budget_bytes + _HEADROOM_BYTES + stacks
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if limit < _NO_LIMIT and (hard == resource.RLIM_INFINITY or limit < hard):
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))

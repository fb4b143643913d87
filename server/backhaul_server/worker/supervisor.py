"""The parent process of `backhaul worker`: starts the process that serves, and restarts it when it dies.

It imports neither torch nor gRPC, so it starts at once and nothing that kills a worker can kill it. An actor of a fleet
(`backhaul_server/fleet`) is such a parent as well.

NOTE [Supervision]
1. The worker is a child process. Its log goes to the same standard error. The line that says that it is ready is
   printed for the first worker only.
2. SIGTERM and SIGINT are passed to the worker as SIGTERM. The worker finishes what is in flight, and this process ends
   with the worker's exit code.
3. A worker that exits with code 0, or before any worker was ever ready, is not restarted. One that dies later is
   restarted at once. If the next one lives shorter than `STEADY_S`, the delay before each further start doubles.
   Trainers recompute meanwhile and reconnect by themselves.
4. The address stays the same: this process keeps the TCP port bound by sockets that do not listen.
5. The worker ends when this process ends, however that happens.
6. With an `Idleness`, a worker starts only once the machine is idle. When others use the machine again, the worker gets
   SIGTERM, finishes what is in flight and ends, which frees its memory. The next one starts when the machine is idle.
7. `backhaul worker` also reaps orphans, because it may be the first process of a container. An actor must not: it would
   take the exit codes of Ray's own children.
"""

import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from time import monotonic
from types import FrameType
from typing import IO, Protocol

from backhaul_runtime.process.addresses import Address

logger = logging.getLogger("backhaul.worker")

OVERDUE_CODE = 70
"""Exit code of a worker that ended itself because an op did not end; its log names the execution."""

STEADY_S = 10.0
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 10.0
_MOST_FAILURES = 20
"""Number of workers in a row that die before they are ready, after which the supervisor gives up."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LOOK_INTERVAL_S = 1.0
_LOWEST_PRIORITY = 19


class Gate(Protocol):
    """Decides when a worker may run (Rule 6). See `backhaul_server.worker.idleness.Idleness`."""

    what: str
    quiet_s: float

    def look(self, session: int) -> None:
        """Takes a sample, once a second. `session` is the session id of the worker's processes, or 0."""

    @property
    def is_idle(self) -> bool:
        """Whether a worker may start."""

    @property
    def is_busy(self) -> bool:
        """Whether a worker that runs must end."""


def supervise(address: Address, command: Callable[[str], Sequence[str]], gate: Gate | None = None) -> int:
    """Keeps a worker running until it exits with code 0 or a signal stops it. Returns the exit code.

    Call it in the main thread, because it installs signal handlers.

    Args:
        address: The address to listen on; for port 0 a free port is chosen.
        command: Returns the worker's command line for an address.
        gate: Decides when a worker may run; None for always.
    """
    with ExitStack() as reserved:
        try:
            text = address.text if address.unix_path else reserve_address(address, reserved)
        except OSError as error:
            sys.stderr.write(f'backhaul worker: can\'t listen on "{address.text}": {error.strerror or error}\n')
            return 2
        supervisor = Supervisor(command(text), gate, wait=_reaped)
        before = {number: signal.signal(number, supervisor.forward_signal) for number in _SIGNALS}
        try:
            return supervisor.run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Supervisor:
    """Keeps one worker running. `run` belongs to one thread; all else may be used in any thread.

    Args:
        command: The worker's command line.
        gate: Decides when a worker may run; None for always.
        wait: Waits for the end of a child. Returns its exit code, which is negative for a signal.
        log: Called in a thread with each line that a worker writes to standard error. None: the worker writes to
            that of this process.

    Attributes:
        announcement: The line that the first worker printed when it was ready; empty before.
        ready_at_s: The time (`monotonic`) at which the present worker became ready; None if it is not ready.
        restarts: The number of workers that were started after the first one.
        trouble: How the last worker ended; empty before any has ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        gate: Gate | None = None,
        *,
        wait: Callable[[subprocess.Popen[str]], int] = subprocess.Popen.wait,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self._command, self._gate, self._wait, self._log = command, gate, wait, log
        self._is_sent_away = False  # the worker that runs must end because others use the machine
        self._asked = threading.Event()
        self._asked_by = signal.SIGTERM
        self._child: subprocess.Popen[str] | None = None
        self.announcement = self.trouble = ""
        self.ready_at_s: float | None = None
        self.restarts = 0

    def run(self) -> int:
        """Runs workers until one exits that is not restarted (Rule 3), or until `stop`. Returns its exit code."""
        failures = short_lives = 0
        while not self._asked.wait(_delay_s(short_lives)) and self._wait_for_gate():
            began_at_s, is_ready = monotonic(), threading.Event()
            code = self._run_worker(is_ready)
            if self._asked.is_set() and code == -signal.SIGTERM:  # the worker had not installed its handler yet
                return 128 + self._asked_by
            if self._is_sent_away and not self._asked.is_set():  # Rule 6: it has not failed
                continue
            self.trouble = _how_it_ended(code)
            if self._asked.is_set() or code == 0 or not self.announcement:  # Rule 3
                return code if code >= 0 else 128 - code  # as shells report a signal
            # A worker that can't start any more, as after an update of its packages, would be started for ever.
            failures = 0 if is_ready.is_set() else failures + 1
            if failures == _MOST_FAILURES:
                logger.error("%d workers in a row died before they were ready: the supervisor gives up.", failures)
                return code if code >= 0 else 128 - code
            # Rule 3: one that dies again soon would otherwise take a whole core to start.
            is_steady = is_ready.is_set() and monotonic() - began_at_s >= STEADY_S
            short_lives = 0 if is_steady else short_lives + 1
            logger.error("The worker %s: it is restarted in %g s.", self.trouble, _delay_s(short_lives))
            self.restarts += 1
        return 0

    def stop(self) -> None:
        """Lets the worker finish what is in flight and end, after which `run` returns. Does nothing the second time."""
        if not self._asked.is_set():
            self.forward_signal(signal.SIGTERM)

    def _run_worker(self, is_ready: threading.Event) -> int:
        """Runs one worker until it ends. Returns its exit code, which is negative for a signal."""
        child = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if self._log is not None else None,
            text=True,
            start_new_session=True,  # a terminal's Ctrl-C must reach the worker once, through this process
        )
        self._child = child
        if self._asked.is_set():  # the signal came before the child existed
            child.terminate()
        assert child.stdout is not None
        reading = [threading.Thread(target=self._print, args=(child.stdout, child.pid, is_ready), daemon=True)]
        if self._log is not None:
            assert child.stderr is not None
            reading.append(threading.Thread(target=_pass_on, args=(child.stderr, self._log), daemon=True))
        for thread in reading:
            thread.start()
        has_ended = threading.Event()
        if self._gate is not None:
            # Its threads inherit the priority, and none exists yet.
            os.setpriority(os.PRIO_PROCESS, child.pid, _LOWEST_PRIORITY)
            threading.Thread(target=self._watch, args=(self._gate, child.pid, has_ended), daemon=True).start()
        child.returncode = self._wait(child)
        has_ended.set()
        self._child = None
        for thread in reading:
            thread.join()
        self.ready_at_s = None
        return child.returncode

    def _wait_for_gate(self) -> bool:
        """Waits until a worker may run. Returns False if the supervisor is to stop meanwhile."""
        gate, self._is_sent_away = self._gate, False
        if gate is not None and not gate.is_idle:
            logger.info("The worker starts when others have not used the %s for %g s.", gate.what, gate.quiet_s)
            while not gate.is_idle:
                if self._asked.wait(_LOOK_INTERVAL_S):
                    return False
                gate.look(0)
        return True

    def _watch(self, gate: Gate, pid: int, has_ended: threading.Event) -> None:
        """Runs in a thread. Ends a worker when others use the machine (Rule 6)."""
        while not has_ended.wait(_LOOK_INTERVAL_S):
            gate.look(pid)
            if gate.is_busy and not self._is_sent_away:
                logger.info("Others use the %s: the worker ends when it has finished what is in flight.", gate.what)
                self._is_sent_away = True
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    def _print(self, pipe: IO[str], pid: int, is_ready: threading.Event) -> None:
        """Runs in a thread. Prints a worker's output, but the first line, the announcement, for one worker only."""
        with pipe:
            for line in pipe:
                if self.announcement and not is_ready.is_set():
                    logger.warning("The worker runs again as process %d.", pid)
                else:
                    sys.stdout.write(line)
                    sys.stdout.flush()
                if not is_ready.is_set():
                    self.announcement, self.ready_at_s = self.announcement or line.strip(), monotonic()
                    is_ready.set()

    def forward_signal(self, number: int, _: FrameType | None = None) -> None:
        """Passes SIGTERM or SIGINT to the worker as SIGTERM (Rule 2). The worker takes a second one as "at once"."""
        self._asked_by = signal.Signals(number)
        self._asked.set()
        child = self._child
        if child is not None:
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGTERM)


def _pass_on(pipe: IO[str], log: Callable[[str], None]) -> None:
    """Runs in a thread."""
    with pipe:
        for line in pipe:
            log(line)


def _reaped(child: subprocess.Popen[str]) -> int:
    """Waits for a child and reaps orphans meanwhile (Rule 7). Returns the child's exit code."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == child.pid:
            return os.waitstatus_to_exitcode(status)


def _delay_s(short_lives: int) -> float:
    """Returns the seconds before the next start, after this many short-lived workers in a row (Rule 3)."""
    return 0.0 if short_lives <= 1 else min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** (short_lives - 2))


def _how_it_ended(code: int) -> str:
    if code == OVERDUE_CODE:
        return "ended itself because an op did not end"
    if code == -signal.SIGALRM:
        return "was ended because its event loop stood still"
    if code < 0:
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"


def reserve_address(address: Address, reserved: ExitStack) -> str:
    """Binds sockets to a TCP address until `reserved` is closed. Returns the address with its port. Raises OSError.

    The worker can still listen on the port, because all of these sockets allow reuse and none of them listens.
    """
    port = address.port
    targets = socket.getaddrinfo(address.host, port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, target in targets:
        try:
            bound = reserved.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind((target[0], port, *target[2:]))
            port = bound.getsockname()[1]
        except OSError as error:
            # localhost resolves to ::1 even without IPv6, and gRPC then uses IPv4 alone.
            if error.errno not in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}:
                raise
    return f"{address.text.rpartition(':')[0]}:{port}"

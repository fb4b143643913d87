"""A worker process on this machine that its session starts and ends."""

import logging
import math
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import IO

import torch

from backhaul_runtime.errors import AddressError, ConnectError
from backhaul_runtime.process import logs
from backhaul_runtime.process.addresses import Address, is_private, socket_address
from backhaul_runtime.process.settings import PREFIX

worker_logger = logging.getLogger("backhaul.worker")
_END_S = 2.0
_DYING_S = 0.5
_SYSTEMS_DIRECTORY = "/tmp"


class EmbeddedWorker:
    """Starts a worker when its address is requested, and again if it died. Not thread-safe, except where stated.

    Args:
        memory_bytes: The budget of the worker; 0 for its part of half of the device's memory.
        start_timeout_s: Seconds that the worker may take to start.
        allow: What it runs beside torch's own ops.
        device: The device of the worker; empty for the trainer's, see `follow`.
    """

    def __init__(self, memory_bytes: int, start_timeout_s: float, allow: Sequence[str] = (), device: str = "") -> None:
        self._device = device or _trainers_device()
        self._follows = not device
        self._following = threading.Lock()  # guards the two above
        self._memory_bytes = memory_bytes
        self._allow = allow
        self._start_timeout_s = start_timeout_s
        self._directory, self._address = _socket()
        self._process: subprocess.Popen[str] | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process id of the running worker; None if there is none."""
        alive = self._process is not None and self._process.poll() is None
        return self._process.pid if alive and self._process is not None else None

    def ensure(self) -> Address:
        """Returns the address of a running worker, and starts one if needed.

        Raises:
            ConnectError: The worker did not start in time. The message has its output.
        """
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self._start()
        return self._address

    def follow(self, device: torch.device) -> bool:
        """Ends the worker if it has another device than the first segment. The next `ensure` starts it there.

        Only the first call has an effect, and none if the device was given. Any thread may call it.

        Returns:
            Whether the worker was ended.
        """
        with self._following:
            follows, self._follows = self._follows, False
            if not follows or str(device) == self._device:
                return False
            self._device = str(device)
        self._end(self._process)
        return True

    def _start(self) -> None:
        if self._closed:
            raise ConnectError("the session is closed")
        arguments = ["worker", "--listen", self._address.text, "--parent", str(os.getpid()), "--device", self._device]
        arguments += ["--sharers", str(_sharers(self._device))]
        if self._memory_bytes:
            arguments += ["--memory", f"{self._memory_bytes}B"]
        # The session's settings apply to this worker, not variables that are meant for other workers.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        arguments += ["--compile"]  # it is the user's own process, and loads nothing for this before it is needed
        for name in self._allow:
            arguments += ["--allow", name]
        if self._allow:  # it may lie beside the script that trains, where only this process looks for modules
            environment["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        self._directory.mkdir(mode=0o700, exist_ok=True)  # a worker that ends in order removes it
        if not is_private(self._directory):
            raise ConnectError(f"{self._directory} belongs to another user")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "backhaul", *arguments],  # -P keeps modules of the working directory out
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**environment, logs.FORMAT_VARIABLE: "json", logs.LEVEL_VARIABLE: _level()},
                start_new_session=True,  # Ctrl-C must reach only the trainer, which then ends its worker
            )
        except OSError as error:
            raise ConnectError(f"a worker can't be started with {sys.executable}: {error}") from error
        said: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        tail: list[str] = []
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        threading.Thread(target=_first_line, args=(self._process.stdout, said), daemon=True).start()
        threading.Thread(target=self._pass_on, args=(self._process.stderr, tail), daemon=True).start()
        deadline = monotonic() + self._start_timeout_s
        try:
            line = said.get(timeout=max(0.0, deadline - monotonic()))
        except queue.Empty:
            line = None
        if not line:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_DYING_S)  # the process closes its pipe before it has ended
            code = self._process.poll()
            how = f"ended with code {code}" if code is not None else f"did not come up in {self._start_timeout_s:g} s"
            self.stop()
            raise ConnectError(f"the worker that connect() starts {how}; it said:\n" + "\n".join(tail[-10:]))

    def interrupt(self) -> None:
        """Asks the worker to end, even if another thread waits for its start, and prevents further starts."""
        self._closed = True
        process = self._process
        if process is not None:
            with suppress(ProcessLookupError):
                process.terminate()

    def stop(self) -> None:
        """Ends the worker, by force if necessary."""
        process, self._process = self._process, None
        self._end(process)
        for pipe in (process.stdout, process.stderr) if process is not None else ():
            if pipe is not None:
                pipe.close()

    @staticmethod
    def _end(process: "subprocess.Popen[str] | None") -> None:
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def close(self) -> None:
        """Ends the worker and removes its directory."""
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _pass_on(self, pipe: IO[str], tail: list[str]) -> None:
        """Reads the worker's log, so that its pipe never fills up, and logs each line with the level that it had.

        After the worker was asked to end, lines about its end are logged at a low level.
        """
        with suppress(ValueError):  # the pipe was closed meanwhile
            for text in pipe:
                line = logs.parse(text) or logs.Line(logging.DEBUG, text.rstrip(), {})
                tail.append(line.message)
                del tail[:-20]
                level = logging.DEBUG if self._closed else line.level
                worker_logger.log(level, "worker: %s", line.message, extra=line.about)


def _trainers_device() -> str:
    """Returns the device that this process has used so far: its current GPU, or the CPU if it has used no GPU."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return f"cuda:{torch.cuda.current_device()}"
    return "cpu"


def _sharers(device: str) -> int:
    """Returns how many ranks of this machine probably start a worker on a device. torchrun sets the variable."""
    try:
        ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        return 1
    return max(1, ranks if device == "cpu" else math.ceil(ranks / max(1, torch.cuda.device_count())))


def _socket() -> tuple[Path, Address]:
    """Creates a directory for the worker's socket, and returns it with the address of the socket.

    The system's own directory is used where no socket can lie in TMPDIR, for example because its path is too long.
    """
    for parent in (tempfile.gettempdir(), _SYSTEMS_DIRECTORY):
        # mkdtemp uses mode 0700, so only this user can access the socket.
        try:
            directory = Path(tempfile.mkdtemp(prefix="backhaul-", dir=parent))
        except OSError as error:
            why = str(error)
            continue
        try:
            return directory, socket_address(f"{directory}/worker.sock")
        except AddressError as error:
            directory.rmdir()
            why = error.message
    raise ConnectError(f"connect() can't start a worker, because its socket has no place: {why}. Set TMPDIR")


def _first_line(pipe: IO[str], said: "queue.SimpleQueue[str | None]") -> None:
    with suppress(ValueError):  # the pipe was closed meanwhile
        said.put(pipe.readline() or None)


def _level() -> str:
    """Returns the worker's log level: that of this process's logger, but at least errors."""
    level = worker_logger.getEffectiveLevel()
    return "DEBUG" if level <= logging.DEBUG else "INFO" if level <= logging.INFO else "WARNING"

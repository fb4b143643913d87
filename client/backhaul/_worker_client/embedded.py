"""A worker process on this machine, started and ended by its session."""

import logging
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import IO

from backhaul_runtime.errors import AddressError, ConnectError
from backhaul_runtime.process import logs
from backhaul_runtime.process.addresses import Address, parse_address
from backhaul_runtime.process.settings import PREFIX

worker_logger = logging.getLogger("backhaul.worker")
_END_S = 2.0
_DYING_S = 0.5


class EmbeddedWorker:
    """Starts the worker when asked for its address, again if it died. Not thread-safe: one thread at a time."""

    def __init__(self, memory_bytes: int, start_timeout_s: float) -> None:
        self._memory_bytes = memory_bytes
        self._start_timeout_s = start_timeout_s
        # 0700 by mkdtemp: only this user reaches the socket.
        self._directory = Path(tempfile.mkdtemp(prefix="backhaul-"))
        self._process: subprocess.Popen[str] | None = None
        self._closed = False
        try:
            self._address = parse_address(f"unix:{self._directory}/worker.sock")
        except AddressError as error:
            self._directory.rmdir()
            raise ConnectError(f"set TMPDIR to a shorter directory: {error.message}") from error

    @property
    def pid(self) -> int | None:
        """Of the running worker."""
        alive = self._process is not None and self._process.poll() is None
        return self._process.pid if alive and self._process is not None else None

    def ensure(self) -> Address:
        """The address of a worker that runs, started now if need be.

        Raises:
            ConnectError: It did not come up in time, with what it said.
        """
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self._start()
        return self._address

    def _start(self) -> None:
        if self._closed:
            raise ConnectError("the session is closed")
        arguments = ["worker", "--listen", self._address.text, "--parent", str(os.getpid())]
        if self._memory_bytes:
            arguments += ["--memory", f"{self._memory_bytes}B"]
        # Its settings are the session's, not those of workers elsewhere.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "backhaul", *arguments],  # -P: no modules from the working directory
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**environment, logs.FORMAT_VARIABLE: "json", logs.LEVEL_VARIABLE: _level()},
                start_new_session=True,  # Ctrl-C is for the trainer, which then ends its worker
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
                self._process.wait(_DYING_S)  # it closes its pipe before it is gone
            code = self._process.poll()
            how = f"ended with code {code}" if code is not None else f"did not come up in {self._start_timeout_s:g} s"
            self.stop()
            raise ConnectError(f"the worker that connect() starts {how}; it said:\n" + "\n".join(tail[-10:]))

    def interrupt(self) -> None:
        """Asks the worker to end, also one that another thread waits for, and lets none start again."""
        self._closed = True
        process = self._process
        if process is not None:
            with suppress(ProcessLookupError):
                process.terminate()

    def stop(self) -> None:
        """Ends the worker, by force if it must be."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()

    def close(self) -> None:
        """Ends the worker and removes its directory."""
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _pass_on(self, pipe: IO[str], tail: list[str]) -> None:
        """Reads what the worker logs, so that its pipe never fills, and passes it to our log, as urgent as it was.

        What it says of its end is urgent to nobody once we have asked for that.
        """
        with suppress(ValueError):  # closed under us
            for text in pipe:
                line = logs.parse(text) or logs.Line(logging.DEBUG, text.rstrip(), {})
                tail.append(line.message)
                del tail[:-20]
                level = logging.DEBUG if self._closed else line.level
                worker_logger.log(level, "worker: %s", line.message, extra=line.about)


def _first_line(pipe: IO[str], said: "queue.SimpleQueue[str | None]") -> None:
    with suppress(ValueError):  # closed under us
        said.put(pipe.readline() or None)


def _level() -> str:
    """What the worker is to log: what somebody here would see of it, and what it says when it can't go on."""
    level = worker_logger.getEffectiveLevel()
    return "DEBUG" if level <= logging.DEBUG else "INFO" if level <= logging.INFO else "WARNING"

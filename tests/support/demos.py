"""`backhaul demo` as a process that tests start and end."""

import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Self


class Demo:
    """`backhaul demo --serve`: trains, then keeps its sessions until it is ended; a context manager.

    Args:
        workers: Addresses.
        options: Others of the command.
    """

    def __init__(self, workers: Sequence[str], *options: str) -> None:
        arguments = ["demo", "--serve", "--worker", ",".join(workers), *options]
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "backhaul", *arguments], stdout=subprocess.PIPE, text=True
        )
        self._is_trained = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("serving"):
                self._is_trained.set()

    def wait(self, timeout_s: float = 180) -> None:
        """Returns once it has trained all steps."""
        assert self._is_trained.wait(timeout_s), "the demo did not end in time"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.terminate()  # not by SIGINT, which a shell has its background jobs ignore
        self.process.wait(60)
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

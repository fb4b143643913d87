"""Runs a dashboard in a process of its own."""

import select
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec

_START_S = 20.0
_END_S = 5.0


class DashboardProcess:
    """A dashboard process that watches workers. It listens on a free port of 127.0.0.1.

    If the dashboard does not start, a message on stderr says why and `url` is empty.

    Args:
        worker: Addresses of the workers, separated by commas.
        token_file: Files with the tokens of the workers, separated by commas. Empty: the workers need no token.

    Attributes:
        url: URL of the dashboard, empty if it did not start.
    """

    def __init__(self, worker: str, token_file: str) -> None:
        self.url = ""
        self._process: subprocess.Popen[str] | None = None
        if find_spec("fastapi") is None:
            print("no dashboard: it needs pip install 'backhaul[server]'", file=sys.stderr)
            return
        arguments = ["dashboard", "--worker", worker, "--listen", "127.0.0.1:0"]
        if token_file:
            arguments += ["--worker-token-file", *token_file.split(",")]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "backhaul", *arguments],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _START_S)
        self.url = self._process.stdout.readline().strip().rpartition(" ")[2] if ready else ""
        if not self.url:
            print(f"no dashboard: it did not start within {_START_S:g} s", file=sys.stderr)

    def close(self) -> None:
        """Stops the process, by force if it does not end within 5 seconds."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

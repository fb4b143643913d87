"""Dashboard processes that tests start and end."""

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from typing import Any, Self

import httpx

from conftest import wait_until
from support.nursery import ForkedCommand


class Dashboard:
    """`backhaul dashboard`, which answers when constructed; a context manager.

    Args:
        workers: What it watches.
        options: For the command.
        store: Where it keeps history; where it does by itself if None.
        program: What serves instead of `backhaul`: "-c" and code.

    Attributes:
        url: Where it is.
        process: Itself.
    """

    def __init__(
        self,
        *workers: str,
        options: tuple[str, ...] = (),
        store: str | None = ":memory:",
        program: tuple[str, ...] = (),
    ) -> None:
        kept = ("--store", store) if store is not None else ()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  a pipe that nobody reads would fill
        arguments = [*program, "dashboard", "--listen", "127.0.0.1:0", *kept, *options, "--worker", *workers]
        self.process = ForkedCommand(arguments, self._log)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().rpartition(" ")[2].strip()
        self._client = httpx.Client(base_url=self.url, timeout=60)

    def get(self, path: str) -> httpx.Response:
        return self._client.get(path)

    def head(self, path: str) -> httpx.Response:
        return self._client.head(path)

    def api(self, path: str) -> Any:
        """What a route of /api/v1 says."""
        answer = self.get(f"/api/v1/{path}")
        assert answer.status_code == 200, answer.text
        return json.loads(answer.text, parse_constant=_refuse)

    def items(self, path: str) -> Any:
        """The first page of a list of /api/v1."""
        return self.api(path)["items"]

    def logged(self) -> str:
        """What it wrote to stderr so far."""
        return os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode()

    def live(self) -> Iterator[Any]:
        """Events as they come."""
        with httpx.stream("GET", f"{self.url}/api/v1/live", timeout=60) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "), parse_constant=_refuse)

    def ready(self) -> Self:
        """Waits until every worker was asked."""
        wait_until(lambda: self.get("/readyz").status_code == 200, "every worker was asked")
        return self

    def close(self) -> None:
        """SIGTERM, which it must obey."""
        self._client.close()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.stdout is not None
        self.process.stdout.close()
        try:
            assert self.process.wait(60) in {0, -signal.SIGTERM}
        finally:
            self.process.kill()
            self.process.wait()
            self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")

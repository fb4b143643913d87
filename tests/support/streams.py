"""Streams of a device that isn't there: tensors are the host's, and streams tell what they were given."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch

from backhaul_runtime.tensors import staging
from backhaul_runtime.tensors.layout import Layout
from backhaul_runtime.tensors.staging import Side

WAIT_S = 240.0


class FakeStream:
    """Runs what it is given when that is queued, once what it was told to wait for has happened."""

    def __init__(self, cuda: "FakeCuda", name: str) -> None:
        self.cuda = cuda
        self.name = name
        self.idle = threading.Event()
        self.end()

    def begin(self) -> None:
        """Something is queued that takes until `end`."""
        self.idle = threading.Event()

    def end(self) -> None:
        self.idle.set()

    def wait_event(self, event: "FakeEvent") -> None:
        self.cuda.note(f"{self.name} waits for {event.stream}")
        assert event.happened.wait(WAIT_S)


class FakeEvent:
    """Happens when its stream is done with what it had when the event was recorded."""

    def __init__(self, cuda: "FakeCuda") -> None:
        self.cuda = cuda
        self.at_ms = 0.0
        self.stream = ""
        self.happened = threading.Event()

    def record(self, stream: FakeStream) -> None:
        self.cuda.note(f"{stream.name} is marked")
        self.stream, self.happened, self.at_ms = stream.name, stream.idle, self.cuda.clock_ms

    def query(self) -> bool:
        return self.happened.is_set()

    def elapsed_time(self, later: "FakeEvent") -> float:
        assert self.query()
        assert later.query()
        return later.at_ms - self.at_ms

    def synchronize(self) -> None:
        self.cuda.note(f"the host waits for {self.stream}")
        assert self.happened.wait(WAIT_S)


class FakeCuda:
    """As much of `torch.cuda` as staging asks for.

    Attributes:
        trainer: The stream of the thread that made this.
        others: That of all other threads. With torch it is the trainer's, unless that has chosen one.
        log: What was asked of streams, in order.
        clock_ms: The device's time, which events note when they are recorded.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.clock_ms = 0.0
        self.trainer = FakeStream(self, "trainer")
        self.others = FakeStream(self, "others")
        self._trainer_thread = threading.current_thread()
        self._current = threading.local()

    @classmethod
    def installed(cls, patch: pytest.MonkeyPatch) -> "FakeCuda":
        """One that has the host's tensors on it."""
        fake = cls()
        patch.setattr(staging, "_cuda", lambda device: fake)
        patch.setattr(staging, "_side_stream", cache(fake.side))
        patch.setattr(staging, "page_locked", lambda size: torch.empty(size, dtype=torch.uint8))
        patch.setattr(Layout, "is_on_accelerator", True)
        patch.setattr(Layout, "is_dense_on_host", property(lambda layout: False))  # its bytes cannot be read in place
        return fake

    def note(self, what: str) -> None:
        self.log.append(what)

    def Event(self, **_: Any) -> FakeEvent:  # noqa: N802  torch's name
        return FakeEvent(self)

    def side(self, device: torch.device, side: Side) -> FakeStream:
        return FakeStream(self, side.name)

    def current_stream(self, device: torch.device) -> FakeStream:
        own = self.trainer if threading.current_thread() is self._trainer_thread else self.others
        return getattr(self._current, "stream", own)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._current.stream = self.current_stream(torch.device("cpu")), stream
        try:
            yield
        finally:
            self._current.stream = before

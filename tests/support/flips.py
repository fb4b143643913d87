"""Messages of a session with a bit flipped on their way, and what became of each flip."""

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
import pytest

from backhaul._worker_client.connection.connection import Connection
from backhaul._worker_client.connection.shared_memory import TrainerSharedMemory
from backhaul_proto.v1 import segment_pb2
from backhaul_runtime.wire.shared_memory import Outbox, Region

ENDS_BYTES = 256
"""Half of the flips go so close to the beginning or the end of a message, where its fields are and not its tensors."""

Kind: TypeAlias = tuple[str, str]
"""Direction and method of a message."""


OnItsWay: TypeAlias = Callable[[str, str, bytes], bytes]
"""Given direction, method and bytes of a message, returns what arrives."""


@contextmanager
def on_every_channel(on_its_way: OnItsWay) -> Iterator[None]:
    """Messages of sessions that connect meanwhile pass through a function, sealed as they are.

    Those of an exchange have as their method what they ask for or answer, see `kind_of`.
    """
    make = Connection._channel_to
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Connection, "_channel_to", lambda connection, target: _Channel(make(connection, target), on_its_way)
        )
        yield


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the messages of sessions that connect meanwhile, by method."""
    passed: Counter[str] = Counter()

    def count(direction: str, method: str, data: bytes) -> bytes:
        passed[method] += 1
        return data

    with on_every_channel(count):
        yield passed


@dataclass
class Flips:
    """Flips one bit of a message of each kind that it is armed for.

    Attributes:
        random: Chooses.
        passed: Messages so far, by kind.
        flipped: Flips so far, by kind.
    """

    random: random.Random
    passed: Counter[Kind] = field(default_factory=Counter)
    flipped: Counter[Kind] = field(default_factory=Counter)
    _armed: dict[Kind, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def arm(self, kind: Kind, skipped: int = 0) -> None:
        """The next message of a kind will be damaged, once so many have passed."""
        with self._lock:
            self._armed[kind] = skipped

    def disarm(self) -> None:
        """Damages nothing more."""
        with self._lock:
            self._armed.clear()

    def on_its_way(self, direction: str, method: str, data: bytes) -> bytes:
        """A message as it arrives."""
        with self._lock:
            kind = direction, method
            self.passed[kind] += 1
            if kind not in self._armed:
                return data
            if self._armed[kind]:
                self._armed[kind] -= 1
                return data
            del self._armed[kind]
            self.flipped[kind] += 1
            return self._damaged(data)

    def _damaged(self, data: bytes) -> bytes:
        position = self.random.randrange(len(data))
        if self.random.random() < 0.5:
            at = self.random.randrange(min(len(data), ENDS_BYTES))
            position = self.random.choice([at, len(data) - 1 - at])
        damaged = bytearray(data)
        damaged[position] ^= 1 << self.random.randrange(8)
        return bytes(damaged)

    @contextmanager
    def in_shared_memory(self) -> Iterator[None]:
        """Tensors that go through shared memory are messages too, of the method "region"."""
        put, locate = Outbox.put, TrainerSharedMemory._region

        def damaged_up(outbox: Outbox, outgoing: Any) -> Any:
            slot = put(outbox, outgoing)
            if slot is not None:
                self._flip_in(
                    slot.region, "up", slot.begin + outgoing.layout.alignment_bytes, outgoing.layout.span_bytes
                )
            return slot

        def damaged_down(memory: TrainerSharedMemory, location: Any, layout: Any) -> Region:
            region = locate(memory, location, layout)
            self._flip_in(region, "down", location.offset_bytes, layout.span_bytes)
            return region

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Outbox, "put", damaged_up)
            patch.setattr(TrainerSharedMemory, "_region", damaged_down)
            yield

    def _flip_in(self, region: Region, direction: str, begin: int, size_bytes: int) -> None:
        raw = region.raw(begin, size_bytes)
        flipped = self.on_its_way(direction, "region", raw.tobytes())
        raw[:] = memoryview(flipped)


def kind_of(direction: str, data: bytes) -> str:
    """What a message of an exchange asks for or answers; "pushed" for a result that nobody has asked for."""
    if direction == "up":
        return segment_pb2.Request.FromString(data).WhichOneof("request") or ""
    answer = segment_pb2.Answer.FromString(data)
    return (answer.WhichOneof("answer") or "tensors") if answer.number else "pushed"


class _Channel:
    """A channel whose messages pass through a function."""

    def __init__(self, channel: grpc.Channel, on_its_way: OnItsWay) -> None:
        self._channel = channel
        self._on_its_way = on_its_way

    def __getattr__(self, name: str) -> Any:
        made = getattr(self._channel, name)
        return self._passing(made) if name.startswith(("unary_", "stream_")) else made

    def _passing(self, make: Callable[..., Any]) -> Callable[..., Any]:
        on_its_way = self._on_its_way

        def made(path: str, request_serializer: Any, response_deserializer: Any) -> Any:
            method = path.rpartition("/")[2]

            def passed(direction: str, data: bytes) -> bytes:
                return on_its_way(direction, kind_of(direction, data) if method == "Exchange" else method, data)

            return make(
                path,
                request_serializer=lambda message: passed("up", request_serializer(message)),
                response_deserializer=lambda data: response_deserializer(passed("down", data)),
            )

        return made

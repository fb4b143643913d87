"""The thread that writes evidence, so that no training thread waits for a disk."""

import logging
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

from backhaul._evidence.files import EvidenceName, EvidenceWriter, UnusableError
from backhaul._evidence.objects import Objects
from backhaul_proto.v1 import evidence_pb2
from backhaul_runtime.errors import BackhaulError, Refusal
from backhaul_runtime.process.logs import about
from backhaul_runtime.process.threads import only_in

logger = logging.getLogger("backhaul")
MOST_WAITING_BYTES = 1 << 30
"""Bytes of copies that may wait to be written. Those of one file may always wait."""

_CLOSE_S = 60.0

EvidenceMessage = evidence_pb2.EvidenceCall | evidence_pb2.EvidenceBackward | evidence_pb2.EvidenceStep
Complete = Callable[[Objects], EvidenceMessage]
"""Returns the message of a file, and adds the objects that it names. The thread calls it; it may raise."""


class _Item(NamedTuple):
    name: EvidenceName
    message: EvidenceMessage
    complete: Complete | None
    size_bytes: int


class EvidenceThread:
    """Writes files of evidence in the order in which they were queued. Its methods are thread-safe.

    Args:
        writer: Writes the files. Only the thread uses it from now on.
        directory: The name of the directory, for messages.
        session: Id of the session, for messages.
    """

    def __init__(self, writer: EvidenceWriter, directory: str, session: str) -> None:
        self._writer, self._directory, self._session = writer, directory, session
        # The backwards of each call that was written, by step. The thread alone uses it.
        self._counts: dict[int, dict[int, int]] = {}
        self._waiting_bytes = 0
        self._lock = threading.Lock()  # guards `_waiting_bytes`
        self.has_ended = False
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="backhaul-evidence", daemon=True)
        self._thread.start()

    def enqueue(
        self, name: EvidenceName, message: EvidenceMessage, complete: Complete | None = None, size_bytes: int = 0
    ) -> None:
        """Queues a file.

        Args:
            name: The name of the file.
            message: What the file says if it can't be completed, apart from the reason. For the end of a step, only
                its type counts.
            complete: Returns what the file says; None if that is `message`.
            size_bytes: Bytes of the copies that it waits with.

        Raises:
            UnusableError: More copies would wait than may. Nothing was queued.
        """
        with self._lock:
            waiting_bytes = self._waiting_bytes
            if size_bytes and waiting_bytes and waiting_bytes + size_bytes > MOST_WAITING_BYTES:
                raise UnusableError(
                    f"{waiting_bytes >> 20} MiB were waiting for the disk, which is slower than the training"
                )
            self._waiting_bytes += size_bytes
        self._queue.put(_Item(name, message, complete, size_bytes))

    def close(self) -> None:
        """Writes what waits, and ends the thread. Waits a minute at most."""
        self._queue.put(None)
        self._thread.join(_CLOSE_S)
        self.has_ended = True  # a later backward would queue copies that nobody takes
        if self._thread.is_alive():
            self._say(f"what was left was not written within {_CLOSE_S:g} s of the end of the session")

    @only_in("backhaul-evidence")
    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            if not self.has_ended:
                self._write(item)
            with self._lock:
                self._waiting_bytes -= item.size_bytes
            del item  # nothing of the last file stays alive while this thread waits

    @only_in("backhaul-evidence")
    def _write(self, item: _Item) -> None:
        objects, message, name = Objects(), item.message, item.name
        if isinstance(message, evidence_pb2.EvidenceStep):
            self._write_end(name, "")
            return
        if item.complete is not None:
            try:
                message = item.complete(objects)
            except Exception as error:  # no variable may refer to it: its traceback refers to tensors
                objects, message = Objects(), without(item.message, reason_of(error))
        try:
            fits = self._writer.write(objects.contents, {name: message})
        except Exception as error:
            self._end(_failure(error), name)
        else:
            if not fits:
                self._end("evidence_bytes allows no more", name)
            elif not name.backward:
                self._counts.setdefault(name.step, {})[name.call] = 0
            elif name.call in self._counts.get(name.step, {}):  # else it runs after the end of its step
                self._counts[name.step][name.call] += 1

    @only_in("backhaul-evidence")
    def _write_end(self, name: EvidenceName, why_ended: str) -> None:
        """Writes the end of a step of which something was written, or in which the recording ends."""
        counts = self._counts.pop(name.step, {})
        if not counts and not why_ended:
            return
        message = evidence_pb2.EvidenceStep(
            step=name.step,
            session=name.session,
            calls=[evidence_pb2.EvidenceCount(call=call, backwards=count) for call, count in counts.items()],
            why_ended=why_ended,
        )
        try:
            self._writer.write({}, {EvidenceName(name.step, name.session): message}, is_end=True)
        except Exception as error:
            if not self.has_ended:
                self._end(_failure(error), name)

    @only_in("backhaul-evidence")
    def _end(self, why: str, name: EvidenceName) -> None:
        self.has_ended = True
        self._write_end(name, why)
        self._say(why)

    def _say(self, why: str) -> None:
        logger.warning(
            "No more evidence is written to %s: %s. The training goes on, and what is there can be verified.",
            self._directory,
            why,
            extra=about(self._session),
        )


def _failure(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def without(message: EvidenceMessage, why: str) -> EvidenceMessage:
    """Returns the message of a file that says only why it could not be completed."""
    assert not isinstance(message, evidence_pb2.EvidenceStep)
    message.why_missing = why
    return message


def reason_of(error: Exception) -> str:
    """Returns why something could not be recorded, in a line. Logs an unexpected error once, with its traceback."""
    reason = str(error) if isinstance(error, (BackhaulError, UnusableError)) else Refusal.of(error).reason
    return reason.partition("\n")[0]

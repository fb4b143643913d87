"""Waiting for a worker within bounds, and its errors as ours.

NOTE [Bounds]
1. Every wait ends: when the worker is silent too long, when it runs too long, when its queue is longer than doing the
   work here.
2. Silence is counted in slices the waiting thread was awake for. So a trainer that was itself stopped or starved does
   not blame the worker.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from time import monotonic
from typing import Any, Generic, TypeVar

import grpc
from torch import Tensor

from backhaul_runtime.errors import (
    ERROR_METADATA_KEY,
    BackhaulError,
    TransferError,
    WorkerError,
    WorkerLostError,
    from_bytes,
)
from backhaul_runtime.framing import Receiver

T = TypeVar("T")
R = TypeVar("R")
SLICE_S = 0.1
LONGEST_S = 3600.0
"""Deadline given to gRPC for calls whose end the rules above decide."""


def error_of(error: grpc.RpcError) -> BackhaulError:
    """The error the worker raised, or WorkerLostError where gRPC itself gave up."""
    metadata = error.trailing_metadata() if isinstance(error, grpc.Call) else None
    for key, value in metadata or ():
        if key == ERROR_METADATA_KEY and isinstance(value, bytes) and (found := from_bytes(value)) is not None:
            return found
    code = error.code() if isinstance(error, grpc.Call) else None
    details = error.details() if isinstance(error, grpc.Call) else str(error)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return WorkerError(f"what answers there is no Backhaul worker, or one of another version: {details}")
    return WorkerLostError(
        f"the worker is gone ({code.name if code else 'no status'}: {details})", status=code.name if code else ""
    )


class Watch:
    """Counts signs of life of one call."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._signs = 0

    def sign(self) -> None:
        """The worker did something: a message came, or one of ours was taken. Called by any thread."""
        self._signs += 1

    def wait(self, future: "Future[T]", check: Callable[[], None] = lambda: None) -> T:
        """The future's result. Raises WorkerLostError after too much silence, and what `check` raises (Rule 1)."""
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        seen, silent = self._signs, 0.0
        while not done.is_set():
            before = monotonic()
            if done.wait(SLICE_S):
                break
            check()
            if self._signs != seen:
                seen, silent = self._signs, 0.0
            else:
                silent += min(SLICE_S, monotonic() - before)  # Rule 2
            if silent >= self._silence_s:
                raise WorkerLostError(f"the worker was silent for {self._silence_s:g} s", status="SILENT")
        return future.result()


def call_unary(
    method: Any, request: Any, silence_s: float, watch: Watch | None = None, *, wait_for_ready: bool = False
) -> Any:
    """One answer to a message, or to a stream of them whose progress counts as a sign of life.

    Args:
        method: Of a stub.
        request: A message, or an iterator of them.
        silence_s: See NOTE [Bounds].
        watch: Counts the signs of life of a stream.
        wait_for_ready: Wait for the connection instead of failing while there is none.
    """
    future = method.future(request, timeout=LONGEST_S, wait_for_ready=wait_for_ready)
    try:
        return (watch or Watch(silence_s)).wait(future)
    except grpc.RpcError as error:
        raise error_of(error) from None
    except grpc.FutureCancelledError:
        raise WorkerLostError("the connection was closed", status="CANCELLED") from None
    finally:
        future.cancel()  # after silence or Ctrl-C nothing must be left behind; of a finished call it does nothing


def watched(messages: Iterable[T], watch: Watch) -> Iterator[T]:
    """Passes messages on; gRPC taking one is a sign of life."""
    for message in messages:
        watch.sign()
        yield message


def longest_run_s(expected_s: float) -> float:
    """How long work is waited for that was expected to take so long."""
    return max(5.0, 4 * expected_s)


class Stream(Generic[R]):
    """A call that is answered by progress, a result and tensors. Tensors are put together as they arrive.

    Args:
        method: Of a stub.
        request: Its message.
        pool: Reads the answers, so that the caller's wait has bounds.
        expected_s: What the work should take.
        silence_s: See NOTE [Bounds].
    """

    def __init__(self, method: Any, request: Any, pool: Executor, expected_s: float, silence_s: float) -> None:
        self._watch = Watch(silence_s)
        self._longest_run_s = longest_run_s(expected_s)
        self._longest_queue_s = max(1.0, 2 * expected_s)
        self._running_since: float | None = None
        self._ahead_s = 0.0
        self.received_bytes = 0
        self.addresses: list[bytes] = []
        self._call = method(request, timeout=LONGEST_S)
        self._future: Future[tuple[R, list[Tensor]]] = pool.submit(self._read)

    def wait(self) -> tuple[R, list[Tensor]]:
        """The result and its tensors.

        Raises:
            WorkerError: The worker refused or failed.
            WorkerLostError: A bound was met (Rule 1) or the connection broke.
        """
        try:
            return self._watch.wait(self._future, self._check)
        except grpc.RpcError as error:
            raise error_of(error) from None
        finally:
            self._call.cancel()  # of a call that has ended this does nothing

    def _read(self) -> tuple[R, list[Tensor]]:
        receiver = Receiver()
        result: R | None = None
        for message in self._call:
            self._watch.sign()
            self.received_bytes += message.ByteSize()
            kind = message.WhichOneof("part")
            if kind == "progress":
                self._ahead_s = message.progress.ahead_s
                if message.progress.running and self._running_since is None:
                    self._running_since = monotonic()
            elif kind == "result":
                result, self._running_since, self._ahead_s = message.result, None, 0.0
            else:
                receiver.add(message.tensors)
        if result is None:
            raise TransferError("the worker's answer ended before its result")
        self.addresses = receiver.addresses()
        return result, receiver.tensors()

    def _check(self) -> None:
        if self._running_since is not None and monotonic() - self._running_since > self._longest_run_s:
            raise WorkerLostError(
                f"the worker has run the segment for more than {self._longest_run_s:.1f} s", status="SLOW"
            )
        if self._ahead_s > self._longest_queue_s:
            raise WorkerLostError(
                f"the worker has {self._ahead_s:.1f} s of other work first, longer than doing it here", status="BUSY"
            )

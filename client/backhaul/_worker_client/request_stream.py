"""Requests with short answers, one after the other on a stream that stays open.

NOTE [Short]
1. It is a short cut. Whatever does not go well here ends in None, an answer that is long, late or damaged included. The
   caller then makes the call, whose key makes it the same request to the worker.
2. But silence is silence: a worker that says nothing for as long as any may is taken for lost. A thread that lives as
   long as the stream looks every now and then, for the one that waits can't.
3. Who finds the stream taken by another thread does not wait for it.
"""

import queue
import threading
from time import monotonic
from typing import Any

import grpc

from backhaul._worker_client.deadlines import SLICE_S
from backhaul_runtime.errors import TransferError, WorkerLostError
from backhaul_runtime.wire.splicing import accepted


class RequestStream:
    """Opened by its first request, and again after it broke. `close` it.

    Args:
        method: The method of a stub. It answers each message with one message.
        silence_s: The longest silence in seconds, see Rule 2.
    """

    def __init__(self, method: Any, silence_s: float) -> None:
        self._method = method
        self._silence_s = silence_s
        self._taken = threading.Lock()  # Rule 3
        self._asked = 0
        self._is_waiting = False
        self._is_silent = False
        self._call: Any = None
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._ended = threading.Event()

    def try_call(self, request: bytes) -> Any:
        """The answer to an encoded request, or None (Rule 1). Raises WorkerLostError after silence (Rule 2)."""
        if not self._taken.acquire(blocking=False):
            return None
        try:
            call = self._call or self._open()
            self._asked += 1
            self._is_waiting = True
            self._requests.put(request)
            return accepted(next(call))
        except TransferError:
            self.close()
            return None
        except (grpc.RpcError, StopIteration, ValueError):
            self.close()
            if self._is_silent:
                raise WorkerLostError(f"the worker was silent for {self._silence_s:g} s", status="SILENT") from None
            return None
        except BaseException:  # Ctrl-C: no caller is left for the answer
            self.close()
            raise
        finally:
            self._is_waiting = False
            self._taken.release()

    def close(self) -> None:
        """Ends the stream and its threads."""
        self._ended.set()
        self._requests.put(None)
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    def _open(self) -> Any:
        self._requests, self._ended, self._is_silent = queue.SimpleQueue(), threading.Event(), False
        call = self._call = self._method(iter(self._requests.get, None))
        watch = threading.Thread(target=self._watch, args=(call, self._ended), name="backhaul-watch", daemon=True)
        watch.start()
        return call

    def _watch(self, call: Any, ended: threading.Event) -> None:
        seen, silent = 0, 0.0
        while True:
            before = monotonic()
            if ended.wait(SLICE_S):
                return
            if self._is_waiting and self._asked == seen:
                silent += min(SLICE_S, monotonic() - before)  # only while we were awake ourselves
            else:
                seen, silent = self._asked, 0.0
            if silent >= self._silence_s:
                self._is_silent = True
                call.cancel()
                return

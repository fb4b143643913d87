"""Requests with small answers, one after the other on a stream that stays open.

NOTE [Short]
1. This is an optimization. Every failure here returns None, also for an answer that is large, late or damaged. The
   caller then calls the RPC, whose key makes it the same request to the worker.
2. A silent worker is different: after `silence_s` without a message it counts as lost. A thread that lives as long as
   the stream checks this, because the waiting thread cannot.
3. A thread that finds the stream in use by another thread does not wait for it.
"""

import queue
import threading
from time import monotonic
from typing import Any

import grpc

from backhaul._worker_client.connection.deadlines import SLICE_S
from backhaul._worker_client.connection.grpc_errors import forget_stack
from backhaul_runtime.errors import TransferError, WorkerLostError
from backhaul_runtime.process.threads import only_in
from backhaul_runtime.wire.splicing import accepted


class RequestStream:
    """A stream for small requests. The first request opens it, also after it broke. Thread-safe. `close` ends it.

    Args:
        method: The method of a stub. It answers each message with one message.
        silence_s: The longest silence in seconds, see Rule 2.
    """

    def __init__(self, method: Any, silence_s: float) -> None:
        self._method = method
        self._silence_s = silence_s
        self._taken = threading.Lock()  # held by the thread that uses the stream (Rule 3)
        self._asked = 0
        self._is_waiting = False
        self._is_silent = False
        self._call: Any = None
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._ended = threading.Event()

    def try_call(self, request: bytes) -> Any:
        """Returns the answer to an encoded request, or None (Rule 1). Raises WorkerLostError after silence (Rule 2)."""
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
        except (grpc.RpcError, StopIteration, ValueError) as error:
            forget_stack(error)
            self.close()
            if self._is_silent:
                raise WorkerLostError(f"the worker was silent for {self._silence_s:g} s", status="SILENT") from None
            return None
        except BaseException:  # Ctrl-C: the stream would return this answer to the next request
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

    @only_in("backhaul-watch")
    def _watch(self, call: Any, ended: threading.Event) -> None:
        seen, silent = 0, 0.0
        while True:
            before = monotonic()
            if ended.wait(SLICE_S):
                return
            if self._is_waiting and self._asked == seen:
                silent += min(SLICE_S, monotonic() - before)  # only the time during which this process was awake counts
            else:
                seen, silent = self._asked, 0.0
            if silent >= self._silence_s:
                self._is_silent = True
                call.cancel()
                return

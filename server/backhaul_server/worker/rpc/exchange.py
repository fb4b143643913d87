"""One exchange: the requests of one session on one stream, each of which is answered as soon as it can be.

NOTE [Exchange] in `backhaul._worker_client.connection.exchange` has the protocol's rules. On this side:

1. Each request is a task. At most `IN_FLIGHT` run at once; until one has ended nothing more is read, so a client that
   does not read answers is not read from either.
2. Another task pushes results that nobody has asked for yet, as far as the trainer has room for them: see `PushCredit`.
3. Tasks write one message at a time. A message waits until gRPC takes it, which it does not while the client's window
   is full. What waits is charged and counted as the answers that it belongs to.
4. A request that fails is answered with its error, and the stream goes on. Only what says nothing about its session
   ends the stream.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import ExitStack, aclosing, suppress
from time import perf_counter
from typing import Any

import grpc

from backhaul_proto.v1 import segment_pb2
from backhaul_runtime.errors import BackhaulError, TransferError
from backhaul_runtime.wire.splicing import TensorMessage, accepted
from backhaul_server.worker.engine.segment import SessionState
from backhaul_server.worker.limits import IN_FLIGHT
from backhaul_server.worker.rpc.calls import Context, Servicer, answered_error
from backhaul_server.worker.rpc.push_credit import PushCredit

Received = TensorMessage[segment_pb2.Request] | BackhaulError
Answers = Callable[[SessionState, int, TensorMessage[segment_pb2.Request]], AsyncGenerator[segment_pb2.Answer | bytes]]
"""Yields the messages of the answer to a request, given its session and its number."""
Pushes = Callable[[SessionState, PushCredit], AsyncGenerator[bytes]]
"""Yields messages with results to push, given the session and the room for them."""


class OpenExchange:
    """An open exchange. Event loop only.

    Args:
        servicer: The servicer whose RPC it is.
        context: The context of the call.
        answers: Returns the messages of the answer to one request.
        pushes: Returns the messages with pushed results.
    """

    def __init__(self, servicer: Servicer, context: Context, answers: Answers, pushes: Pushes) -> None:
        self._servicer = servicer
        self._context = context
        self._answers = answers
        self._pushes = pushes
        self._credit = PushCredit()
        self._pusher: asyncio.Task[None] | None = None
        self._session_id = ""
        self._room = asyncio.Semaphore(IN_FLIGHT.most)
        self._writing = asyncio.Lock()  # gRPC writes one message of a call at a time
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, requests: AsyncIterator[Received]) -> None:
        """Answers requests until the client ends the stream. Raises what the first one is refused with."""
        incoming, number = aiter(requests), 0
        with ExitStack() as opened:
            first = await self._first(incoming)
            session = self._servicer.session(first.message.session)
            self._session_id = session.id
            opened.enter_context(self._servicer.worker.streaming(session))
            received: Received = first
            del first
            try:
                while True:
                    await self._room.acquire()
                    number += 1
                    self._note_pushes(session, received)
                    task = asyncio.create_task(self._answer(number, received))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                    try:
                        received = await anext(incoming)
                    except StopAsyncIteration:
                        break
                await asyncio.gather(*self._tasks)
            finally:
                ending = [*self._tasks, *([self._pusher] if self._pusher is not None else [])]
                for task in ending:
                    task.cancel()
                await asyncio.gather(*ending, return_exceptions=True)

    def _note_pushes(self, session: SessionState, received: Received) -> None:
        if isinstance(received, TensorMessage) and received.message.HasField("pushes_taken"):
            self._credit.taken(received.message.pushes_taken)
            if self._pusher is None:
                self._pusher = asyncio.create_task(self._push(session))

    async def _push(self, session: SessionState) -> None:
        try:
            async with aclosing(self._pushes(session, self._credit)) as messages:
                async for message in messages:
                    await self._write(message)
        except Exception as error:  # the trainer asks for what is not pushed
            self._servicer.failed(None, error, self._context, session.id)

    async def _first(self, incoming: AsyncIterator[Received]) -> TensorMessage[segment_pb2.Request]:
        """Waits for the first request, for as long as a lease. Raises TransferError if it does not come."""
        lease_s = self._servicer.worker.lease_s
        try:
            with self._servicer.worker.opening():
                async with asyncio.timeout(lease_s):
                    return accepted(await anext(incoming))
        except (TimeoutError, StopAsyncIteration):
            raise TransferError(f"a stream named no session within {lease_s:g} s") from None

    async def _answer(self, number: int, received: Received) -> None:
        started, failed, name = perf_counter(), False, "Exchange"
        request: Any = None
        try:
            carried = accepted(received)
            kind = carried.message.WhichOneof("request")
            request = getattr(carried.message, kind) if kind else None
            if carried.message.session not in {"", self._session_id} or kind is None:
                raise TransferError("a request names another session than its stream, or asks for nothing")
            name = name_of(kind)
            async with aclosing(self._answers(self._servicer.session(self._session_id), number, carried)) as answers:
                async for answer in answers:
                    await self._write(answer)
        except Exception as error:  # every request has an answer, whatever failed
            failed = True
            self._servicer.failed(request, error, self._context, self._session_id)
            with suppress(grpc.aio.BaseError):  # the connection broke
                await self._write(segment_pb2.Answer(number=number, error=answered_error(error).to_bytes()))
        finally:
            self._servicer.meter.call(name, perf_counter() - started, failed=failed)
            self._room.release()

    async def _write(self, answer: segment_pb2.Answer | bytes) -> None:
        async with self._writing:
            await self._context.write(answer)


def name_of(kind: str) -> str:
    """Returns the name of a kind of request as the names of RPCs are written, for telemetry."""
    return kind.title().replace("_", "")

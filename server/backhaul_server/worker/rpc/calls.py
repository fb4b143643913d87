"""Calls on their way through a worker: limited, measured, their errors as statuses, messages sealed.

Knows no call by name.
"""

import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import wraps
from time import perf_counter, time
from typing import Any, TypeVar

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from backhaul_runtime.errors import (
    ERROR_METADATA_KEY,
    MAX_MESSAGE,
    STATUS_NAMES,
    BackhaulError,
    LimitError,
    WorkerError,
)
from backhaul_runtime.process.logs import about
from backhaul_runtime.wire.splicing import accepted, deserializer, serialize
from backhaul_server.worker.engine.worker import Worker
from backhaul_server.worker.limits import MOST_FIELDS, check_fields, check_size
from backhaul_server.worker.rpc.meter import RpcMeter

logger = logging.getLogger("backhaul.worker")

_KEPT_OF_ERROR = 500

_MAX_DETAILS = 1_000
_UNPRINTABLE = re.compile(r"[^ -~]")
"""Each takes up to nine bytes of metadata, of which gRPC takes 16 KiB in all."""

Context = grpc.aio.ServicerContext[Any, Any]
M = TypeVar("M", bound=Message)
Unary = Callable[[Any, Any, Context], Awaitable[M | bytes]]
Stream = Callable[[Any, Any, Context], AsyncIterator[M | bytes]]


async def _abort(context: Context, error: Exception) -> None:
    """Ends a call with an error of ours as its status, with what the client needs to raise it again."""
    if not isinstance(error, BackhaulError):
        error = WorkerError(f"the worker failed: {type(error).__name__}: {error}")
    status = next((STATUS_NAMES[kind] for kind in type(error).__mro__ if kind in STATUS_NAMES), "INTERNAL")
    context.set_trailing_metadata(((ERROR_METADATA_KEY, error.to_bytes()),))
    await context.abort(grpc.StatusCode[status], _UNPRINTABLE.sub("?", error.message[:_MAX_DETAILS]))


def unary(method: Unary[M]) -> Unary[M]:
    """Measures a method that answers once, and maps its errors."""

    @wraps(method)
    async def call(self: "Servicer", request: Any, context: Context) -> M | bytes:
        started, failed = perf_counter(), False
        try:
            return await method(self, accepted(request), context)
        except Exception as error:  # every error of ours has a status
            failed = True
            self.failed(request, error)
            await _abort(context, error)
            raise
        finally:
            self.meter.call(method.__name__, perf_counter() - started, failed=failed)

    return call


def stream(method: Stream[M]) -> Stream[M]:
    """Measures a method that answers many times, and maps its errors."""

    @wraps(method)
    async def call(self: "Servicer", request: Any, context: Context) -> AsyncIterator[M | bytes]:
        started, failed = perf_counter(), False  # a client that has enough and leaves is no failure
        try:
            async for answer in method(self, accepted(request), context):
                yield answer
        except Exception as error:  # every error of ours has a status
            failed = True
            self.failed(request, error)
            await _abort(context, error)
        finally:
            self.meter.call(method.__name__, perf_counter() - started, failed=failed)

    return call


def open_stream(method: Stream[M]) -> Stream[M]:
    """Maps the errors of a method that stays open, and measures what is asked on it by itself."""

    @wraps(method)
    async def call(self: "Servicer", request: Any, context: Context) -> AsyncIterator[M | bytes]:
        try:
            async for answer in method(self, accepted(request), context):
                yield answer
        except Exception as error:  # every error of ours has a status
            self.failed(request, error)
            await _abort(context, error)

    return call


class Servicer:
    """Answers calls for a worker, and notes what fails.

    Args:
        worker: Decides.
        meter: Counts.
    """

    def __init__(self, worker: Worker, meter: RpcMeter) -> None:
        self.worker = worker
        self.meter = meter

    def failed(self, request: Any, error: Exception) -> None:
        """Notes and logs an error for those who look after the worker."""
        said = f"{type(error).__name__}: {error}"[:MAX_MESSAGE]
        is_cut_off = isinstance(error, grpc.aio.BaseError)  # by the wire, or as the server ends
        if (not isinstance(error, BackhaulError) and not is_cut_off) or type(error) is WorkerError:
            self.worker.last_error = said, time()
        request = getattr(request, "message", request)
        key = getattr(request, "key", request)
        session = self.worker.sessions.get(getattr(key, "session", ""))
        extra = {}
        if session is not None:
            session.last_error = said[:_KEPT_OF_ERROR]
            segment = session.segments.get(getattr(key, "segment", 0))
            extra = about(session.run, segment.name if segment else getattr(request, "name", ""))
        if isinstance(error, BackhaulError):
            logger.debug("refused: %s", said, extra=extra)
        elif is_cut_off:
            logger.info("a request was cut off: %s", said, extra=extra)
        else:
            logger.error("a request failed", exc_info=error, extra=extra)


_MAKERS: Mapping[tuple[bool, bool], Any] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
"""By whether requests and answers are streams."""


def handler_of(method: MethodDescriptor, servicer: Servicer) -> Any:
    """As the generated stubs make them, but messages are read and written by `splicing`, and their bytes counted.

    A request that is refused comes as the error that says why, see NOTE [Seal]. `unary` and `stream` raise it. A method
    that takes a stream of requests calls `accepted` on each.
    """
    kind, meter = GetMessageClass(method.input_type), servicer.meter
    read = deserializer(kind, MOST_FIELDS)

    def received(data: bytes) -> Any:
        meter.received(len(data))
        try:
            check_size(kind, data)
            request = read(data)
            if not isinstance(request, BackhaulError):
                check_fields(getattr(request, "message", request))
        except LimitError as error:
            return error.with_traceback(None)  # the traceback would keep the message alive
        return request

    def sent(message: Message | bytes) -> bytes:
        data = serialize(message)
        meter.sent(len(data))
        return data

    make = _MAKERS[method.client_streaming, method.server_streaming]
    return make(getattr(servicer, method.name), request_deserializer=received, response_serializer=sent)

"""The parts that all RPCs of a worker share: limits, counts and durations, errors as statuses, and sealed messages.

This module knows no RPC by name.
"""

import logging
import re
from collections.abc import Awaitable, Callable, Mapping
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
    CredentialError,
    LimitError,
    WorkerError,
)
from backhaul_runtime.process.logs import about
from backhaul_runtime.wire.splicing import accepted, deserializer, serialize
from backhaul_server.worker.accounts import Account
from backhaul_server.worker.audit import AuditLog
from backhaul_server.worker.engine.segment import SessionState
from backhaul_server.worker.engine.worker import Worker
from backhaul_server.worker.limits import MOST_FIELDS, check_fields, check_size
from backhaul_server.worker.rpc.access import caller
from backhaul_server.worker.rpc.meter import RpcMeter

logger = logging.getLogger("backhaul.worker")

_MAX_ERROR_CHARACTERS = 500

_MAX_DETAILS = 1_000
_UNPRINTABLE = re.compile(r"[^ -~]")
"""Characters that take up to nine bytes of metadata each, of which gRPC accepts 16 KiB in all."""

Context = grpc.aio.ServicerContext[Any, Any]
M = TypeVar("M", bound=Message)
Unary = Callable[[Any, Any, Context], Awaitable[M | bytes]]


def answered_error(error: Exception) -> BackhaulError:
    """Returns the error that a trainer is answered with. It no longer refers to the frames of the request."""
    error.__traceback__ = error.__context__ = error.__cause__ = None
    if isinstance(error, BackhaulError):
        return error
    return WorkerError(f"the worker failed: {type(error).__name__}: {error}")


async def _abort(context: Context, error: Exception) -> None:
    """Ends a call with the status of an error, and with metadata from which the client raises the error again.

    gRPC keeps the error that this raises, which refers to the given one. So that may not refer to the request's frames.
    """
    error = answered_error(error)
    status = next((STATUS_NAMES[kind] for kind in type(error).__mro__ if kind in STATUS_NAMES), "INTERNAL")
    context.set_trailing_metadata(((ERROR_METADATA_KEY, error.to_bytes()),))
    await context.abort(grpc.StatusCode[status], _UNPRINTABLE.sub("?", error.message[:_MAX_DETAILS]))


def unary(method: Unary[M]) -> Unary[M]:
    """Decorates an RPC with one answer: counts its calls, and maps its errors to statuses."""

    @wraps(method)
    async def call(self: "Servicer", request: Any, context: Context) -> M | bytes:
        started, failed = perf_counter(), False
        try:
            return await method(self, accepted(request), context)
        except Exception as error:  # every error has a status, bugs of the worker too
            failed = True
            self.failed(request, error, context)
            await _abort(context, error)
            raise
        finally:
            self.meter.call(method.__name__, perf_counter() - started, failed=failed)

    return call


def exchange(method: Callable[[Any, Any, Context], Awaitable[None]]) -> Callable[[Any, Any, Context], Awaitable[None]]:
    """Decorates an RPC that writes its answers itself, and counts its requests: maps its errors to statuses."""

    @wraps(method)
    async def call(self: "Servicer", requests: Any, context: Context) -> None:
        try:
            await method(self, requests, context)
        except Exception as error:  # every error has a status, bugs of the worker too
            self.failed(None, error, context)
            await _abort(context, error)

    return call


class Servicer:
    """The base of all servicers. Event loop only.

    Args:
        worker: The state of the worker, which decides about each request.
        meter: Counts calls and bytes.
        audit: Gets an entry for each request that is denied.
    """

    def __init__(self, worker: Worker, meter: RpcMeter, audit: AuditLog) -> None:
        self.worker = worker
        self.meter = meter
        self.audit = audit

    @property
    def account(self) -> Account:
        """The account of the credential that the present request shows."""
        known = caller()
        return self.worker.anyone if known is None else known.account

    def session(self, session_id: str) -> SessionState:
        """Returns the session of that id, and renews its lease.

        Raises:
            CredentialError: Another credential has opened the session.
            SessionUnknownError: There is no such session.
        """
        present = self.worker.sessions.get(session_id)
        if present is not None and present.account is not self.account:
            raise CredentialError("the session was opened with another credential than the one that the request shows")
        return self.worker.session(session_id)

    def failed(self, request: Any, error: Exception, context: Context, session_id: str = "") -> None:
        """Logs the error of a request, and notes it in the telemetry of the worker and of the session.

        Args:
            request: The request; None for one that could not be read.
            error: The error that ended the request.
            context: The context of the call.
            session_id: The id of the session, if the request itself does not name it.
        """
        if isinstance(error, CredentialError):
            name = "Exchange" if request is None else type(getattr(request, "message", request)).__name__
            self.audit.denied(context, name, error.message, self.account.name)
        text = f"{type(error).__name__}: {error}"[:MAX_MESSAGE]
        is_cut_off = isinstance(error, grpc.aio.BaseError)  # the connection broke, or the server is stopping
        shown = error.message if isinstance(error, BackhaulError) else text
        if is_cut_off:
            shown = "the connection broke, or the worker was stopped, before the request had ended"
        if (not isinstance(error, BackhaulError) and not is_cut_off) or type(error) is WorkerError:
            self.worker.last_error = shown[:MAX_MESSAGE], time()
        request = getattr(request, "message", request)
        key = getattr(request, "key", request)
        session = self.worker.sessions.get(session_id or getattr(key, "session", ""))
        extra = {}
        if session is not None and session.account is self.account:
            session.last_error = shown[:_MAX_ERROR_CHARACTERS]
            segment = session.segments.get(getattr(key, "segment", 0))
            extra = about(session.run, segment.name if segment else getattr(request, "name", ""))
        if isinstance(error, BackhaulError):
            logger.debug("A request was refused: %s", text, extra=extra)
        elif is_cut_off:
            logger.info("A request was cut off: %s", text, extra=extra)
        else:
            logger.error("A request failed.", exc_info=error, extra=extra)


_MAKERS: Mapping[tuple[bool, bool], Any] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
"""GRPC's constructors of handlers, by whether requests and answers are streams."""


def handler_of(method: MethodDescriptor, servicer: Servicer) -> Any:
    """Returns a method's handler, like those of the generated stubs, but with `splicing` as the codec, and counted.

    A request that is refused reaches the servicer as the error that says why, see NOTE [Seal]. `unary`
    raises that error. A method with a stream of requests calls `accepted` on each of them.
    """
    kind, meter = GetMessageClass(method.input_type), servicer.meter
    read = deserializer(kind, MOST_FIELDS)

    def received(data: bytes) -> Any:
        meter.received(len(data))
        try:
            check_size(kind, data)
            request = read(data)
            if not isinstance(request, BackhaulError):
                check_fields(getattr(request, "message", request), len(data))
        except LimitError as error:
            return error.with_traceback(None)  # a traceback would keep the message alive
        return request

    def sent(message: Message | bytes) -> bytes:
        data = serialize(message)
        meter.sent(len(data))
        return data

    make = _MAKERS[method.client_streaming, method.server_streaming]
    return make(getattr(servicer, method.name), request_deserializer=received, response_serializer=sent)

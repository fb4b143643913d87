"""Calls with one answer, within the deadlines of NOTE [Bounds]."""

import threading
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import Message

from backhaul._worker_client.connection.deadlines import LONGEST_S, Liveness
from backhaul._worker_client.connection.grpc_errors import (
    closed_error,
    damaged_error,
    error_of,
    is_damage,
    unsent_error,
)
from backhaul_runtime.errors import TransferError, WorkerLostError

_CLOSE_S = 2.0


class AuthenticatedMethod:
    """A method of a stub that sends a credential with each call.

    It wraps the method itself, because an interceptor adds 40 us to a call of 600 us, and hides an error that occurs
    when the call begins.
    """

    def __init__(self, method: Any, metadata: tuple[tuple[str, str], ...]) -> None:
        self._method = method
        self._metadata = metadata

    def __call__(self, request: Any, **options: Any) -> Any:
        return self._method(request, metadata=self._metadata, **options)

    def future(self, request: Any, **options: Any) -> Any:
        """Starts the call without waiting, as the method of the stub does."""
        return self._method.future(request, metadata=self._metadata, **options)


def close_channel(channel: grpc.Channel) -> None:
    """Closes a channel without waiting for a stopped worker. gRPC would wait for the message that it is writing."""
    closing = threading.Thread(target=channel.close, name="backhaul-close", daemon=True)
    closing.start()
    closing.join(_CLOSE_S)


def call_unary(
    method: Any,
    request: Any,
    silence_s: float,
    watch: Liveness | None = None,
    *,
    wait_for_ready: bool = False,
    check: Callable[[], object] = lambda: None,
) -> Any:
    """Calls a method with one answer, and waits within the deadlines of NOTE [Bounds]. Returns the answer.

    Args:
        method: A method of a stub.
        request: A message, or an iterator of messages whose progress counts as a sign of life.
        silence_s: The longest silence in seconds, see NOTE [Bounds].
        watch: The signs of life of a stream of messages.
        wait_for_ready: Whether to wait for the connection instead of failing at once.
        check: Called every SLICE_S seconds during the wait. An error that it raises ends the call.
    """
    try:
        return _called(method, request, silence_s, watch, wait_for_ready, check)
    except (TransferError, WorkerLostError) as error:
        if not isinstance(request, Message) or not is_damage(error):
            raise
    return _called(method, request, silence_s, watch, wait_for_ready, check)


def _called(
    method: Any,
    request: Any,
    silence_s: float,
    watch: Liveness | None,
    wait_for_ready: bool,
    check: Callable[[], object],
) -> Any:
    try:
        future = method.future(request, timeout=LONGEST_S, wait_for_ready=wait_for_ready)
    except ValueError:
        raise closed_error() from None
    except grpc.RpcError as error:
        raise unsent_error(error) from None
    try:
        answer = (watch or Liveness(silence_s)).wait(future, check)
    except grpc.RpcError as error:
        raise error_of(error) from None
    except grpc.FutureCancelledError:
        raise closed_error() from None
    finally:
        future.cancel()  # cancels the call after silence or Ctrl-C; has no effect on a finished call
    if isinstance(answer, TransferError):
        raise damaged_error(answer)
    return answer

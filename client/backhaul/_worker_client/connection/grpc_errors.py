"""The errors of calls: what the worker raised, and what gRPC itself or a damaged message means for a segment."""

import grpc

from backhaul_runtime.errors import (
    ERROR_METADATA_KEY,
    BackhaulError,
    LimitError,
    TransferError,
    WorkerError,
    WorkerLostError,
    from_bytes,
)


def forget_stack(error: Exception) -> None:
    """Lets go of the stack of an error of gRPC.

    gRPC raises the call itself, to which the stack refers. So the stack would live until Python collects cycles, and
    with it the trainer's segments and tensors.
    """
    error.__traceback__ = None


def error_of(error: grpc.RpcError) -> BackhaulError:
    """Returns the error that the worker raised, or WorkerLostError if gRPC itself failed."""
    forget_stack(error)
    metadata: dict[str, str | bytes] = dict(error.trailing_metadata() or ()) if isinstance(error, grpc.Call) else {}
    detail = metadata.get(ERROR_METADATA_KEY)
    if isinstance(detail, bytes) and (decoded := from_bytes(detail)) is not None:
        return decoded
    code = error.code() if isinstance(error, grpc.Call) else None
    details = error.details() if isinstance(error, grpc.Call) else str(error)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return WorkerError(f"the server is not a Backhaul worker, or has another version: {details}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:  # from gRPC itself, on either side; the worker is well
        return LimitError(f"a message is larger than the worker accepts: {details}", limit="bytes of a message")
    status = code.name if code else ""
    return WorkerLostError("the worker is gone", status=status, details=details)


def unsent_error(error: grpc.RpcError) -> WorkerError:
    """Returns the error of a call that gRPC has not begun, because the request can't be encoded. The worker is well."""
    forget_stack(error)
    return WorkerError(f"a request could not be sent: {error.details() if isinstance(error, grpc.Call) else error}")


def closed_error() -> WorkerLostError:
    """Returns the error of a call whose channel was closed. gRPC itself raises ValueError then."""
    return WorkerLostError("the connection was closed", status="CANCELLED")


def damaged_error(refused: TransferError) -> WorkerLostError:
    """Returns the error of an answer that the deserializer rejected, see NOTE [Bounds], Rule 3."""
    return WorkerLostError(f"an answer of the worker was damaged: {refused.message}", status="DAMAGED")


def is_damage(error: BackhaulError) -> bool:
    """Whether a request or its answer was damaged in transit, see NOTE [Bounds], Rule 3."""
    return isinstance(error, TransferError) or (isinstance(error, WorkerLostError) and error.status == "DAMAGED")

"""Every error Backhaul raises, and how each travels over gRPC.

    BackhaulError
    ├── AddressError              (ValueError) an address that can't be parsed
    ├── SettingError              (ValueError) a setting with a value that is not allowed
    ├── ConnectError              (ConnectionError) connect() got no answer from a worker at an address
    ├── ProtocolVersionError      trainer and worker speak different versions
    ├── NotRemoteError            under strict: a segment would have been recomputed on the trainer
    ├── UnsupportedTensorError    a kind of tensor that has no bytes to send
    ├── StaleTensorError          (RuntimeError) a captured tensor changed between forward and backward
    ├── AccumulationError         (RuntimeError) an accumulation block was used in a wrong way
    ├── SavedTensorModifiedError  (RuntimeError) an argument, or a tensor that backward needs, was written to
    ├── ValueCheckError           (RuntimeError) a recomputation gave other values than forward
    ├── SegmentLostError          (RuntimeError) a worker was lost, and the trainer lacks inputs to recompute from
    ├── RecheckError              (RuntimeError) a worker's gradient was wrong, and others of it have counted
    ├── SessionClosedError        there is no open session
    ├── WorkerLostError           the worker did not answer: the connection broke, or it timed out
    └── WorkerError               the worker refused a request, or failed
        ├── BudgetError           the worker's memory budget has no room
        ├── CompilingError        the worker still compiles the program
        ├── CredentialError       the request has no valid token, or names the session of another credential
        ├── DrainingError         the worker is shutting down and accepts no new work
        ├── LimitError            a request, or a trainer's total on the worker, exceeds a fixed limit
        ├── ProgramError          (ValueError) a program that is malformed or not allowed
        ├── ReplayError           an op of a program failed while it ran
        ├── SessionUnknownError   the worker does not know the session, or its lease has expired
        ├── SegmentUnknownError   the worker does not know the segment, or has released it
        ├── TensorsMissingError   a request names tensors that the worker does not hold
        └── TransferError         a message contradicts its checksum, its declarations or its request

The message says what happened, with the values, and what to do. Fields are attributes, and errors pickle.
This module imports neither torch nor gRPC: the table at its end holds the names of gRPC statuses.
"""

import json
import logging
import re
import traceback
from collections.abc import Mapping
from typing import Any, Self

from backhaul_runtime.sealing import SEAL_BYTES, is_sealed, sealed

logger = logging.getLogger("backhaul")

__all__ = [
    "AccumulationError",
    "AddressError",
    "BackhaulError",
    "BudgetError",
    "CompilingError",
    "ConnectError",
    "CredentialError",
    "DrainingError",
    "LimitError",
    "NotRemoteError",
    "ProgramError",
    "ProtocolVersionError",
    "RecheckError",
    "ReplayError",
    "SavedTensorModifiedError",
    "SegmentLostError",
    "SegmentUnknownError",
    "SessionClosedError",
    "SessionUnknownError",
    "SettingError",
    "StaleTensorError",
    "TensorsMissingError",
    "TransferError",
    "UnsupportedTensorError",
    "ValueCheckError",
    "WorkerError",
    "WorkerLostError",
]


MAX_MESSAGE = 2_000
"""Characters of an error's message that a worker sends. gRPC rejects metadata of more than 16 KiB."""

_MAX_DETAIL_BYTES = 8 << 10


class BackhaulError(Exception):
    """The root of all errors that Backhaul raises.

    Args:
        message: What happened, with the values, and what to do.
        fields: JSON values, each of which becomes an attribute of the error.
    """

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields
        self.__dict__.update(fields)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.fields)

    def to_bytes(self) -> bytes:
        """Encodes the error for gRPC's trailing metadata, with the seal that all messages have.

        Long messages are cut to `MAX_MESSAGE` characters.
        """
        kind, message = type(self).__name__, self.message[:MAX_MESSAGE]
        detail = json.dumps({"kind": kind, "message": message, "fields": self.fields}).encode()
        # JSON escapes a character that is not ASCII to six bytes or more, and a message may quote a name that the
        # client chose. gRPC would reject such metadata, and the trainer would not learn the class of the error.
        if len(detail) > _MAX_DETAIL_BYTES:
            short = re.sub(r"[^ -~]", "?", message)
            detail = json.dumps({"kind": kind, "message": short, "fields": {}}).encode()
        return sealed([detail])


def _rebuild(kind: type[BackhaulError], message: str, fields: Mapping[str, Any]) -> BackhaulError:
    return kind(message, **fields)


class AddressError(BackhaulError, ValueError):
    """An address that can't be parsed."""


class SettingError(BackhaulError, ValueError):
    """A setting, given as an argument or in the environment, has a value that is not allowed."""


class ConnectError(BackhaulError, ConnectionError):
    """connect() got no answer from a worker at an address."""


class ProtocolVersionError(BackhaulError):
    """Trainer and worker use different versions of the protocol."""


class NotRemoteError(BackhaulError):
    """Under `strict`, a segment would have been recomputed on the trainer, or its activations kept there."""

    segment: str = ""
    reason: str = ""


class UnsupportedTensorError(BackhaulError):
    """A tensor has no bytes that could be sent: a subclass, sparse, quantized, without storage, or freed."""


class StaleTensorError(BackhaulError, RuntimeError):
    """A captured tensor changed between forward and backward, and no worker holds its earlier value."""


class AccumulationError(BackhaulError, RuntimeError):
    """An accumulation block, see `Session.accumulate`, was used in a way that would give wrong gradients."""


class SavedTensorModifiedError(BackhaulError, RuntimeError):
    """An argument of a segment, or a tensor that its function's own backward needs, was written to in place."""


class ValueCheckError(BackhaulError, RuntimeError):
    """A recomputation gave other values than forward. Users see its subclass `backhaul.CheckpointError`."""


class SegmentLostError(BackhaulError, RuntimeError):
    """A segment's worker was lost, and the trainer no longer has the inputs to recompute it from."""

    session: str = ""
    segment: str = ""
    site: str = ""


class RecheckError(BackhaulError, RuntimeError):
    """A worker was wrong and other gradients of it have counted, or the trainer can't repeat its own gradients."""

    worker: str = ""
    segment: str = ""


class SessionClosedError(BackhaulError):
    """There is no open session: connect() was not called, or the session was closed."""


class WorkerLostError(BackhaulError):
    """A worker did not answer: the connection broke, or the trainer stopped waiting.

    `status` is the name of a gRPC status, with its `details`. It is SILENT, SLOW, BUSY, LOST or DOWN if the trainer
    itself gave up, and DAMAGED if an answer did not match its checksum.
    """

    status: str = ""
    details: str = ""


class WorkerError(BackhaulError):
    """A worker refused a request, or failed while it served one."""


class BudgetError(WorkerError):
    """The worker's memory budget has no room. `retry_after_s` is 0 if a retry can't succeed."""

    needed_bytes: int = 0
    budget_bytes: int = 0
    retry_after_s: float = 0.0


class CompilingError(WorkerError):
    """The worker still compiles the program, which will take about `expected_s` seconds more."""

    expected_s: float = 0.0


class CredentialError(WorkerError):
    """The request has no valid token although the worker requires one, or names the session of another credential."""


class DrainingError(WorkerError):
    """The worker is shutting down and accepts no new work."""


class LimitError(WorkerError):
    """A request, or a trainer's total on the worker, exceeds a fixed limit.

    `limit` is the limit's name, `most` is its value, and `found` is the value that exceeded it.
    """

    limit: str = ""
    most: int = 0
    found: int = 0


class ProgramError(WorkerError, ValueError):
    """A program that is malformed or not allowed."""


class ReplayError(WorkerError):
    """An op of a program failed while it ran."""


class SessionUnknownError(WorkerError):
    """The worker does not know the session, or the session's lease has expired."""


class SegmentUnknownError(WorkerError):
    """The worker does not know the segment, or has released it."""


class TensorsMissingError(WorkerError):
    """A request names tensors that the worker does not hold."""


class TransferError(WorkerError):
    """A message or a tensor contradicts its checksum, its declaration, or the request that it answers."""


# All errors that a worker answers with, and the name of the gRPC status of each. Any other exception is a bug of the
# worker, which sends it as INTERNAL.
STATUS_NAMES: Mapping[type[BackhaulError], str] = {
    BudgetError: "RESOURCE_EXHAUSTED",
    CompilingError: "UNAVAILABLE",
    CredentialError: "UNAUTHENTICATED",
    DrainingError: "UNAVAILABLE",
    LimitError: "RESOURCE_EXHAUSTED",
    ProgramError: "INVALID_ARGUMENT",
    ProtocolVersionError: "FAILED_PRECONDITION",
    ReplayError: "ABORTED",
    SavedTensorModifiedError: "FAILED_PRECONDITION",
    SegmentUnknownError: "NOT_FOUND",
    SessionUnknownError: "UNAUTHENTICATED",
    TensorsMissingError: "NOT_FOUND",
    TransferError: "DATA_LOSS",
    UnsupportedTensorError: "INVALID_ARGUMENT",
    WorkerError: "INTERNAL",
}
ERROR_METADATA_KEY = "backhaul-error-bin"
_BY_NAME = {kind.__name__: kind for kind in STATUS_NAMES}


def from_bytes(detail: bytes) -> BackhaulError | None:
    """Decodes an error that a worker sent. Returns None for bytes that are no error.

    The class comes from `STATUS_NAMES`, so a worker can't make the trainer construct any other class.
    """
    if not is_sealed(detail):
        return None
    try:
        fields = json.loads(detail[:-SEAL_BYTES])
        return _BY_NAME[fields["kind"]](str(fields["message"]), **fields["fields"])
    except (ValueError, KeyError, TypeError):
        return None


class Refusal(Exception):  # noqa: N818  a decision, never seen outside
    """Why a call can't be recorded as a program. Raised and caught internally; users never see it.

    Attributes:
        reason: The reason, for the log and the report.
        is_said: Whether the reason has already been logged.
        is_chosen: Whether the trainer computes the call by choice. Otherwise it counts as a fallback.
        cause: The unexpected exception behind it, without its traceback, which would keep tensors alive; else None.
    """

    def __init__(self, reason: str, *, is_said: bool = False, is_chosen: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_said = is_said
        self.is_chosen = is_chosen
        self.cause: Exception | None = None

    @classmethod
    def of(cls, error: Exception) -> Self:
        """Returns a refusal for an exception of Backhaul's own code, so that it does not reach the user's forward.

        Logs the traceback of an unexpected exception the first time that one is raised at its place.
        """
        if isinstance(error, cls):
            return error
        log_once(error)
        refusal = cls(f"recording failed: {type(error).__name__}: {error}")
        refusal.cause = error.with_traceback(None)
        return refusal


_MOST_LOGGED = 1000
_logged: set[tuple[type, str, int]] = set()


def log_once(
    error: Exception, meaning: str = "Training continues without a worker for this call. Please report it."
) -> None:
    """Logs the traceback of an unexpected exception, unless one of its type was logged for the same line before.

    Args:
        error: The exception, with its traceback.
        meaning: What follows from it, for people.
    """
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    key = type(error), last.tb_frame.f_code.co_filename if last else "", last.tb_lineno if last else 0
    if key not in _logged and len(_logged) < _MOST_LOGGED:
        _logged.add(key)
        # As text, because a handler may keep the record, and a traceback leads to tensors.
        text = "".join(traceback.format_exception(error))
        logger.error("An error inside Backhaul. %s\n%s", meaning, text)

"""Every error Backhaul raises, and how each travels over gRPC.

    BackhaulError
    ├── AddressError              (ValueError) an address that can't be read
    ├── SettingError              (ValueError) a setting with a value it can't have
    ├── ConnectError              (ConnectionError) connect() found nobody at an address
    ├── ProtocolVersionError      trainer and worker speak different versions
    ├── NotRemoteError            strict: a segment would have run on the trainer
    ├── UnsupportedTensorError    a kind of tensor that has no bytes to send
    ├── StaleTensorError          (RuntimeError) a captured tensor changed between forward and backward
    ├── GradientsLostError        (RuntimeError) a worker is gone with gradients that were not collected
    ├── SavedTensorModifiedError  (RuntimeError) an argument, or what fn's own backward needs, was written to
    ├── ValueCheckError           (RuntimeError) a recomputation gave other values than forward
    ├── SegmentLostError          (RuntimeError) a worker is gone, and so is what the trainer would recompute from
    ├── SessionClosedError        there is no session to work with
    ├── WorkerLostError           no answer: the connection broke or the worker fell silent
    └── WorkerError               an answer that refuses
        ├── BudgetError           its memory budget has no room
        ├── CredentialError       it wants a token that was not shown, or another one
        ├── DrainingError         it is shutting down and takes nothing new
        ├── LimitError            a request, or all that a trainer has there, goes beyond a fixed limit
        ├── ProgramError          (ValueError) a program that is malformed or not allowed
        ├── ReplayError           an op of a program failed while it ran
        ├── SessionUnknownError   the session never was, or its lease ran out
        ├── SegmentUnknownError   the segment never was, or was released
        ├── TensorsMissingError   tensors are named that the worker does not hold
        └── TransferError         a message that does not fit its checksum, its declarations or what it answers

The message says what happened, with which values, and what to do. Fields are attributes, and errors pickle.
This module knows neither torch nor gRPC: the table at its end holds status names.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Self

from backhaul_runtime.sealing import SEAL_BYTES, is_sealed, sealed

__all__ = [
    "AddressError",
    "BackhaulError",
    "BudgetError",
    "ConnectError",
    "CredentialError",
    "DrainingError",
    "GradientsLostError",
    "LimitError",
    "NotRemoteError",
    "ProgramError",
    "ProtocolVersionError",
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
"""Characters of a message that travel. gRPC refuses metadata of more than 16 KiB."""

_MAX_DETAIL_BYTES = 8 << 10


class BackhaulError(Exception):
    """Root of the tree. Keyword arguments become attributes; they must be JSON values."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields
        self.__dict__.update(fields)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.fields)

    def to_bytes(self) -> bytes:
        """The error as it travels in gRPC's trailing metadata, sealed as messages are."""
        kind, message = type(self).__name__, self.message[:MAX_MESSAGE]
        detail = json.dumps({"kind": kind, "message": message, "fields": self.fields}).encode()
        if len(detail) > _MAX_DETAIL_BYTES:  # JSON escapes what a client sent, such as a name, to six times its length
            short = re.sub(r"[^ -~]", "?", message)
            detail = json.dumps({"kind": kind, "message": short, "fields": {}}).encode()
        return sealed([detail])


def _rebuild(kind: type[BackhaulError], message: str, fields: Mapping[str, Any]) -> BackhaulError:
    return kind(message, **fields)


class AddressError(BackhaulError, ValueError):
    """An address that can't be read."""


class SettingError(BackhaulError, ValueError):
    """A setting, given as an argument or in the environment, has a value it can't have."""


class ConnectError(BackhaulError, ConnectionError):
    """connect() got no answer at an address."""


class ProtocolVersionError(BackhaulError):
    """Trainer and worker speak different versions of the wire."""


class NotRemoteError(BackhaulError):
    """Under `strict`, a segment would have run on the trainer."""

    segment: str = ""
    reason: str = ""


class UnsupportedTensorError(BackhaulError):
    """A kind of tensor that has no bytes to send: a subclass, sparse, quantized, without storage."""


class StaleTensorError(BackhaulError, RuntimeError):
    """A captured tensor changed between forward and backward, and its earlier value is nowhere to be had."""


class GradientsLostError(BackhaulError, RuntimeError):
    """A worker is gone with gradients that it kept under accumulate="worker" and nobody had collected."""

    workers: Sequence[str] = ()


class SavedTensorModifiedError(BackhaulError, RuntimeError):
    """An argument of a segment, or a tensor that its function's own backward needs, was written to in place."""


class ValueCheckError(BackhaulError, RuntimeError):
    """A recomputation gave other values than forward. `backhaul.CheckpointError` is its public name."""


class SegmentLostError(BackhaulError, RuntimeError):
    """A segment's worker is gone, and so is what the trainer would recompute it from."""

    session: str = ""
    segment: str = ""
    site: str = ""


class SessionClosedError(BackhaulError):
    """There is no session to work with: connect() was not called, or the session is closed."""


class WorkerLostError(BackhaulError):
    """No answer: the connection broke or the worker fell silent.

    `status` is gRPC's, with its `details`, or SILENT, SLOW, BUSY, LOST or DOWN where we gave up ourselves, or DAMAGED
    where an answer did not fit its checksum.
    """

    status: str = ""
    details: str = ""


class WorkerError(BackhaulError):
    """An answer that refuses."""


class BudgetError(WorkerError):
    """The worker's memory budget has no room. `retry_after_s` is 0 where waiting can't help."""

    needed_bytes: int = 0
    budget_bytes: int = 0
    retry_after_s: float = 0.0


class CredentialError(WorkerError):
    """The worker wants a token that the request did not show, or another one."""


class DrainingError(WorkerError):
    """The worker is shutting down and takes nothing new."""


class LimitError(WorkerError):
    """A request, or all that a trainer has on the worker, goes beyond a fixed limit.

    `limit` names it, `most` is its value and `found` what was met.
    """

    limit: str = ""
    most: int = 0
    found: int = 0


class ProgramError(WorkerError, ValueError):
    """A program that is malformed or not allowed."""


class ReplayError(WorkerError):
    """An op of a program failed while it ran."""


class SessionUnknownError(WorkerError):
    """The session never was, or its lease ran out."""


class SegmentUnknownError(WorkerError):
    """The segment never was, or was released."""


class TensorsMissingError(WorkerError):
    """Tensors are named that the worker does not hold."""


class TransferError(WorkerError):
    """A message, or a tensor, that does not fit its checksum, its declaration or what it was to answer."""


# Every error that a worker answers with, and the name of its gRPC status. Errors that are not here are bugs of the
# worker and travel as INTERNAL.
STATUS_NAMES: Mapping[type[BackhaulError], str] = {
    BudgetError: "RESOURCE_EXHAUSTED",
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
    """The error a worker sent, or None where the bytes are not one. Only names of the table are looked up."""
    if not is_sealed(detail):
        return None
    try:
        fields = json.loads(detail[:-SEAL_BYTES])
        return _BY_NAME[fields["kind"]](str(fields["message"]), **fields["fields"])
    except (ValueError, KeyError, TypeError):
        return None


class Refusal(Exception):  # noqa: N818  a decision, never seen outside
    """Why a call can't be a program. Raised and caught inside the recorder and the session, never seen by users."""

    def __init__(self, reason: str, *, is_said: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_said = is_said  # in the log already

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """A refusal for an error that recording ran into: fn must not suffer from it."""
        if isinstance(error, cls):
            return error
        return cls(f"recording failed: {type(error).__name__}: {error}")

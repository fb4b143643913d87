"""Limits on the requests of a client: sizes, counts and lengths, each with its reason. docs/limits.md lists them.

NOTE [Limits]
1. The budget bounds memory: what a client makes the worker keep is charged to its session, with a constant for each
   object (see NOTE [Room] of the store). Limits bound what the budget can't: the work that one message causes in the
   event loop, where all other calls wait, and things without bytes of their own, such as streams.
2. A request is checked in this order: its size and its number of fields, before protobuf parses it; the lengths of its
   lists and names, before a method sees it; then what depends on the worker's state.
3. A request beyond a limit fails with a LimitError that names the limit. The trainer then recomputes the segment.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from google.protobuf.message import Message

from backhaul_proto.v1 import program_pb2, segment_pb2, session_pb2, telemetry_pb2, tensor_pb2
from backhaul_runtime.errors import LimitError
from backhaul_runtime.program.codec import MAX_SOURCES
from backhaul_runtime.wire.protocol import MAX_MESSAGE_BYTES, MAX_NAME
from backhaul_runtime.wire.telemetry import MAX_SPANS


@dataclass(frozen=True, slots=True)
class Limit:
    """An upper bound on one count, with its reason.

    Attributes:
        what: The things that are counted, in words.
        most: The largest number of them that is allowed.
        why: The reason for this number.
    """

    what: str
    most: int
    why: str

    def check(self, count: int) -> None:
        """Raises LimitError if the count is above the limit."""
        if count > self.most:
            raise LimitError(
                f"{count} {self.what} exceed the worker's limit of {self.most}",
                limit=self.what,
                most=self.most,
                found=count,
            )


SESSIONS = Limit("sessions on a worker", 1_024, "32 trainers that reconnect 30 times within a lease")
SEGMENTS = Limit("segments of a session", 4_096, "48 layers of 80 micro-batches")
NAMED = Limit(
    "sources of the segments of a session", 1 << 19, "128 for each of its segments; to release so many takes 300 ms"
)
ALL_SEGMENTS = Limit("segments on a worker", 32_768, "deciding what to replay next takes 20 ms for so many")
REQUESTS = Limit("unanswered requests of a session", 16, "a trainer has one for each thread that runs backward")
ALL_REQUESTS = Limit(
    "unanswered requests on a worker", 512, "32 trainers with 16 each; each is told its place in the queue"
)
ANSWERS = Limit("answers that are being sent to a session", 16, "each holds two messages of 1 MiB in gRPC's buffers")
STREAMS = Limit(
    "open streams of a session",
    40,
    "a trainer has one, one per upload and large answer, and as many again after a break",
)
ALL_STREAMS = Limit("open streams on a worker", 512, "each may hold a message of 1 MiB in gRPC's buffers")
IN_FLIGHT = Limit(
    "requests of a stream that run at once", 32, "a trainer has one for each of its threads; no more are read meanwhile"
)
UNNAMED_STREAMS = Limit("open streams that have named no session yet", 64, "a trainer opens one with its first request")
UPLOADED = Limit(
    "tensors of an upload",
    MAX_SOURCES,
    "a trainer sends the sources of one segment; the event loop stores all of them at once",
)
LOOKS = Limit(
    "unread answers with telemetry on a connection", 4, "a dashboard waits for one before it asks for the next"
)
ALL_LOOKS = Limit("unread answers with telemetry", 128, "each may hold 256 KiB in gRPC's buffers")
WATCHES = Limit("open health watches", 256, "they need no token; a load balancer has one")
COMPILATIONS = Limit("programs of a credential that wait to be compiled", 16, "they are compiled one after another")
SHARED_ANSWERS = Limit("answers in shared memory that a trainer has not ended", 256, "a trainer has one per request")

_NAME = Limit("characters of a name", MAX_NAME, "names are for people")
_ID = Limit("characters of a run, session or version", 128, "those of Backhaul have 32")
_SOURCES = Limit(
    "sources of a segment", MAX_SOURCES, "the event loop looks at each when the segment is saved: 80 ms for so many"
)
_OUTPUTS = Limit("gradients that a backward starts from", MAX_SOURCES, "as for sources")
_POSITIONS = Limit("saved tensors asked for at once", 8_192, "the answer describes each")
_STATES = Limit("generator states of a segment", 4_096, "each has 5 KiB, so a message has room for fewer")
_STATE = Limit("bytes of a generator state", 16 << 10, "the largest of torch has 5 KiB")
_SUPERSEDED = Limit("superseded tensors in a request", MAX_SOURCES, "as for sources")
_UPCOMING = Limit("upcoming segments in a request", 64, "a trainer names one, or 32 in an accumulation block")
_KEYS = Limit("segments released at once", 1_024, "a trainer releases 16 at once")
_COMMITS = Limit("commits in a request", 4_096, "a trainer repeats those that were not acknowledged")
_FETCHED = Limit("tensors fetched at once", 256, "a trainer fetches one")
_STEPS = Limit("steps in a report", 1_024, "a trainer keeps no more until they are sent")
_CALLS = Limit("calls in a report", 1_024, "a trainer sends 200")
_SPANS = Limit("spans of a call in a report", MAX_SPANS, "a call has seven, more if its graph is run backward again")
_PROPERTIES = Limit("settings in a report", 256, "a run has about fifty")

_SMALL, _LISTS, _REPORT, _TENSORS = 4 << 10, 1 << 20, 512 << 10, 2 << 20
"""Bytes of requests with a few names, with lists of numbers and addresses, with reports, and with tensors."""


MOST_FIELDS = 16_384
"""Fields of a large request, with those of its nested messages. Counting them takes 30 ms. Trainers send hundreds."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of one kind of request.

    Attributes:
        most_bytes: Bytes of the whole message. Protobuf takes up to 60 ms to parse a MiB.
        fields: By path of a field, the limit of the length of a list, a text or bytes. A path may lead through lists,
            to the field of each item.
    """

    most_bytes: int
    fields: Mapping[str, Limit] = field(default_factory=dict)


REQUESTS_BY_KIND: Mapping[type[Message], RequestLimits] = {
    session_pb2.OpenSessionRequest: RequestLimits(_SMALL, {"trainer": _NAME, "run": _ID, "client_version": _ID}),
    session_pb2.KeepSessionRequest: RequestLimits(_SMALL),
    session_pb2.CloseSessionRequest: RequestLimits(_SMALL),
    program_pb2.PutProgramRequest: RequestLimits(MAX_MESSAGE_BYTES),
    tensor_pb2.PutTensorsRequest: RequestLimits(_TENSORS),
    segment_pb2.Request: RequestLimits(MAX_MESSAGE_BYTES),
    segment_pb2.SaveRequest: RequestLimits(
        MAX_MESSAGE_BYTES,
        {
            "sources": _SOURCES,
            "transient_sources": _SOURCES,
            "generator_states": _STATES,
            "generator_states.": _STATE,
            "name": _NAME,
            "program": _ID,
            "predecessors": _SOURCES,
            "superseded": _SUPERSEDED,
        },
    ),
    segment_pb2.RecomputeRequest: RequestLimits(_LISTS, {"positions": _POSITIONS, "upcoming_segments": _UPCOMING}),
    segment_pb2.BackwardRequest: RequestLimits(
        _TENSORS,
        {
            "start.gradients": _OUTPUTS,
            "start.summed_sources": _SOURCES,
            "upcoming_segments": _UPCOMING,
            "slots": _SOURCES,
            "unsent_sources": _SOURCES,
        },
    ),
    segment_pb2.ReleaseRequest: RequestLimits(_LISTS, {"keys": _KEYS, "commits.backwards": _COMMITS}),
    segment_pb2.CollectGradientsRequest: RequestLimits(_LISTS, {"commits.backwards": _COMMITS}),
    segment_pb2.FetchSourcesRequest: RequestLimits(_LISTS, {"addresses": _FETCHED}),
    telemetry_pb2.GetTelemetryRequest: RequestLimits(_SMALL),
    telemetry_pb2.PutReportsRequest: RequestLimits(
        _REPORT,
        {
            "report.steps": _STEPS,
            "report.calls": _CALLS,
            "report.calls.spans": _SPANS,
            "report.run.settings": _PROPERTIES,
            "report.run.fingerprint": _PROPERTIES,
            "report.run.workers": _PROPERTIES,
        },
    ),
}
"""The limits of every kind of request, which a test checks for completeness. `splicing` limits a request's tensors.

A request of an exchange has its own limits and those of what it asks for."""


def check_size(kind: type[Message], data: bytes) -> None:
    """Raises LimitError for a request that is too large for its kind. Call it before parsing."""
    _check_bytes(kind, len(data))


def _check_bytes(kind: type[Message], size_bytes: int) -> None:
    most = REQUESTS_BY_KIND[kind].most_bytes
    if size_bytes > most:
        what = f"bytes of a {kind.DESCRIPTOR.name}"
        message = f"{size_bytes} {what} exceed the worker's limit of {most}"
        raise LimitError(message, limit=what, most=most, found=size_bytes)


def check_fields(message: Message, size_bytes: int = 0) -> None:
    """Raises LimitError for a request with a list or a name that is too long.

    Args:
        message: A request that was parsed.
        size_bytes: The size of the whole message, for the limits of what a request of an exchange asks for.
    """
    if isinstance(message, segment_pb2.Request):
        kind = message.WhichOneof("request")
        if kind is not None:
            asked = getattr(message, kind)
            _check_bytes(type(asked), size_bytes)
            check_fields(asked)
    for path, limit in _PATHS[type(message)]:
        for length in _lengths(message, path):
            limit.check(length)


def _lengths(message: Any, path: tuple[str, ...]) -> Iterable[int]:
    """Returns the lengths of all fields at a path. An empty last name stands for each item of a list."""
    value = getattr(message, path[0])
    if len(path) == 1:
        return (len(value),)
    if path[1] == "":
        return map(len, value)
    if isinstance(value, Message):
        return _lengths(value, path[1:])
    return chain.from_iterable([_lengths(item, path[1:]) for item in value])


_PATHS = {
    kind: [(tuple(path.split(".")), limit) for path, limit in limits.fields.items()]
    for kind, limits in REQUESTS_BY_KIND.items()
}

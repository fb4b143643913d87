"""What a failed call means, in words for people instead of gRPC's."""

import grpc

_MEANINGS = {
    grpc.StatusCode.DEADLINE_EXCEEDED: "it did not answer in time",
    grpc.StatusCode.UNAUTHENTICATED: "it wants a token, or does not accept the one that it got",
    grpc.StatusCode.PERMISSION_DENIED: "it does not let the owner of this token read its telemetry",
    grpc.StatusCode.UNIMPLEMENTED: "what listens there is no Backhaul worker, or one of another version",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "it answers too many dashboards already, or its answer is too large",
    grpc.StatusCode.CANCELLED: "the connection was closed",
    grpc.StatusCode.DATA_LOSS: "its answer was damaged on the way",
    grpc.StatusCode.INTERNAL: "it failed while it made its answer",
}
_CAUSES = (
    ("parsing http/2", "what listens there does not speak gRPC, so it is no worker"),
    ("connection refused", "nothing listens at its address"),
    ("connection reset", "the connection broke"),
    ("broken pipe", "the connection broke"),
    ("socket closed", "the connection broke"),
    ("no route to host", "there is no route to its machine"),
    ("network is unreachable", "there is no route to its machine"),
    ("no such file", "its socket does not exist"),
    ("timed out", "its machine did not answer in time"),
    ("timeout", "its machine did not answer in time"),
    ("certificate", "their TLS certificates do not fit each other"),
    ("ssl", "one of the two speaks TLS and the other does not"),
    ("tls", "one of the two speaks TLS and the other does not"),
    ("name resolution", "its host name cannot be resolved"),
    ("dns", "its host name cannot be resolved"),
    ("name or service", "its host name cannot be resolved"),
)
"""Parts of gRPC's details of a call that did not reach the worker, the most specific first, with their meanings."""


def why_unanswered(code: grpc.StatusCode, details: str) -> str:
    """Returns why a worker did not answer, as the end of a sentence about the worker.

    Args:
        code: The status of the failed call.
        details: What gRPC or the worker says about it.
    """
    if code is grpc.StatusCode.UNAVAILABLE:
        return why_unreachable(details)
    return _MEANINGS.get(code) or f"its answer was an error: {details}"


def why_unreachable(details: str) -> str:
    """Returns why a connection failed, as the end of a sentence, from what gRPC or the operating system says."""
    said = details.casefold()
    return next((meaning for part, meaning in _CAUSES if part in said), "it cannot be reached")

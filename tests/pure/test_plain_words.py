"""Why a worker does not answer, in words for people."""

import grpc
import pytest

from backhaul_server.dashboard.collect.plain_words import why_unanswered


@pytest.mark.parametrize(
    ("code", "details", "meaning"),
    [
        ("UNAVAILABLE", "last error: UNKNOWN: ipv4:1.2.3.4:1: connect: Connection refused (111)", "nothing listens"),
        ("UNAVAILABLE", "DNS resolution failed for gpu:1: Domain name not found", "its host name cannot be resolved"),
        ("UNAVAILABLE", "Ssl handshake failed: SSL_ERROR_SSL: CERTIFICATE_VERIFY_FAILED", "certificates do not fit"),
        ("UNAVAILABLE", "Socket closed", "the connection broke"),
        ("UNAVAILABLE", "", "it cannot be reached"),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", "it did not answer in time"),
        ("UNAUTHENTICATED", "the request needs a token", "it wants a token, or does not accept the one that it got"),
        ("UNIMPLEMENTED", "Method not found!", "no Backhaul worker"),
        ("UNKNOWN", "it is on fire", "it is on fire"),
    ],
)
def test_failures_are_told_in_plain_words(code: str, details: str, meaning: str) -> None:
    said = why_unanswered(grpc.StatusCode[code], details)
    assert meaning in said
    assert code not in said

"""How often a worker is asked to take a program that it has refused."""

from itertools import pairwise

import pytest

from backhaul import CompilingError, ProgramError
from backhaul._worker_client.connection.worker_session import WorkerSession
from backhaul._worker_client.upload import refused_programs
from backhaul._worker_client.upload.refused_programs import RefusedPrograms


@pytest.mark.parametrize("error", [CompilingError("it compiles", expected_s=30.0), ProgramError("never")])
def test_the_pauses_grow_with_the_time_since_the_first_refusal(
    error: CompilingError | ProgramError, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, session, now_s, asked = RefusedPrograms(), WorkerSession.__new__(WorkerSession), 100.0, list[float]()
    monkeypatch.setattr(refused_programs, "monotonic", lambda: now_s)

    for _ in range(6_000):  # a call each hundredth of a second, for a minute
        try:
            refused.check(session, b"address")
        except type(error) as raised:
            assert raised.message == error.message
        else:
            asked.append(now_s)
            refused.note(session, b"address", error)
        now_s += 0.01

    pauses = [after - before for before, after in pairwise(asked)]
    assert pauses == sorted(pauses)
    assert pauses[0] >= refused_programs.LEAST_S
    assert len(asked) < 30


def test_another_session_is_asked_at_once() -> None:
    refused, sessions = RefusedPrograms(), [WorkerSession.__new__(WorkerSession) for _ in range(2)]
    refused.note(sessions[0], b"address", ProgramError("never"))
    with pytest.raises(ProgramError):
        refused.check(sessions[0], b"address")
    refused.check(sessions[0], b"another")
    refused.check(sessions[1], b"address")

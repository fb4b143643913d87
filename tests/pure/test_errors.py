import pickle

import grpc
import pytest

import backhaul
from backhaul_runtime import errors
from backhaul_runtime.errors import STATUS_NAMES, BackhaulError, WorkerError, from_bytes


def subclasses(kind: type[BackhaulError]) -> list[type[BackhaulError]]:
    return [kind, *(deeper for sub in kind.__subclasses__() for deeper in subclasses(sub))]


def test_what_a_worker_answers_with_has_a_status() -> None:
    assert set(subclasses(WorkerError)) <= set(STATUS_NAMES)
    assert all(name in grpc.StatusCode.__members__ for name in STATUS_NAMES.values())


@pytest.mark.parametrize("kind", STATUS_NAMES, ids=lambda kind: kind.__name__)
def test_an_error_survives_the_wire(kind: type[BackhaulError]) -> None:
    decoded = from_bytes(kind("what happened", needed_bytes=3).to_bytes())
    assert type(decoded) is kind
    assert (str(decoded), vars(decoded)["needed_bytes"]) == ("what happened", 3)


@pytest.mark.parametrize(
    "detail", [b"", b"{}", b'{"kind": "os.system", "message": "x", "fields": {}}', b"\xff", b"[1]"]
)
def test_other_bytes_are_no_error(detail: bytes) -> None:
    assert from_bytes(detail) is None


@pytest.mark.parametrize("kind", subclasses(BackhaulError), ids=lambda kind: kind.__name__)
def test_errors_pickle_and_are_public(kind: type[BackhaulError]) -> None:
    again = pickle.loads(pickle.dumps(kind("what happened", segment="block")))
    assert (type(again), str(again), again.segment) == (kind, "what happened", "block")
    assert kind.__name__ in backhaul.__all__


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    assert errors.__doc__ is not None
    for name in errors.__all__:
        assert name in errors.__doc__
    assert errors.__all__ == sorted(errors.__all__)

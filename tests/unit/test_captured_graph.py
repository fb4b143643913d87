"""What a captured graph remembers of its calls."""

import pytest
import torch

from backhaul._forward.captured_graph import CallKind, CapturedGraph, FirstProgram, Learned
from backhaul_runtime.errors import Refusal
from support.hostile import of_nodes


@pytest.fixture
def graph() -> CapturedGraph:
    """A graph of one input."""
    return CapturedGraph(lambda x: (x,), "function", (0,), {})


@pytest.fixture
def kind(graph: CapturedGraph) -> CallKind:
    """The kind of its calls."""
    one = graph.kind_of([torch.ones(1)])
    assert isinstance(one, CallKind)
    return one


@pytest.mark.filterwarnings("ignore")
def test_an_unexpected_error_is_not_the_end_of_a_kind(graph: CapturedGraph, kind: CallKind) -> None:
    first, tried = FirstProgram(of_nodes()), list[int]()

    def learn() -> Learned:
        if len(tried) < 4:
            raise torch.OutOfMemoryError("no memory")
        return first

    for call in range(20):
        if (learned := graph.learned(kind)) is None:
            tried.append(call)
            graph.note(kind, learn)
        else:
            assert learned is first or "no memory" in str(learned)

    assert tried == [0, 2, 5, 10]
    assert graph.learned(kind) is first


def test_a_refusal_is(graph: CapturedGraph, kind: CallKind) -> None:
    def learn() -> Learned:
        raise Refusal("never")

    graph.note(kind, learn)
    assert {graph.learned(kind) for _ in range(20)} == {"never"}

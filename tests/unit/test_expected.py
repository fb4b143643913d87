"""Answers that came as they were sent, and are no answers to what was asked."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from backhaul import TransferError
from backhaul._worker_client.answers.answer_checks import check_saved, contributions_in, saved_views
from backhaul_proto.v1 import segment_pb2
from backhaul_runtime.tensors.layout import Layout, layout_of
from backhaul_runtime.wire.bundle import bundle, encode_view
from support.bits import differing

WEIGHT, BIAS, X = torch.randn(4, 3), torch.randn(4), torch.randn(2, 3)
DUE = [(0, layout_of(X)), (0, layout_of(X)), (1, layout_of(WEIGHT)), (2, layout_of(BIAS)), (3, layout_of(X))]
"""Source 0 has two uses."""


class Answer:
    """What a worker says of gradients for `DUE`: all of them, one for each.

    Attributes:
        result: To be changed.
        tensors: Likewise.
    """

    def __init__(self) -> None:
        base = torch.randn(4, 3)
        given = [torch.randn(2, 3), torch.randn(2, 3), base, base[:, 0], None]
        bundled = bundle([(index, tensor) for index, tensor in enumerate(given) if tensor is not None])
        self.given: list[Tensor | None] = given
        self.result = segment_pb2.BackwardResult(
            contributions=[segment_pb2.Contribution(source=source) for source, _ in DUE]
        )
        for view in bundled.views:
            self.result.contributions[view.position].view.CopyFrom(encode_view(view))
        self.tensors = [outgoing.tensor for outgoing in bundled.tensors]

    def read(self, *, summed: tuple[int, ...] = (), slots: tuple[int, ...] = ()) -> list[Tensor | None]:
        contributions = contributions_in(self.result, self.tensors, DUE, summed, slots)
        assert [contribution.source for contribution in contributions] == [source for source, _ in DUE]
        return [contribution.gradient for contribution in contributions]


def test_an_answer_to_what_was_asked_is_taken() -> None:
    answer = Answer()
    assert len(answer.tensors) == 3  # two share one
    for gradient, given in zip(answer.read(), answer.given, strict=True):
        assert differing([gradient], [given]) == []


def of_position(answer: Answer) -> None:
    answer.result.contributions[0].view.position = 1


def of_tensor(answer: Answer) -> None:
    answer.result.contributions[0].view.tensor = 1


def of_no_tensor(answer: Answer) -> None:
    answer.result.contributions[0].view.tensor = 3


def without_a_view(answer: Answer) -> None:
    answer.result.contributions[1].ClearField("view")


def without_a_contribution(answer: Answer) -> None:
    del answer.result.contributions[4]


def with_one_more(answer: Answer) -> None:
    answer.result.contributions.add(source=3)


def of_another_source(answer: Answer) -> None:
    answer.result.contributions[4].source = 2


def in_another_order(answer: Answer) -> None:
    answer.result.contributions[1].source, answer.result.contributions[2].source = 1, 0


def of_another_shape(answer: Answer) -> None:
    answer.tensors[0] = torch.randn(3, 2)


def of_another_dtype(answer: Answer) -> None:
    answer.tensors[0] = answer.tensors[0].double()


def outside_its_tensor(answer: Answer) -> None:
    answer.result.contributions[3].view.spec.offset_bytes += 16


def of_an_impossible_layout(answer: Answer) -> None:
    answer.result.contributions[3].view.spec.tensor.strides[:] = [-1]


def with_a_tensor_for_nothing(answer: Answer) -> None:
    answer.tensors.append(torch.randn(2, 3))


def kept_unasked(answer: Answer) -> None:
    answer.result.contributions[4].uncollected = True


def kept_and_sent(answer: Answer) -> None:
    answer.result.contributions[2].uncollected = True


def kept_beside_one_that_was_sent(answer: Answer) -> None:
    """Of the two contributions of source 0 the first stays, so the second is the first view."""
    answer.result.contributions[0].ClearField("view")
    answer.result.contributions[0].uncollected = True
    del answer.tensors[0]
    for contribution in answer.result.contributions[1:4]:
        contribution.view.tensor -= contribution.view.tensor > 0


WRONG = [
    *(of_position, of_tensor, of_no_tensor, without_a_view, without_a_contribution, with_one_more, of_another_source),
    *(in_another_order, of_another_shape, of_another_dtype, outside_its_tensor),
    *(of_an_impossible_layout, with_a_tensor_for_nothing, kept_unasked, kept_and_sent),
    kept_beside_one_that_was_sent,
]


@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_an_answer_to_something_else_is_refused(change: Callable[[Answer], None]) -> None:
    answer = Answer()
    change(answer)
    with pytest.raises(TransferError):
        answer.read(slots=(0, 1))


def test_a_sum_is_one_gradient() -> None:
    answer = Answer()
    with pytest.raises(TransferError, match="but their sum was requested"):
        answer.read(summed=(0,))
    assert answer.read(summed=(1, 2))[2] is not None
    answer.result.contributions[1].ClearField("view")
    del answer.tensors[1]
    for contribution in answer.result.contributions[2:4]:
        contribution.view.tensor = 1
    assert answer.read(summed=(0,))[1] is None


def test_what_was_allowed_to_stay_may_have_stayed() -> None:
    answer = Answer()
    answer.result.contributions[4].uncollected = True
    assert answer.read(slots=(3,))[4] is None


def test_only_a_number_may_be_on_another_device() -> None:
    """Autograd moves it."""
    contribution = segment_pb2.Contribution(source=0, view=segment_pb2.View(position=0, tensor=0))
    result = segment_pb2.BackwardResult(contributions=[contribution])
    (received,) = contributions_in(
        result, [torch.tensor(2.0)], [(0, Layout(torch.float32, (), (), device="cuda"))], (), ()
    )
    assert received.gradient == 2
    with pytest.raises(TransferError, match="on cpu, but must be .* on cuda"):
        contributions_in(result, [BIAS], [(0, Layout(torch.float32, (4,), (1,), device="cuda"))], (), ())


def views(*positions: int) -> list[segment_pb2.View]:
    return [segment_pb2.View(position=position, tensor=0) for position in positions]


@pytest.mark.parametrize("positions", [(), (0,), (0, 1, 1), (0, 0), (0, 2), (0, 1, 2)], ids=str)
def test_saved_tensors_are_those_that_were_asked_for(positions: tuple[int, ...]) -> None:
    assert saved_views(views(1, 0), {0: None, 1: None}).keys() == {0, 1}
    with pytest.raises(TransferError):
        saved_views(views(*positions), [0, 1])


@pytest.mark.parametrize("other", [WEIGHT.t().contiguous().t(), WEIGHT.double(), WEIGHT[:3], WEIGHT[0]])
def test_a_saved_tensor_lies_as_it_did(other: Tensor) -> None:
    check_saved(0, WEIGHT.clone(), layout_of(WEIGHT))
    with pytest.raises(TransferError, match="saved tensor 0 has the layout"):
        check_saved(0, other, layout_of(WEIGHT))

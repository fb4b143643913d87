"""Draws and decisions that are given to a replay, and projections of what it computes."""

import math

import pytest
import torch
from torch import Tensor

from backhaul_runtime.errors import ReplayError
from backhaul_runtime.replay.recorded_choices import ChoiceReplay, DrawRecorder, is_binary, pack_bits, unpack_bits
from backhaul_runtime.tensors.random_projection import SIZE, drift, project, tolerance


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (8,), (3, 7), (4, 0, 2), (65,)])
def test_bits_come_back(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    mask = (torch.rand(shape) > 0.5).to(dtype)
    bits = pack_bits(mask)
    assert bits.nbytes == math.ceil(mask.numel() / 8)
    assert torch.equal(unpack_bits(bits, mask.numel(), torch.empty_like(mask)), mask)


def test_bits_for_another_number_of_elements_are_refused() -> None:
    """A count of hits is a decision: eight elements in a byte are not six."""
    bits = pack_bits(torch.ones(6))
    for elements, like in ((6, torch.empty(8)), (8, torch.empty(6)), (6, torch.empty(5)), (60, torch.empty(60))):
        with pytest.raises(ReplayError):
            unpack_bits(bits, elements, like)


def test_only_masks_are_packed() -> None:
    assert is_binary(torch.tensor([0.0, 1.0]))
    assert is_binary(torch.tensor([True]))
    assert not is_binary(torch.tensor([0.0, 0.5]))
    assert not is_binary(torch.tensor([0, 1]))  # places of hits, perhaps
    assert not is_binary(torch.empty(0))


def given(values: list[Tensor]) -> ChoiceReplay:
    return ChoiceReplay([(value, 0) for value in values], lent=())


def test_what_was_drawn_is_drawn_again() -> None:
    x = torch.randn(4, 4)
    with DrawRecorder() as noted:
        expected = torch.nn.functional.dropout(x, 0.5) + torch.rand(4) + torch.randperm(4)
    assert len(noted.drawn) == 3
    with given(noted.drawn) as values:
        drawn = torch.nn.functional.dropout(x, 0.5) + torch.rand(4) + torch.randperm(4)
    assert values.decided([drawn])
    assert torch.equal(drawn, expected)


@pytest.mark.parametrize("draws", [0, 2])
def test_more_or_fewer_draws_are_refused(draws: int) -> None:
    with pytest.raises(ReplayError):
        with given([torch.rand(4)] * draws) as values:
            drawn = torch.rand(4)
        values.decided([drawn])


def test_a_draw_of_another_shape_is_refused() -> None:
    with pytest.raises(ReplayError, match="was drawn or decided"), given([torch.rand(5)]):
        torch.rand(4)


def test_a_count_of_hits_decides_the_shape() -> None:
    hits = torch.tensor([[0], [2]])
    x = torch.tensor([1.0, 1.0, 1.0])
    with given([hits]) as values:
        indices = x.nonzero()
    (result,) = values.decided([indices])
    assert torch.equal(result, hits)


def test_places_outside_are_refused() -> None:
    x = torch.randn(3)
    with pytest.raises(RuntimeError, match="out of bounds"), given([torch.tensor([7])]):
        x.topk(1)


def test_values_follow_the_places_that_are_given() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0], [6.0, 5.0, 4.0]])
    with given([torch.tensor([0, 2])]):
        values, places = x.max(1)
    assert values.tolist() == [1, 4]
    assert places.tolist() == [0, 2]
    pooled = torch.arange(16.0).view(1, 1, 4, 4)
    with given([torch.zeros(1, 1, 2, 2, dtype=torch.long)]):
        values, places = torch.ops.aten.max_pool2d_with_indices(pooled, [2, 2])
    assert values.unique().tolist() == [0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", [(), (5,), (300, 700), (2_000_000,)])
def test_drift_is_about_the_relative_error(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Eight projections: their root mean square is within a factor of 4 with a probability beyond 0.9999."""
    x = torch.randn(shape, dtype=dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    y = x.to(wide) + 1e-3 * torch.randn(shape, dtype=wide)
    true = float((y - x.to(wide)).norm() / x.to(wide).norm())
    assert true / 4 < drift(project(x), project(y)) < true * 4
    assert drift(project(x), project(x.clone())) == 0


def test_what_is_not_finite_must_be_as_often() -> None:
    x = torch.randn(1000)
    y = x.clone()
    x[3] = y[3] = -math.inf
    assert drift(project(x), project(y)) == 0
    y[5] = math.nan
    assert drift(project(x), project(y)) == math.inf


def test_a_projection_sees_where_values_lie() -> None:
    x = torch.randn(10_000)
    assert drift(project(x), project(x.flip(0))) > 0.1
    assert drift(project(torch.zeros(9)), project(torch.ones(9))) == math.inf
    assert drift(project(torch.zeros(9)), project(torch.zeros(9))) == 0


def test_projections_that_do_not_fit_differ() -> None:
    one = project(torch.ones(3))
    assert len(one) == SIZE
    assert drift(one, one + one) == math.inf
    assert drift(one, ()) == math.inf


def test_tolerances_are_those_of_the_parts() -> None:
    assert tolerance(torch.complex64) == tolerance(torch.float32)
    assert tolerance(torch.float8_e4m3fn) == tolerance(torch.bfloat16)


def test_what_is_no_number_is_no_small_drift() -> None:
    one = project(torch.ones(3))
    for position in range(SIZE):
        assert drift(one, [*one[:position], math.nan, *one[position + 1 :]]) == math.inf


def test_draws_that_can_not_be_noted_are_a_refusal_and_no_error_of_the_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Tensor, "clone", lambda tensor: 1 / 0)
    with DrawRecorder() as noted:
        torch.rand(3)
    assert noted.refusal is not None

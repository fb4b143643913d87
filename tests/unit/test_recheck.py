"""The draw of what is rechecked, and the comparison of gradients."""

import math

import pytest
import torch
from torch import Tensor

from backhaul._backward.recheck import Rounding, differing, is_drawn
from backhaul_runtime.replay.replay import Contribution

KEYS = [number.to_bytes(32, "little") for number in range(200)]


@pytest.mark.parametrize(("share", "wrong"), [(0.01, 1), (0.01, 70), (0.01, 200), (0.1, 10), (0.5, 1), (0.5, 3)])
def test_as_many_keys_find_wrong_answers_as_the_formula_says(share: float, wrong: int) -> None:
    finding = sum(any(is_drawn(key, number, share) for number in range(1000, 1000 + wrong)) for key in KEYS)
    probability = 1 - (1 - share) ** wrong
    deviation = math.sqrt(len(KEYS) * probability * (1 - probability))
    assert abs(finding - len(KEYS) * probability) <= 4 * deviation + 1


def test_nothing_and_everything_can_be_drawn() -> None:
    assert not any(is_drawn(KEYS[0], number, 0.0) for number in range(1000))
    assert all(is_drawn(key, number, 1.0) for key in KEYS for number in (0, 1, 2**64 - 1))


def test_each_key_draws_others() -> None:
    draws = {tuple(number for number in range(1000) if is_drawn(key, number, 0.1)) for key in KEYS}
    assert len(draws) == len(KEYS)


def contributions(*gradients: Tensor | None) -> list[Contribution]:
    return [Contribution(source, gradient) for source, gradient in enumerate(gradients)]


A = torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("other", "is_equal"),
    [
        (A.clone(), True),
        (torch.nextafter(A, A + 1), False),
        (A.double(), False),
        (A.view(1, 3), False),
        (None, False),
        (A * math.nan, False),
    ],
)
def test_every_bit_counts(other: Tensor | None, is_equal: bool) -> None:
    assert (differing(contributions(None, A), contributions(None, other), (), is_exact=True) is None) == is_equal


def test_bits_of_zeros_and_of_what_is_no_number_count() -> None:
    zeros, nans = torch.zeros(2), torch.full((2,), math.nan)
    assert differing(contributions(zeros), contributions(-zeros), (), is_exact=True) is not None
    assert differing(contributions(nans), contributions(nans.clone()), (), is_exact=True) is None
    assert differing(contributions(zeros), contributions(zeros.clone()), (), is_exact=True) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_on_other_hardware_gradients_may_be_as_far_away_as_the_page_says(dtype: torch.dtype) -> None:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    values = torch.linspace(1, 2, 64, dtype=torch.float64).to(wide)
    allowed = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 3e-2, torch.complex64: 1e-4}[dtype]
    near, far = ((values * (1 + factor * allowed)).to(dtype) for factor in (0.5, 2))
    ours = contributions(values.to(dtype))
    assert differing(ours, contributions(near), (), is_exact=False) is None
    source, distance = differing(ours, contributions(far), (), is_exact=False) or (1, 0)
    assert not source
    assert distance == pytest.approx(2 * allowed, rel=0.2)
    assert differing(ours, contributions(values.to(dtype) * math.nan), (), is_exact=False) is not None


INF = math.inf


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ([INF, 1.0], [-INF, 1.0]),
        ([INF, 1.0], [math.nan, 1.0]),
        ([INF, 1.0], [INF, 2.0]),
        ([1.0, 1.0], [INF, 1.0]),
        ([0.0, 0.0], [0.0, 1e-30]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_what_is_not_finite_hides_nothing(
    ours: list[float], theirs: list[float], dtype: torch.dtype, is_exact: bool
) -> None:
    one, other = (torch.tensor(numbers, dtype=dtype) for numbers in (ours, theirs))
    difference = differing(contributions(A, one), contributions(A, other), (), is_exact=is_exact)
    assert difference is not None
    assert difference[0] == 1


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_numbers_of_all_sizes_are_compared(scale: float) -> None:
    values = torch.linspace(1, 2, 64, dtype=torch.float64) * scale
    for factor, is_near in [(1e-11, True), (1e-9, False)]:
        difference = differing(contributions(values), contributions(values * (1 + factor)), (), is_exact=False)
        assert (difference is None) == is_near


def test_gradients_that_are_not_finite_count_as_near_if_they_are_the_same() -> None:
    ours = torch.tensor([math.nan, INF, -INF, 1.0])
    theirs = torch.tensor([-math.nan, INF, -INF, 1.0 + 1e-6])
    assert differing(contributions(ours), contributions(theirs), (), is_exact=False) is None
    assert differing(contributions(A * math.nan), contributions(A * -math.nan), (), is_exact=False) is None


def test_where_rounding_carries_further_gradients_may_be_further_away() -> None:
    ours, far, further = (contributions(A * scale) for scale in (1e-8, 3e-8, 1e-2))
    noise, calm = (Rounding(contributions(A * scale), 1.0) for scale in (2e-8, 1e-8 * (1 + 1e-7)))
    assert differing(ours, far, (), is_exact=False) is not None
    assert differing(ours, far, (), is_exact=False, rounding=calm) is not None
    assert differing(ours, far, (), is_exact=False, rounding=noise) is None
    assert differing(ours, further, (), is_exact=False, rounding=noise) is not None
    assert differing(ours, contributions(A[:2]), (), is_exact=False, rounding=noise) is not None


def test_rounding_explains_nothing_that_is_large_beside_all_gradients() -> None:
    ours, far = contributions(A), contributions(A * 1.1)
    assert differing(ours, far, (), is_exact=False, rounding=Rounding(contributions(A * 1.2), 100.0)) is None
    assert differing(ours, far, (), is_exact=False, rounding=Rounding(contributions(A * 1.2), 1.0)) is not None
    not_finite = contributions(A.index_fill(0, torch.tensor(0), INF))
    assert differing(ours, not_finite, (), is_exact=False, rounding=Rounding(not_finite, 100.0)) is not None


def test_sums_are_compared_as_the_worker_adds() -> None:
    parts = [torch.randn(5) for _ in range(3)]
    ours = [Contribution(0, part) for part in parts]
    theirs = [Contribution(0, parts[0] + parts[1] + parts[2]), Contribution(0, None), Contribution(0, None)]
    assert differing(ours, theirs, {0}, is_exact=True) is None
    assert differing(ours, theirs, (), is_exact=True) is not None

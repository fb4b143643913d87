"""The draw of what is rechecked, and the comparison of gradients."""

import math

import pytest
import torch
from torch import Tensor

from backhaul._backward.recheck import differing, is_drawn
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


def test_sums_are_compared_as_the_worker_adds() -> None:
    parts = [torch.randn(5) for _ in range(3)]
    ours = [Contribution(0, part) for part in parts]
    theirs = [Contribution(0, parts[0] + parts[1] + parts[2]), Contribution(0, None), Contribution(0, None)]
    assert differing(ours, theirs, {0}, is_exact=True) is None
    assert differing(ours, theirs, (), is_exact=True) is not None

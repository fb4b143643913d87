"""The sentence on a run: what it depends on, and that it says why not."""

from typing import Any

import pytest

from backhaul_server.dashboard.collect.totals import Totals
from backhaul_server.dashboard.collect.verdict import FEWEST_STEPS, in_bytes, in_ms, verdict
from backhaul_server.dashboard.schemas.runs import RunVerdict

GOOD = Totals(
    steps=100,
    wait_s=6.0,
    overhead_s=2.0,
    spared_s=20.0,
    gradients=800,
    fallbacks=0,
    upload_s=5.0,
    recompute_s=6.0,
    exposed_queue_s=0.5,
)
PEAK_BYTES, SAVED_BYTES = 700_000_000, 300_000_000


def judged_of(*, peak_bytes: int = PEAK_BYTES, saved_bytes: int = SAVED_BYTES, **changed: float) -> RunVerdict:
    """The verdict on a good run with some measurements changed."""
    return verdict(GOOD._replace(**changed), peak_bytes, saved_bytes)


def test_a_run_that_is_no_slower_than_recomputing_here_is_worth_it() -> None:
    judged = judged_of()
    assert (judged.is_worth_it, judged.why) == (True, "")
    assert judged.saved_share == pytest.approx(0.3)
    assert judged.added_ms == pytest.approx(80)
    assert judged.spared_ms == pytest.approx(200)
    assert judged.sentence == (
        "30 % less memory than without checkpointing (286 MiB). Steps 120 ms shorter than with torch's checkpoint. "
        "Bottleneck: the workers"
    )


@pytest.mark.parametrize("wait_s", [17.5, 18.0, 18.5])
def test_a_difference_that_is_noise_has_no_sign(wait_s: float) -> None:
    judged = judged_of(wait_s=wait_s)
    assert judged.is_worth_it
    assert "Steps as long as with torch's checkpoint." in judged.sentence


@pytest.mark.parametrize(
    ("changed", "bottleneck"),
    [
        ({}, "the workers"),
        ({"recompute_s": 4.0}, "the network"),
        ({"upload_s": 0.0}, "the workers or the network"),
        ({"exposed_queue_s": 4.0}, "the workers' queues"),
        ({"wait_s": 1.0}, "the trainer"),
        ({"gradients": 0}, ""),
    ],
)
def test_the_bottleneck_is_named(changed: dict[str, Any], bottleneck: str) -> None:
    judged = judged_of(**changed)
    assert judged.bottleneck == bottleneck
    assert (f"Bottleneck: {bottleneck}" in judged.sentence) == bool(bottleneck)


@pytest.mark.parametrize(
    ("drift", "values"),
    [
        (None, ""),
        (0.0, "Workers' values are bitwise equal to those of forward, wherever they were compared"),
        (2.1e-6, "Workers' values are within 2e-6 of those of forward, wherever they were compared"),
    ],
)
def test_the_bits_of_workers_values_are_named(drift: float | None, values: str) -> None:
    assert verdict(GOOD, PEAK_BYTES, SAVED_BYTES, drift).values == values


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"wait_s": 30.0}, "backward waited longer for workers than the trainer would have computed"),
        ({"wait_s": 30.0, "upload_s": 0.0, "exposed_queue_s": 0.0}, "backward waited longer for workers"),
        ({"wait_s": 30.0, "exposed_queue_s": 20.0}, "backward waited for segments in workers' queues"),
        ({"wait_s": 30.0, "upload_s": 40.0}, "sending and fetching the segments takes longer"),
        ({"overhead_s": 30.0}, "recording, digests and sending keep the trainer's own threads busy"),
        ({"saved_bytes": 10_000_000}, "only a small part of the peak"),
        ({"fallbacks": 200}, "200 of the 1,000 recomputations meant for workers ran on the trainer"),
        ({"gradients": 0, "fallbacks": 3}, "no worker recomputed anything"),
        ({"gradients": 0}, "no segment was given to a worker"),
    ],
)
def test_a_run_that_was_not_worth_it_says_why(changed: dict[str, Any], why: str) -> None:
    judged = judged_of(**changed)
    assert judged.is_worth_it is False
    assert why in judged.why
    assert judged.sentence.endswith(f". Not worth it: {judged.why}")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"steps": 0}, "0 steps were measured so far"),
        ({"steps": 1}, "1 step was measured so far"),
        ({"steps": FEWEST_STEPS - 1}, f"a verdict needs {FEWEST_STEPS}"),
        ({"peak_bytes": 0}, "the trainer's peak memory is not known"),
    ],
)
def test_a_run_of_which_too_little_is_known_is_not_judged(changed: dict[str, Any], why: str) -> None:
    judged = judged_of(**changed)
    assert judged.is_worth_it is None
    assert why in judged.why
    assert judged.sentence == f"Not known yet whether workers are worth it: {judged.why}"


def test_numbers_have_three_digits_and_a_unit() -> None:
    assert [in_bytes(size) for size in (0, 999, 1e3, 1 << 20, 1.2345e9, 5e14)] == [
        "0 B",
        "999 B",
        "0.977 KiB",
        "1 MiB",
        "1.15 GiB",
        "455 TiB",
    ]
    assert [in_ms(value) for value in (0.0123, 8.25, 999.4, 1234)] == ["0.0123 ms", "8.25 ms", "999 ms", "1.23 s"]
    # The smallest and largest numbers that reports may have are not written with exponents.
    assert [in_ms(value) for value in (0, 1e-9, 0.001, 1_234_567, 1e9)] == [
        "0 ms",
        "less than 0.001 ms",
        "0.001 ms",
        "1,235 s",
        "1,000,000 s",
    ]
    assert in_bytes(2**53 - 1) == "8 PiB"

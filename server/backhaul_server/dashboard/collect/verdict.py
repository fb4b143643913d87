"""The sentence at the top of a run: what workers saved it, what that cost, and whether it was worth it.

A run is compared with the same training that recomputes the same segments on the trainer, which saves about as much
memory. Workers are worth it if a step with them is no slower.
"""

from backhaul_server.dashboard.collect.percentages import in_percent
from backhaul_server.dashboard.collect.totals import Totals
from backhaul_server.dashboard.schemas.runs import Bottleneck, RunVerdict

FEWEST_STEPS = 5
"""The fewest steps after which a run is judged. The first steps record programs and send all parameters."""
SMALL_SHARE = 0.05
"""Runs that save a smaller share of the peak without Backhaul have too little to gain."""
NOISE = 0.05
"""Steps count as equally long if they differ by at most this share of the recomputation on the trainer."""
MANY_FALLBACKS = 0.1
"""The share of the recomputations meant for workers above which fallbacks are named as the cause."""


def verdict(totals: Totals, peak_bytes: int, saved_bytes: int, drift: float | None = None) -> RunVerdict:
    """Judges a run. A pure function of its measurements.

    Args:
        totals: The sums over all steps whose costs are known. The history has none of transfers and queues.
        peak_bytes: The trainer's own peak memory; 0 if it is unknown.
        saved_bytes: The most bytes that autograd saved in segments and the trainer did not keep.
        drift: The largest relative difference between values of workers and those of forward; None if it is unknown.
    """
    saved_share = saved_bytes / (peak_bytes + saved_bytes) if peak_bytes else None
    added_ms = totals.per_step_ms(totals.added_s)
    spared_ms = totals.per_step_ms(totals.spared_s)
    is_worth_it, why = _judge(totals, saved_share)
    bottleneck = _bottleneck(totals)[0] if totals.remote else ""
    return RunVerdict(
        sentence=_sentence(saved_bytes, saved_share, added_ms, spared_ms, is_worth_it, why, bottleneck),
        saved_share=saved_share,
        saved_bytes=saved_bytes,
        added_ms=added_ms,
        spared_ms=spared_ms,
        is_worth_it=is_worth_it,
        why=why,
        bottleneck=bottleneck,
        values=_values(drift),
    )


def _judge(totals: Totals, saved_share: float | None) -> tuple[bool | None, str]:
    """Returns whether the run was worth it, and why not; None if that is not known yet, and what is missing."""
    if totals.steps < FEWEST_STEPS:
        return None, f"{_counted(int(totals.steps), 'step')} measured so far, and a verdict needs {FEWEST_STEPS}"
    if saved_share is None:
        return None, "the trainer's peak memory is not known"
    meant = totals.remote + totals.fallbacks
    if not totals.remote:
        if totals.fallbacks:
            return False, "no worker recomputed anything: the table of segments says why"
        return False, "no segment was given to a worker: checkpoint parts of the model, and look at the reasons"
    if totals.fallbacks > MANY_FALLBACKS * meant:
        return False, (
            f"{totals.fallbacks:,} of the {meant:,} recomputations meant for workers ran on the trainer: the table of "
            "segments says why"
        )
    if saved_share < SMALL_SHARE:
        return False, (
            "the checkpointed segments hold only a small part of the peak: checkpoint more of the model, or use larger "
            "batches"
        )
    if totals.added_s <= (1 + NOISE) * totals.spared_s:
        return True, ""
    _, why_slow = _bottleneck(totals)
    return False, why_slow


def _bottleneck(totals: Totals) -> tuple[Bottleneck, str]:
    """Returns what causes most of the time that workers add to a step, and in words what to do about it."""
    if totals.overhead_s >= totals.wait_s:
        return "the trainer", (
            "recording, digests and sending keep the trainer's own threads busy for longer than they are spared: make "
            "the segments longer"
        )
    if totals.exposed_queue_s > totals.wait_s / 2:
        return "the workers' queues", (
            "backward waited for segments in workers' queues: add a worker, or connect fewer trainers to each"
        )
    if totals.transfer_s > totals.recompute_s + totals.backward_s:
        return "the network", (
            "sending and fetching the segments takes longer than computing them: make the segments longer, or use a "
            "faster network"
        )
    if not totals.transfer_s:
        return "the workers or the network", (
            "backward waited longer for workers than the trainer would have computed: add workers, or use faster ones "
            "or a faster network"
        )
    return "the workers", (
        "backward waited longer for workers than the trainer would have computed: add workers, or use faster ones"
    )


def _sentence(
    saved_bytes: int,
    saved_share: float | None,
    added_ms: float | None,
    spared_ms: float | None,
    is_worth_it: bool | None,
    why: str,
    bottleneck: str,
) -> str:
    if is_worth_it is None:
        return f"Not known yet whether workers are worth it: {why}"
    assert saved_share is not None and added_ms is not None and spared_ms is not None
    saved = f"{in_percent(saved_share)} less memory than without checkpointing ({in_bytes(saved_bytes)})"
    steps = f"Steps {_compared(added_ms - spared_ms, spared_ms)} torch's checkpoint"
    return f"{saved}. {steps}. {f'Bottleneck: {bottleneck}' if is_worth_it else f'Not worth it: {why}'}"


def _compared(longer_ms: float, spared_ms: float) -> str:
    if abs(longer_ms) <= NOISE * spared_ms:
        return "as long as with"
    return f"{in_ms(abs(longer_ms))} {'longer' if longer_ms > 0 else 'shorter'} than with"


def _values(drift: float | None) -> str:
    if drift is None:
        return ""
    how = f"within {drift:.0e} of".replace("e-0", "e-") if drift else "bitwise equal to"
    return f"Workers' values are {how} those of forward, wherever they were compared"


def in_bytes(size_bytes: float) -> str:
    """Returns a number of bytes with three digits and the units of the rest of the page, such as "1.27 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size_bytes < 999.5:  # noqa: PLR2004  what rounds to a thousand gets the next unit
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:,.0f} PiB"


def in_ms(duration_ms: float) -> str:
    """Returns milliseconds with at most three digits, such as "8.25 ms", or seconds from one second on."""
    if 0 < duration_ms < 1e-3:  # noqa: PLR2004
        return "less than 0.001 ms"
    if duration_ms < 999.5:  # noqa: PLR2004
        return f"{duration_ms:.3g} ms"
    seconds = duration_ms / 1e3
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"  # noqa: PLR2004


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun} was" if number == 1 else f"{number} {noun}s were"

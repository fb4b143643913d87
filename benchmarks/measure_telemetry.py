"""What telemetry adds to a step of the demo: two sessions on one worker take turns, one of them without it.

A dashboard watches that worker all the while, as it would in use. Rounds are compared within themselves; a round in
which the trainer's two steps together took half as long again as the median had a noisy neighbour and doesn't count.
"""

import os
from statistics import median
from time import perf_counter

import torch

import backhaul
from backhaul.demo.corpus import standard_library
from backhaul.demo.dashboard import DashboardProcess
from backhaul.demo.variants import Settings, Variant

ROUNDS = 40
WARM = 2
ENOUGH = 15
NOISY = 1.5


def main() -> None:
    """Measures, and prints the median and the middle half."""
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    corpus = standard_library()
    with (
        backhaul.connect(returns="gradients", telemetry=False) as off,
        backhaul.connect(off.workers, returns="gradients") as on,
    ):
        dashboard = DashboardProcess(off.workers)
        try:
            # Other weights, or what one sends the other need not.
            found = _rounds(corpus, [_variant("off", off, 0), _variant("on", on, 1)])
        finally:
            dashboard.close()
    usual = median(a + b for a, b in found)
    quiet = [(a, b) for a, b in found if a + b <= NOISY * usual]
    print(f"{len(quiet)} of {len(found)} rounds without a noisy neighbour, torch {torch.__version__}")
    if len(quiet) < ENOUGH:
        print(f"inconclusive: {ENOUGH} are needed")
        return
    added = sorted(b / a - 1 for a, b in quiet)
    quarter = len(added) // 4
    spread = f"half of the rounds {added[quarter]:+.1%} to {added[-1 - quarter]:+.1%}"
    print(f"telemetry adds {median(added):+.1%} to a step of {median(a for a, _ in quiet) * 1e3:.0f} ms; {spread}")


def _variant(name: str, session: backhaul.Session, seed: int) -> Variant:
    return Variant(name, session.checkpoint, Settings(seed=seed), session)


def _rounds(corpus: torch.Tensor, variants: list[Variant]) -> list[tuple[float, float]]:
    found = []
    for number in range(WARM + ROUNDS):
        taken = {}
        for variant in variants if number % 2 else variants[::-1]:
            began = perf_counter()
            variant.train(corpus, number)
            taken[variant.name] = perf_counter() - began
            variant.finish()
        if number >= WARM:  # connections, programs and weights are there
            found.append((taken["off"], taken["on"]))
    return found


main()

"""Draws docs/memory.svg, the trainer's activation memory during one step of the demo's model: `make picture`."""

import os
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # Set before torch is imported, which reads it.

import matplotlib.pyplot as plt
import torch

import backhaul
from backhaul.demo.corpus import standard_library
from backhaul.demo.memory import live_bytes
from backhaul.demo.variants import Settings, Variant, variants

LAYERS = 12
POINTS = 240
OUT = Path(__file__).parents[1] / "docs" / "memory.svg"
COLORS = ("#8c8c8c", "#2f6fb0", "#e0a030", "#c2410c")


def curve(variant: Variant) -> list[float]:
    """Returns the peak megabytes in each of POINTS equal parts of a step."""
    corpus = standard_library()
    variant.backward(corpus, 0)  # Allocates the gradients and sends the weights.
    events = live_bytes(lambda: variant.backward(corpus, 1))
    first, last = events[0][0], events[-1][0]
    most = [0] * POINTS
    live = at = 0
    for when, after in events:
        part = min(POINTS - 1, (when - first) * POINTS // (last - first))
        for passed in range(at, part + 1):
            most[passed] = max(most[passed], live)
        at, live = part, after
        most[part] = max(most[part], after)
    return [bytes_ / 1e6 for bytes_ in most]


def main() -> None:
    """Runs a step of each variant and draws its activation memory."""
    torch.set_num_threads(1)
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "memory", "axes.spines.top": False}
    plt.rcParams |= {"axes.spines.right": False, "font.family": "sans-serif"}
    figure, (whole, near) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    with backhaul.connect() as session:
        compared = variants(
            Settings(layers=LAYERS), lambda _, returns: backhaul.connect(session.workers, returns=returns)
        )
        for variant, color in zip(compared, COLORS, strict=True):
            megabytes = curve(variant)
            label = f"{variant.name}: {max(megabytes):.0f} MB at most"
            whole.plot(megabytes, color=color, label=label, linewidth=1.4)
            if variant.checkpoint is not None:
                near.plot(megabytes, color=color, linewidth=1.4)
            if variant.session is not None:
                assert variant.session.report().fallbacks == 0, variant.session.report()
                variant.session.close()
    whole.set_title(f"activation memory of the trainer in one step, {LAYERS} blocks, MB", fontsize=10, loc="left")
    near.set_title("the same, checkpointed only", fontsize=10, loc="left")
    for axes in (whole, near):
        axes.set(xlim=(0, POINTS - 1), ylim=(0, None), xticks=[])
        axes.set_xlabel("forward  →  backward")
    figure.legend(*whole.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(OUT, metadata={"Date": None, "Creator": None})


main()

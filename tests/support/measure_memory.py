"""Run by a test in a process of its own: peaks of activation memory of a step, by variant, as JSON.

python measure_memory.py WORKER LAYERS...
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import backhaul
from backhaul.demo.model import LanguageModel
from backhaul.demo.peak_memory import peak_live_bytes
from backhaul_runtime.process.resources import resident_bytes


def resident_peak(step: Callable[[], None]) -> int:
    """The kernel's high-water mark of a step, above what was there before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes()
    step()
    return resident_bytes("VmHWM") - before


def main(worker: str, *depths: str) -> None:
    session = backhaul.connect(worker, settings=backhaul.Settings(silence_s=240))
    variants = {
        "none": None,
        "torch": partial(torch_checkpoint, use_reentrant=False),
        "activations": partial(session.checkpoint, returns="activations"),
        "gradients": partial(session.checkpoint, returns="gradients"),
    }
    peaks: dict[str, dict[str, int]] = {}
    text = torch.randint(256, (2, 256))
    for depth in depths:
        model = LanguageModel(int(depth), 256, 256)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)  # so that gradients are not counted as activations
        for name, checkpoint in variants.items():

            def step(checkpoint: Any = checkpoint, model: LanguageModel = model) -> None:
                model(text, checkpoint).square().mean().backward()

            step()
            peaks.setdefault(depth, {})[f"{name}_resident"] = resident_peak(step)
            peaks[depth][f"{name}_live"] = peak_live_bytes(step)
    assert session.report().fallbacks == 0, session.report()
    session.close()
    print(json.dumps(peaks))


main(*sys.argv[1:])

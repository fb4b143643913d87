"""How often the trainer's thread waits for the device in forward and in backward, counted by torch.

Waits of the training itself do not count. They happen inside of a segment, below frames of Backhaul, so the same model
without checkpointing says how many there are.
"""

import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gpu_check.models import ATTENTION, PLAIN, RECURRENT, Case
from gpu_check.results import DEVICE, ON_GPU, guarded, note
from gpu_check.workers import connect, worker
from support.bits import Checkpoint, plainly

CASES = {
    "mlp": PLAIN["mlp"],
    "mlp, autocast": PLAIN["mlp, autocast"],
    "embedding": PLAIN["embedding"],
    "attention": ATTENTION["default bf16"],
    "conv": RECURRENT["conv"],
    "lstm": RECURRENT["lstm"],
}
WARM_UPS = 2
MOST_IN_BACKWARD = 2
"""One for the digests of the segment, and one for the gradient that goes to the worker."""


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the waits of the calling thread, by the innermost line of Backhaul."""
    waits, thread = Counter[str](), threading.current_thread()

    def show(message: Any, category: Any, filename: str, lineno: int, *_: Any, **__: Any) -> None:
        if threading.current_thread() is thread and "synchroniz" in str(message):
            frames = [frame for frame in traceback.extract_stack() if "/backhaul" in frame.filename]
            waits[f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else "the training"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")


def counts(checkpoint: Checkpoint, case: Case) -> tuple[Counter[str], Counter[str]]:
    """Returns the waits of one segment in forward and in backward, in a step after some others."""
    model = case.build().to(DEVICE, case.dtype)
    for _ in range(WARM_UPS + 1):
        torch.manual_seed(1)
        x = case.inputs()
        with case.around():
            with counted() as forward:
                y = checkpoint(model, x * 1.0)
            loss = y.float().square().mean()
            with counted() as backward:
                loss.backward()
    return forward, backward


def run() -> None:
    """Counts the waits of each case."""
    if not ON_GPU:
        note("waits are counted on a device only")
        return
    with worker() as process:
        for name, case in CASES.items():
            with guarded(name), connect(process, returns="gradients") as session:
                plain, ours = counts(plainly, case), counts(session.checkpoint, case)
                forward, backward = (one.total() - other.total() for one, other in zip(ours, plain, strict=True))
                note(f"forward waits for nothing: {name}", forward <= 0, count=forward, where=dict(ours[0]))
                ok = backward <= MOST_IN_BACKWARD
                note(f"a segment waits at most twice in backward: {name}", ok, count=backward, where=dict(ours[1]))

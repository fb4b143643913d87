"""How often the trainer's thread waits for the device in forward and in backward, counted by torch."""

import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gpu_check.models import ATTENTION, PLAIN, RECURRENT
from gpu_check.results import DEVICE, IS_REAL, ON_GPU, guarded, note
from gpu_check.workers import connect, worker

CASES = {
    "mlp": PLAIN["mlp"],
    "mlp, autocast": PLAIN["mlp, autocast"],
    "embedding": PLAIN["embedding"],
    "attention": ATTENTION["default bf16"],
    "conv": RECURRENT["conv"],
    "lstm": RECURRENT["lstm"],
}
WARM_UPS = 2


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the waits of Backhaul's own code in the calling thread, by place."""
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


def run() -> None:
    """Counts the waits of each case."""
    if not ON_GPU:
        note("waits are counted on a device only")
        return
    with worker() as process:
        for name, case in CASES.items():
            with guarded(name), connect(process, returns="gradients") as session:
                model = case.build().to(DEVICE, case.dtype)
                for number in range(WARM_UPS + 1):
                    torch.manual_seed(1)
                    x = case.inputs()
                    with case.around():
                        with counted() as forward:
                            y = session.checkpoint(model, x * 1.0)
                        loss = y.float().square().mean()
                        with counted() as backward:
                            loss.backward()
                    del number
                ours = forward.total() - forward["the training"]
                ok = not ours if IS_REAL else None
                note(f"forward waits for nothing: {name}", ok, count=ours, where=dict(forward))
                ours = backward.total() - backward["the training"]
                note(f"waits of one segment in backward: {name}", None, count=ours, where=dict(backward))

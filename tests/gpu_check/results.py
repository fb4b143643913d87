"""Findings: a JSON line for each."""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

DEVICE = os.environ.get("GPU_CHECK_DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"
IS_SIMULATED = bool(os.environ.get("SIMULATED_CUDA"))
IS_REAL = ON_GPU and not IS_SIMULATED
"""Whether sizes and limits are those of a GPU. Elsewhere the same code runs with the sizes of a toy."""

_PART = sys.argv[1] if len(sys.argv) > 1 else ""
_SHOWN_CHARACTERS = 400


def note(what: str, ok: bool | None = None, **fields: Any) -> None:
    """Writes a finding: whether something holds, or only figures if `ok` is None."""
    row = {"part": _PART, "what": what, "ok": ok, **fields}
    with (Path(os.environ["OUT"]) / "results.jsonl").open("a") as file:
        file.write(json.dumps(row, default=str) + "\n")


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Turns an exception into a failed finding, so that the part goes on."""
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__}: {error}"[:_SHOWN_CHARACTERS]
        note(what, False, error=text, tail=traceback.format_exc()[-3000:])


def synchronize() -> None:
    """Waits for the device."""
    if ON_GPU:
        torch.cuda.synchronize()


def clocked(function: Callable[[], object], times: int) -> float:
    """Milliseconds that a call takes on the device, on average over so many calls after the first one."""
    function()
    synchronize()
    began = time.perf_counter()
    if not IS_REAL:
        for _ in range(times):
            function()
        synchronize()
        return (time.perf_counter() - began) * 1e3 / times
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    for _ in range(times):
        function()
    last.record()
    synchronize()
    return float(first.elapsed_time(last)) / times


def make_deterministic() -> None:
    """Lets ops give the same bits in each run, as far as they can, without filling memory that they leave unwritten."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True


def sized(on_gpu: int, else_: int) -> int:
    """A size, which is that of a toy where there is no GPU."""
    return on_gpu if IS_REAL else else_

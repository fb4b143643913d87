"""Real text that every machine with Python has: the source of its standard library."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

MAX_BYTES = 4 << 20


def standard_library() -> Tensor:
    """The first 4 MiB of the standard library's modules in order of name, uint8 [n]."""
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(root.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= MAX_BYTES:
            break
    return torch.frombuffer(text[:MAX_BYTES], dtype=torch.uint8).clone()


def batch(corpus: Tensor, size: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Stretches of the corpus, drawn with a seed.

    Returns:
        Input and target, int64 [size, length]; the target is the input one byte later.
    """
    starts = torch.randint(len(corpus) - length - 1, (size,), generator=torch.Generator().manual_seed(seed))
    rows = torch.stack([corpus[start : start + length + 1] for start in starts.tolist()]).long()
    return rows[:, :-1], rows[:, 1:]

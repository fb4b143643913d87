"""Real text that every machine with Python has, namely the source code of its standard library."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

MAX_BYTES = 4 << 20


def standard_library() -> Tensor:
    """Returns up to 4 MiB of the standard library's modules, in the order of their names, as uint8 of shape [n]."""
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(root.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= MAX_BYTES:
            break
    return torch.frombuffer(text[:MAX_BYTES], dtype=torch.uint8).clone()


def batch(corpus: Tensor, size: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draws random rows from the corpus.

    Args:
        corpus: Bytes of text, uint8 of shape [n].
        size: Number of rows in the batch.
        length: Number of bytes per row.
        seed: Seed for the positions of the rows.

    Returns:
        Input and target, int64 of shape [size, length]. The target is the input shifted by one byte.
    """
    starts = torch.randint(len(corpus) - length - 1, (size,), generator=torch.Generator().manual_seed(seed))
    rows = torch.stack([corpus[start : start + length + 1] for start in starts.tolist()]).long()
    return rows[:, :-1], rows[:, 1:]

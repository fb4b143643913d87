"""The value check: no gradient counts before every tensor autograd saved was computed again with the same bits."""

from collections.abc import Sequence

import torch.utils.checkpoint

from backhaul_runtime.errors import ValueCheckError
from backhaul_runtime.recorder import SavedTensor

_SHOWN = 5


class CheckpointError(ValueCheckError, torch.utils.checkpoint.CheckpointError):
    """A recomputation gave other tensors than forward. Also torch's CheckpointError, and so a RuntimeError."""


def check_values(name: str, where: str, saved: Sequence[SavedTensor], digests: Sequence[bytes | None]) -> None:
    """Compares what forward saved with what a recomputation did.

    Args:
        name: Of the segment.
        where: Who recomputed, for the message.
        saved: From forward.
        digests: By position; None for a tensor that nobody needs.

    Raises:
        CheckpointError: Naming both sides and the positions.
    """
    if len(digests) != len(saved):
        raise CheckpointError(
            f"segment {name}: forward saved {len(saved)} tensors for backward, recomputation {where} saved "
            f"{len(digests)}. The function must do the same both times; run it once without checkpointing to compare",
            segment=name,
            saved_forward=len(saved),
            saved_recomputed=len(digests),
        )
    different = [
        index
        for index, (before, digest) in enumerate(zip(saved, digests, strict=True))
        if digest is not None and before.digest and digest != before.digest
    ]
    if different:
        lines = [
            f"  tensor {index}, saved by {saved[index].op}: {list(saved[index].layout.shape)} "
            f"{saved[index].layout.dtype_name}, forward {saved[index].digest.hex()[:12]}, "
            f"recomputed {(digests[index] or b'').hex()[:12]}"
            for index in different[:_SHOWN]
        ]
        more = f"\n  and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
        raise CheckpointError(
            f"segment {name}: {len(different)} of {len(saved)} tensors differ between forward and recomputation "
            f"{where}, so its gradients would be wrong:\n" + "\n".join(lines) + more + "\nLook for memory written "
            "outside torch (NumPy, .data), randomness from outside torch, and state that changed after forward",
            segment=name,
            positions=different,
        )

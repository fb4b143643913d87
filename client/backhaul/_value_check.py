"""The value check: no gradient counts before every tensor autograd saved was computed again with the same bits."""

from collections.abc import Mapping, Sequence

import torch.utils.checkpoint

from backhaul_runtime.errors import ValueCheckError
from backhaul_runtime.layout import Layout
from backhaul_runtime.recording import SavedTensor
from backhaul_runtime.replay import Contribution

_SHOWN = 5


class CheckpointError(ValueCheckError, torch.utils.checkpoint.CheckpointError):
    """A recomputation gave other tensors than forward. Also torch's CheckpointError, and so a RuntimeError."""


def check_values(
    name: str,
    where: str,
    saved: Sequence[SavedTensor],
    digests: Sequence[bytes],
    again: Sequence[SavedTensor] | None = None,
) -> None:
    """Compares everything forward saved with everything a recomputation did.

    Args:
        name: Of the segment.
        where: Who recomputed, for the message.
        saved: From forward.
        digests: From the recomputation, in order.
        again: All that is known of what it saved, for the message.

    Raises:
        CheckpointError: Naming both sides and the positions.
    """
    check_count(name, where, saved, len(digests))
    check_digests(name, where, saved, dict(enumerate(digests)), again)


def check_count(name: str, where: str, saved: Sequence[SavedTensor], count: int) -> None:
    """Raises CheckpointError where a recomputation saved more or fewer tensors than forward."""
    if count != len(saved):
        raise CheckpointError(
            f"segment {name}: forward saved {len(saved)} tensors for backward, recomputation {where} saved {count}. "
            "The function must do the same both times; run it once without checkpointing to compare",
            segment=name,
            saved_forward=len(saved),
            saved_recomputed=count,
        )


def check_uses(name: str, where: str, use_counts: Sequence[int], contributions: Sequence[Contribution]) -> None:
    """Raises CheckpointError where a recomputation's graph takes its sources up at other places than forward's."""
    found = [contribution.source for contribution in contributions]
    due = [source for source, count in enumerate(use_counts) for _ in range(count)]
    if found != due:
        raise CheckpointError(
            f"segment {name}: recomputation {where} gave gradients for the sources {found}, one per use, where forward "
            f"had {due}. Please report it with the function",
            segment=name,
        )


def check_digests(
    name: str,
    where: str,
    saved: Sequence[SavedTensor],
    digests: Mapping[int, bytes],
    again: Sequence[SavedTensor] | None = None,
) -> None:
    """Raises CheckpointError where tensors differ between forward and recomputation.

    Args:
        name: Of the segment.
        where: Who recomputed, for the message.
        saved: From forward.
        digests: Of recomputed tensors, by position.
        again: All that is known of what the recomputation saved, for the message.
    """
    different = [i for i, digest in digests.items() if digest != saved[i].digest]
    if different:
        lines = [
            f"  tensor {index}, saved by {saved[index].op or 'a custom function'}: forward "
            f"{_shown(saved[index].layout, saved[index].digest)}, recomputed "
            f"{_shown((again or saved)[index].layout, digests[index])}"
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


def _shown(layout: Layout, digest: bytes) -> str:
    return f"{layout.dtype_name} {list(layout.shape)} on {layout.device} {digest.hex()[:12] or 'without digest'}"


def with_traces(error: CheckpointError, forward: Sequence[str], recomputation: Sequence[str]) -> CheckpointError:
    """The error with every op of both runs, each with the line of code that called it."""
    traces = f"Ops of forward:\n{_numbered(forward)}\n\nOps of recomputation:\n{_numbered(recomputation)}"
    return CheckpointError(f"{error.message}\n\n{traces}", **error.fields)


def _numbered(trace: Sequence[str]) -> str:
    return "\n".join(f"  {number:>4}  {line}" for number, line in enumerate(trace)) or "  none"

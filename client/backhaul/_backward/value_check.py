"""The value check: no gradient counts before a recomputation has given the bits of forward.

What is compared is all that autograd saved, or what the segment returned: see `Recording.compared`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.utils.checkpoint

from backhaul_runtime.errors import ValueCheckError
from backhaul_runtime.record.recording import SavedTensor
from backhaul_runtime.replay.replay import Contribution
from backhaul_runtime.tensors.layout import Layout
from backhaul_runtime.tensors.random_projection import drift, tolerance

_SHOWN = 5
_WORKER = "on the worker"


class CheckpointError(ValueCheckError, torch.utils.checkpoint.CheckpointError):
    """A recomputation gave other tensors than forward. It is also torch's CheckpointError, and so a RuntimeError."""


@dataclass(frozen=True, slots=True)
class Recomputed:
    """The tensors of a worker's replay that are compared: what autograd saved, or what the program returns.

    Attributes:
        digests: The digests of these tensors, in order.
        projections: The random projections of the saved tensors, if the worker computes other bits than this trainer;
            else empty.
    """

    digests: Sequence[bytes]
    projections: Sequence[Sequence[float]] = ()


def check_recomputed(name: str, saved: Sequence[SavedTensor], recomputed: Recomputed) -> float:
    """Compares tensors of forward with those of a worker: bit by bit, or within tolerances for other hardware.

    Args:
        name: The name of the segment, for messages.
        saved: The tensors of forward that are compared.
        recomputed: Those of the worker's replay.

    Returns:
        The drift; 0 if all bits are equal.

    Raises:
        CheckpointError: Tensors differ. The message shows both sides and the positions.
    """
    if not recomputed.projections:
        check_values(name, _WORKER, saved, recomputed.digests)
        return 0.0
    for given in (recomputed.digests, recomputed.projections):
        check_count(name, _WORKER, saved, len(given))
    # An empty digest proves nothing, so such a tensor is compared by its random projection as well.
    different = [i for i, digest in enumerate(recomputed.digests) if not digest or digest != saved[i].digest]
    drifts = {
        i: drift(saved[i].projection, recomputed.projections[i]) if saved[i].projection else math.inf for i in different
    }
    off = [i for i, value in drifts.items() if value > tolerance(saved[i].layout.dtype)]
    if off:
        lines = [
            f"  tensor {i}, saved by {saved[i].op}: {_shown(saved[i].layout, saved[i].digest)}, drift {drifts[i]:.2e}, "
            f"allowed {tolerance(saved[i].layout.dtype) if saved[i].projection else 0:.0e}"
            for i in off[:_SHOWN]
        ]
        raise CheckpointError(
            f"segment {name}: {len(off)} of {len(saved)} tensors differ between forward and recomputation on the "
            "worker by more than rounding on other hardware does:\n" + "\n".join(lines),
            segment=name,
            positions=off,
        )
    return max(drifts.values(), default=0.0)


def check_values(
    name: str,
    where: str,
    saved: Sequence[SavedTensor],
    digests: Sequence[bytes],
) -> None:
    """Compares tensors of forward with those of a recomputation.

    Args:
        name: The name of the segment, for messages.
        where: Where the recomputation ran, for the message.
        saved: The tensors of forward that are compared.
        digests: The digests of the recomputed tensors, in order.

    Raises:
        CheckpointError: Tensors differ. The message shows both sides and the positions.
    """
    check_count(name, where, saved, len(digests))
    check_digests(name, where, saved, dict(enumerate(digests)))


def check_count(name: str, where: str, saved: Sequence[SavedTensor], count: int) -> None:
    """Raises CheckpointError if a recomputation has more or fewer tensors to compare than forward."""
    if count != len(saved):
        verb = "returned" if any(one.is_returned for one in saved) else "saved"
        raise CheckpointError(
            f"segment {name}: forward {verb} {len(saved)} tensors, recomputation {where} {verb} {count}. Please report "
            "it with the function: the same ops ran both times",
            segment=name,
            saved_forward=len(saved),
            saved_recomputed=count,
        )


def check_uses(name: str, where: str, use_counts: Sequence[int], contributions: Sequence[Contribution]) -> None:
    """Raises CheckpointError if a recomputation's graph uses its sources at other places than forward's."""
    given = [contribution.source for contribution in contributions]
    due = [source for source, count in enumerate(use_counts) for _ in range(count)]
    if given != due:
        raise CheckpointError(
            f"segment {name}: recomputation {where} gave gradients for the sources {given}, one per use, but "
            f"forward had {due}. Please report it with the function",
            segment=name,
        )


def check_digests(
    name: str,
    where: str,
    saved: Sequence[SavedTensor],
    digests: Mapping[int, bytes],
) -> None:
    """Raises CheckpointError if tensors differ between forward and recomputation, or cannot be compared.

    Args:
        name: The name of the segment, for messages.
        where: Where the recomputation ran, for the message.
        saved: The tensors of forward.
        digests: The digests of the recomputed tensors, by position.
    """
    different = [i for i, digest in digests.items() if not digest or digest != saved[i].digest]
    if different:
        lines = [
            f"  tensor {index}, {_origin(saved[index])}: forward "
            f"{_shown(saved[index].layout, saved[index].digest)}, recomputed "
            f"{_shown(saved[index].layout, digests[index])}"
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


def _origin(saved: SavedTensor) -> str:
    return "returned" if saved.is_returned else f"saved by {saved.op or 'a custom function'}"


def _shown(layout: Layout, digest: bytes) -> str:
    return f"{layout.dtype_name} {list(layout.shape)} on {layout.device} {digest.hex()[:12] or 'without digest'}"


def with_traces(error: CheckpointError, forward: Sequence[str], recomputation: Sequence[str]) -> CheckpointError:
    """Adds all ops of both runs to an error, each with the line of code that called it."""
    traces = f"Ops of forward:\n{_numbered(forward)}\n\nOps of recomputation:\n{_numbered(recomputation)}"
    return CheckpointError(f"{error.message}\n\n{traces}", **error.fields)


def _numbered(trace: Sequence[str]) -> str:
    return "\n".join(f"  {number:>4}  {line}" for number, line in enumerate(trace)) or "  none"

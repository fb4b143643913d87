"""Recheck: the trainer computes a random share of the gradients that workers return a second time, and compares.

The value check compares what a worker recomputes of forward. Only a second computation shows whether the backward that
it runs is right: a damaged core, or bad intent, gives wrong gradients with right digests.

NOTE [Recheck]
1. An answer is drawn after it has arrived, by a hash whose key no worker knows. So no worker can behave well in just
   those that are drawn.
2. The trainer compares before autograd gets the gradients. If they differ, it computes them once more. If its own two
   results are equal, the worker was wrong: its gradients are replaced, and it is out of the session. If they differ in
   bits, as where a kernel adds in no fixed order, the worker's need only be near. If they differ by more than rounding
   does, the trainer cannot repeat its own computation, and nobody knows which gradients are right.
3. Gradients that the same worker has returned earlier in the same backward, and that were not drawn, may be in `.grad`
   already. So an error is raised when that backward ends. For accumulation blocks see NOTE [Deferred].
4. A gradient of a worker that is out does not count, although it was asked for before.
"""

import hashlib
import itertools
import math
import os
import threading
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from backhaul_runtime.errors import RecheckError, WorkerLostError
from backhaul_runtime.replay.replay import Contribution, sums_of, with_sums
from backhaul_runtime.tensors.random_projection import tolerance
from backhaul_runtime.torch_internals.private import backward_task_id, call_when_backward_ends

_RANGE = 1 << 64


def is_drawn(key: bytes, number: int, share: float) -> bool:
    """Whether a number from 0 to 2**64 - 1 belongs to a random share of all numbers, which the key chooses.

    The keyed hash is BLAKE2b (RFC 7693): who does not know the key cannot tell it from independent draws.

    Args:
        key: At most 64 bytes.
        number: The position of an answer in the session, for example.
        share: The probability, from 0 to 1.
    """
    digest = hashlib.blake2b(number.to_bytes(8, "little"), key=key, digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * _RANGE


class Rechecks:
    """What a session rechecks, and which workers it no longer believes. Thread-safe.

    Args:
        share: The share of the answers that are drawn, from 0 to 1.
        key: The key of the draws; None for one from the operating system, which is as it should be outside of tests.
    """

    def __init__(self, share: float, key: bytes | None = None) -> None:
        self._share, self._key = share, os.urandom(32) if key is None else key
        self._numbers = itertools.count()
        self._out: dict[str, str] = {}  # why a worker is out, by its address
        self._unchecked: dict[int, set[str]] = {}  # by backward, the workers whose gradients counted without a recheck
        self._lock = threading.Lock()  # guards both

    @property
    def out(self) -> dict[str, str]:
        """The addresses of the workers that were wrong, each with a sentence that says how."""
        with self._lock:
            return dict(self._out)

    def draws(self) -> bool:
        """Whether the answer that has just arrived is rechecked."""
        return is_drawn(self._key, next(self._numbers), self._share)

    def believe(self, worker: str, *, is_checked: bool) -> None:
        """Notes that gradients of a worker will count in the present backward.

        Raises:
            WorkerLostError: The worker is out, so they must not count (Rule 4).
        """
        with self._lock:
            if (why := self._out.get(worker)) is not None:
                raise WorkerLostError(why, status="LOST")
            if is_checked:
                return
            task = backward_task_id()
            if task not in self._unchecked:
                call_when_backward_ends(lambda: self._ended(task))
                self._unchecked[task] = set()
            self._unchecked[task].add(worker)

    def expel(self, worker: str, why: str) -> None:
        """Notes that a worker was wrong. If gradients of it have counted in the present backward, that raises an error.

        Args:
            worker: The address of the worker.
            why: What was wrong, in a sentence without a full stop.
        """
        with self._lock:
            self._out.setdefault(worker, why)
            is_late = worker in self._unchecked.get(backward_task_id(), ())
        if is_late:
            call_when_backward_ends(lambda: _raise_late(worker, why))

    def _ended(self, task: int) -> None:
        with self._lock:
            self._unchecked.pop(task, None)


def _raise_late(worker: str, why: str) -> None:
    raise RecheckError(
        f"{why}. In this backward gradients of the same worker have counted before, and they are in .grad now. Set the "
        "gradients to None and run forward and backward of this step again: the worker gets nothing any more",
        worker=worker,
    )


def differing(
    ours: Sequence[Contribution], theirs: Sequence[Contribution], summed: Collection[int], *, is_exact: bool
) -> tuple[int, float] | None:
    """Returns the source whose gradients differ most, and their relative distance; None if all are equal.

    Args:
        ours: The contributions that the trainer has computed, one for each use.
        theirs: Those of a worker, which has added up those of some sources.
        summed: The sources whose contributions the worker has added up.
        is_exact: Whether all bits must be equal. Otherwise a gradient may be as far away as a saved tensor, see
            `TOLERANCES`.
    """
    expected = with_sums(ours, sums_of(ours, summed))
    distances = [
        (_distance(mine.gradient, one.gradient, is_exact=is_exact), one.source)
        for mine, one in zip(expected, theirs, strict=True)
    ]
    distance, source = max(distances, default=(0.0, 0))
    return (source, distance) if distance else None


def _distance(ours: Tensor | None, theirs: Tensor | None, *, is_exact: bool) -> float:
    """Returns the norm of the difference over that of ours; 0 if the two count as equal, infinite if one is missing."""
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else math.inf
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return math.inf
    if _has_bits_of(ours, theirs):
        return 0.0
    wide = torch.complex128 if ours.is_complex() else torch.float64
    one, other = (tensor.detach().to(wide).nan_to_num() for tensor in (ours, theirs))
    norm, distance = one.norm().item(), (one - other).norm().item()
    relative = distance / norm if norm else math.inf
    if not is_exact and relative <= tolerance(ours.dtype) and torch.equal(ours.isfinite(), theirs.isfinite()):
        return 0.0
    return relative or math.ulp(0.0)  # bits may differ where numbers do not, as those of zeros


def _has_bits_of(ours: Tensor, theirs: Tensor) -> bool:
    return torch.equal(
        *(one.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for one in (ours, theirs))
    )

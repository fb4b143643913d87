"""Recheck: the trainer computes a random share of the gradients that workers return a second time, and compares.

The value check compares what a worker recomputes of forward. Only a second computation shows whether the backward that
it runs is right: a damaged core, or bad intent, gives wrong gradients with right digests.

NOTE [Recheck]
1. An answer is drawn after it has arrived, by a hash whose key no worker knows. So no worker can behave well in just
   those that are drawn.
2. The trainer compares before autograd gets the gradients. If they differ, it computes them once more. If its own two
   results are equal, the worker was wrong: its gradients are replaced, and it is out of the session. If they differ in
   bits, as where a kernel adds in no fixed order, or if the worker computes other bits, they need only be near. A third
   computation, whose inputs are moved by one rounding, shows how far rounding carries: the gradient of a bias before a
   norm, for example, is zero but for rounding. If the trainer's own two results differ by more than that, it cannot
   repeat its own computation, and nobody knows which gradients are right.
3. Gradients that the same worker has returned earlier, and that were not drawn, may be in `.grad` already. So each
   backward in which they count, in whatever thread, ends by an error. For accumulation blocks see NOTE [Deferred].
4. Of activations that are drawn the trainer takes digests when they have arrived. Those that the worker sends show only
   what it has computed.
5. A gradient of a worker that is out does not count, although it was asked for before.
"""

import hashlib
import itertools
import math
import os
import threading
import weakref
from collections.abc import Collection, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from backhaul_runtime.errors import RecheckError, WorkerLostError
from backhaul_runtime.replay.replay import Contribution, sums_of, with_sums
from backhaul_runtime.tensors.random_projection import tolerance
from backhaul_runtime.torch_internals.private import backward_task_id, call_when_backward_ends

_MOST = 0.01
"""The largest distance that counts as rounding, relative to the largest gradient of the segment."""
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
        # By backward, the workers whose gradients counted without a recheck. Its callback holds the set, so that the
        # set goes with the backward, also with one that an exception ends.
        self._unchecked: weakref.WeakValueDictionary[int, _Workers] = weakref.WeakValueDictionary()
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
            WorkerLostError: The worker is out, so they must not count (Rule 5).
        """
        with self._lock:
            if (why := self._out.get(worker)) is not None:
                raise WorkerLostError(why, status="LOST")
            if is_checked:
                return
            task = backward_task_id()
            if task == -1:  # an accumulation block calls no backward here, and asks for `out` when it ends
                return
            workers = self._unchecked.get(task)
            if workers is None:
                workers = self._unchecked[task] = _Workers()
                call_when_backward_ends(partial(self._ended, workers))
            workers.add(worker)

    def expel(self, worker: str, why: str) -> None:
        """Notes that a worker was wrong. Each backward in which gradients of it have counted ends by an error.

        Args:
            worker: The address of the worker.
            why: What was wrong, in a sentence without a full stop.
        """
        with self._lock:
            self._out.setdefault(worker, why)

    def _ended(self, workers: "_Workers") -> None:
        out = self.out
        for worker in workers & out.keys():
            # After what others have queued meanwhile, such as the end of a reduction of DistributedDataParallel.
            call_when_backward_ends(partial(_raise_late, worker, out[worker]))


class _Workers(set[str]):
    """Addresses of workers. Unlike a plain set it can be referred to weakly."""


def _raise_late(worker: str, why: str) -> None:
    raise RecheckError(
        f"{why}. In this backward gradients of the same worker have counted before, and they are in .grad now. Set the "
        "gradients to None and run forward and backward of this step again: the worker gets nothing any more",
        worker=worker,
    )


class Rounding(NamedTuple):
    """How far rounding carries in the backward of a segment.

    Attributes:
        shaken: The contributions from inputs that are moved by one rounding.
        largest: The largest norm of a gradient that enters or leaves the segment.
    """

    shaken: Sequence[Contribution]
    largest: float


def differing(
    ours: Sequence[Contribution],
    theirs: Sequence[Contribution],
    summed: Collection[int],
    *,
    is_exact: bool,
    rounding: Rounding | None = None,
) -> tuple[int, float] | None:
    """Returns the source whose gradients differ most, and their relative distance; None if all are equal.

    Args:
        ours: The contributions that the trainer has computed, one for each use.
        theirs: Those of a worker, which has added up those of some sources.
        summed: The sources whose contributions the worker has added up.
        is_exact: Whether all bits must be equal. Otherwise a gradient may be as far away as a saved tensor, see
            `TOLERANCES`.
        rounding: How far rounding carries. A gradient that one rounding of the inputs moves further, as where terms
            cancel, may be further away by the same factor, but not by more than `_MOST` of the largest gradient.
    """
    expected = with_sums(ours, sums_of(ours, summed))
    shaken = expected if rounding is None else with_sums(rounding.shaken, sums_of(rounding.shaken, summed))
    most = 0.0 if rounding is None else _MOST * rounding.largest
    distances = [
        (_beyond(one.gradient, other.gradient, moved.gradient, most, is_exact=is_exact), one.source)
        for one, other, moved in zip(expected, theirs, shaken, strict=True)
    ]
    distance, source = max(distances, default=(0.0, 0))
    return (source, distance) if distance else None


def norm_of(tensor: Tensor) -> float:
    """Returns the norm of those numbers of a gradient that are finite."""
    numbers = _real(tensor)
    return float(numbers.where(numbers.isfinite(), 0.0).norm())


def _beyond(ours: Tensor | None, theirs: Tensor | None, shaken: Tensor | None, most: float, *, is_exact: bool) -> float:
    """Returns the relative distance of two gradients; 0 if they count as equal, infinite if they can't be compared."""
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else math.inf
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return math.inf
    if _has_bits_of(ours, theirs):
        return 0.0
    distance, norm = _distance(ours, theirs)
    if not is_exact and distance < math.inf:
        allowed, eps = tolerance(ours.dtype), torch.finfo(ours.dtype).eps
        moved = 0.0 if shaken is None else _distance(ours, shaken)[0]
        if distance <= max(allowed * norm, min(allowed * moved / eps, most)):
            return 0.0
    if not distance:
        return math.ulp(0.0)  # bits may differ where numbers do not, as those of zeros
    return distance / norm if norm else math.inf


def _distance(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """Returns the norm of the difference, infinite if others of their elements are not finite, and the norm of ours."""
    one, other = map(_real, (ours, theirs))
    is_finite = one.isfinite() & other.isfinite()
    is_same = is_finite | (one == other) | (one.isnan() & other.isnan())
    one, other = one.where(is_finite, 0.0), other.where(is_finite, 0.0)
    largest = max(one.abs().amax().item(), other.abs().amax().item())
    if largest:  # squares of very large and very small numbers have no place in float64
        one, other = one / largest, other / largest
    distance = largest * (one - other).norm().item() if is_same.all() else math.inf
    return distance, largest * one.norm().item()


def _real(tensor: Tensor) -> Tensor:
    """Returns the numbers in float64, real and imaginary parts side by side."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.detach().to(torch.complex128).resolve_conj())
    return tensor.detach().to(torch.float64)


def _has_bits_of(ours: Tensor, theirs: Tensor) -> bool:
    return torch.equal(
        *(one.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for one in (ours, theirs))
    )

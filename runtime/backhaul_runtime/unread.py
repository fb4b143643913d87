"""Digests of tensors on an accelerator, which stay there until somebody needs their bytes.

Whoever takes a digest in forward must not wait for the device, and most are needed in backward only. On the host a
digest is its bytes; see NOTE [Staging] for how those of a device are read.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from backhaul_runtime.digest import content_digest, device_sums
from backhaul_runtime.layout import Layout, payload
from backhaul_runtime.staging import Mark, aside, marks


class Unread:
    """A digest that may still be on a device. Any thread may read it."""

    __slots__ = ("_found",)

    def __init__(self, read: Callable[[], bytes]) -> None:
        self._found: bytes | Callable[[], bytes] = read

    def read(self) -> bytes:
        """Its bytes. Waits for the device, the first time."""
        found = self._found
        if not isinstance(found, bytes):
            found = self._found = found()
        return found


Digest = bytes | Unread


def read(digest: Digest) -> bytes:
    """The bytes of a digest. Waits for the device where they are still there."""
    return digest if isinstance(digest, bytes) else digest.read()


def digest_of(make: Callable[[Layout, bytes], bytes], layout: Layout, content: Digest) -> Digest:
    """What `saved_digest` or `tensor_address` makes of a content digest, once that is read."""
    if isinstance(content, bytes):
        return make(layout, content)
    return Unread(lambda: make(layout, content.read()))


class ContentDigests:
    """Takes digests of contents in one call or replay. Those of accelerators are read together, when one is needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._on_device: dict[int, tuple[Tensor, Sequence[Mark]]] = {}
        self._read: dict[int, bytes] = {}

    def take(self, tensor: Tensor, layout: Layout) -> Digest:
        """As `content_digest`, but nobody waits for an accelerator. The tensor may change once this returns."""
        if not layout.is_on_accelerator:
            return content_digest(tensor, layout)
        sums = device_sums(payload(tensor.detach(), layout))
        number = self._count
        self._count += 1
        self._on_device[number] = sums, marks([sums])
        return Unread(partial(self._bytes, number))

    def _bytes(self, number: int) -> bytes:
        with self._lock:
            if number not in self._read:
                self._read_all()
            return self._read[number]

    def _read_all(self) -> None:
        waiting = dict(self._on_device)  # the call may still be taking more
        with aside([mark for _, made in waiting.values() for mark in made]):
            for device in {sums.device for sums, _ in waiting.values()}:
                here = {number: sums for number, (sums, _) in waiting.items() if sums.device == device}
                rows = torch.stack(list(here.values())).cpu()
                self._read |= {number: row.numpy().tobytes() for number, row in zip(here, rows, strict=True)}
        for number in waiting:
            del self._on_device[number]

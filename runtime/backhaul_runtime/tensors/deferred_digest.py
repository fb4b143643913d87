"""Digests of tensors on an accelerator, which stay there until their bytes are needed.

Code that takes a digest in forward must not wait for the device, and most digests are needed only in backward. On the
host a digest is its bytes. NOTE [Staging] says how digests on a device are read.
"""

import threading
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from functools import partial

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from backhaul_runtime.tensors.digest import content_digest, device_sums, read_sums
from backhaul_runtime.tensors.layout import Layout, layout_of, payload
from backhaul_runtime.tensors.staging import DeviceMoment, Side, device_moments, queued_aside
from backhaul_runtime.torch_internals.private import DisablePythonDispatcher, DisableTorchDispatch

KNOWN_BYTES = 1 << 16
"""Looking up the digest of a smaller tensor takes as long as computing it."""

KNOWN_USES = 64
"""After this number of uses a digest is computed again, so that damaged memory is noticed."""


class DeferredDigest:
    """A digest that may still be on a device. Thread-safe."""

    __slots__ = ("_digest",)

    def __init__(self, read: Callable[[], bytes]) -> None:
        self._digest: bytes | Callable[[], bytes] = read

    def read(self) -> bytes:
        """Returns the 16 bytes. The first call waits for the device."""
        digest = self._digest
        if not isinstance(digest, bytes):
            digest = self._digest = digest()
        return digest


Digest = bytes | DeferredDigest


def read(digest: Digest) -> bytes:
    """Returns the bytes of a digest. Waits for the device if they are still there."""
    return digest if isinstance(digest, bytes) else digest.read()


def digest_of(make: Callable[[Layout, bytes], bytes], layout: Layout, content: Digest) -> Digest:
    """Applies `saved_digest` or `tensor_address` to a content digest once that digest is read."""
    if isinstance(content, bytes):
        return make(layout, content)
    return DeferredDigest(lambda: make(layout, content.read()))


class KnownDigests:
    """Digests of stored tensors, whose contents never change: NOTE [Lent memory], Rule 5.

    One thread uses it. The tensors may be freed in any thread.
    """

    def __init__(self) -> None:
        self._digests: MutableMapping[Tensor, tuple[Digest, int]] = WeakTensorKeyDictionary()

    def of(self, tensor: Tensor, take: Callable[[], Digest]) -> Digest:
        """Returns the digest of a stored tensor. `take` computes it if unknown, and again every `KNOWN_USES` uses."""
        digest, uses = self._digests.get(tensor, (b"", 0))
        if uses % KNOWN_USES == 0:
            digest = take()
        self._digests[tensor] = digest, uses + 1
        return digest

    def note(self, tensor: Tensor, digest: Digest) -> None:
        """Notes the digest of a stored tensor, which was just computed."""
        if tensor.nbytes >= KNOWN_BYTES:
            self._digests[tensor] = digest, 1

    def forget(self, tensor: Tensor) -> None:
        """Makes the next use compute the digest of a stored tensor again."""
        self._digests.pop(tensor, None)


class ContentDigests:
    """Takes digests of contents in one call or replay. Those on accelerators are read together when one is needed.

    Args:
        known: Digests of `stored` from earlier calls.
        stored: Tensors whose contents never change.
    """

    def __init__(self, known: KnownDigests | None = None, stored: Iterable[Tensor] = ()) -> None:
        self._known = known
        places = ((_place(tensor, layout_of(tensor)), tensor) for tensor in stored if tensor.nbytes >= KNOWN_BYTES)
        self._stored = {key: tensor for key, tensor in places if key is not None}
        self._sums = _DeviceSums()

    def take(self, tensor: Tensor, layout: Layout) -> Digest:
        """Works as `content_digest`, but does not wait for an accelerator. The tensor may be changed afterwards.

        Dispatch modes do not see the ops that compute digests.
        """
        if self._known is not None and self._stored and (key := _place(tensor, layout)) in self._stored:
            return self._known.of(self._stored[key], lambda: self._take(tensor, layout))
        return self._take(tensor, layout)

    def forget(self) -> None:
        """Makes later uses compute the digests of all stored tensors again, also in other replays."""
        if self._known is not None:
            for tensor in self._stored.values():
                self._known.forget(tensor)

    def _take(self, tensor: Tensor, layout: Layout) -> Digest:
        if layout.is_dense_on_host:  # no op runs
            return content_digest(tensor, layout)
        with DisablePythonDispatcher(), DisableTorchDispatch():
            return self._sums.take(tensor, layout) if layout.is_on_accelerator else content_digest(tensor, layout)


class _DeviceSums:
    """Sums of tensors on accelerators that are read together. Digests refer to it, so it must not refer to tensors."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the sums of all devices
        self._count = 0
        self._on_device: dict[int, tuple[Tensor, Sequence[DeviceMoment]]] = {}
        self._read: dict[int, bytes] = {}

    def take(self, tensor: Tensor, layout: Layout) -> DeferredDigest:
        sums = device_sums(payload(tensor.detach(), layout))
        number = self._count
        self._count += 1
        self._on_device[number] = sums, device_moments([sums])
        return DeferredDigest(partial(self._bytes, number))

    def _bytes(self, number: int) -> bytes:
        with self._lock:
            if number not in self._read:
                self._read_all()
            return self._read[number]

    def _read_all(self) -> None:
        waiting = dict(self._on_device)  # the call may add further ones meanwhile
        # Each reading waits for its device itself, so nothing is left to wait for afterwards.
        with queued_aside(Side.DIGESTS, [mark for _, made in waiting.values() for mark in made]):
            for device in {sums.device for sums, _ in waiting.values()}:
                here = {number: sums for number, (sums, _) in waiting.items() if sums.device == device}
                self._read |= zip(here, read_sums(list(here.values())), strict=True)
        for number in waiting:
            del self._on_device[number]


def _place(tensor: Tensor, layout: Layout) -> tuple[int, int] | None:
    """Returns the range of bytes that a content digest covers; None if it leaves out gaps."""
    return (tensor.data_ptr(), layout.span_bytes) if layout.payload_bytes == layout.span_bytes else None

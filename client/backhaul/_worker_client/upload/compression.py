"""Decides which tensors are sent as differences from their previous versions, and keeps copies of those versions.

NOTE [Previous versions]
1. A tensor is known by its memory and layout. If its memory is used for another tensor meanwhile, the difference is
   large but exact: a base is named by the digest of its contents, and the worker checks the digest of the result.
2. The first time that a tensor is sent, only that is noted: most tensors never change. The second time a copy is made,
   and from the third time on the difference from the copy is sent, if the worker still has that version.
3. A copy is changed in place, block by block, while its difference is sent. Until all blocks were sent its address is
   empty, so an upload that breaks off leaves a copy that is never used as a base.
4. Copies are bounded in bytes for all workers of a session. If there is no room for one, those that were not used since
   this tensor was last sent are dropped; otherwise the tensor is sent whole. All are dropped while the machine is short
   of memory.
5. Whatever goes wrong, the whole tensor is sent. A worker that refuses n uploads with differences in a row gets whole
   tensors in the next 2**n uploads. Copies are brought up to date meanwhile.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic, thread_time

import numpy as np
import torch
import xxhash
from torch import Tensor

from backhaul_runtime.process.resources import available_memory
from backhaul_runtime.tensors.differences import BLOCK_BYTES, BlockDecoder, BlockEncoder, Bytes
from backhaul_runtime.tensors.digest import address_of, tensor_address
from backhaul_runtime.tensors.layout import Layout, host_bytes
from backhaul_runtime.tensors.staging import wait_for
from backhaul_runtime.wire.tensor_batches import OutgoingTensor, in_order, may_differ, width_in

logger = logging.getLogger("backhaul")
SMALLEST_BYTES = 4 << 10
"""A smaller tensor takes less time to send than to compress."""

THIN_BYTES_PER_S = 150e6
"""The rate of a link in bytes/s above which differences have never saved time. No copies are kept for faster links."""

LINK_BYTES = 1 << 20
"""Sending fewer bytes takes mostly the time of round trips, so it does not tell how thin the link is."""

FEWEST_RATES, MAX_RATES = 3, 8
"""The number of large uploads before the rate of a link is known, and of the last ones that determine it."""

MARGIN = 2.0
"""How many times the CPU time of a difference the saved time must be. That CPU time may be missing elsewhere."""

RESTING = 16
"""The number of versions of a tensor that are sent whole after its difference was not worth sending."""

WARNED_FAILURES = 3
"""The number of refused uploads in a row that a warning is logged for. One can happen after an eviction."""

LONGEST_PAUSE = 1 << 10
MOST_NOTED = 1 << 16
SHORT_OF_MEMORY = 0.05
"""The part of the machine's memory that must be available. With less, copies are dropped."""

_CHECK_S = 1.0


class CopyMemory:
    """The memory that all workers of a session may use for copies of previous versions. Thread-safe.

    Args:
        limit_bytes: The most bytes of all copies together.

    Attributes:
        used_bytes: The bytes of the present copies.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()  # guards `used_bytes`
        self.used_bytes = 0

    def take(self, size_bytes: int) -> bool:
        """Takes bytes for a copy. Returns whether there was room."""
        with self._lock:
            has_room = self.used_bytes + size_bytes <= self._limit_bytes
            self.used_bytes += size_bytes if has_room else 0
            return has_room

    def give_back(self, size_bytes: int) -> None:
        """Gives back the bytes of a copy that was dropped."""
        with self._lock:
            self.used_bytes -= size_bytes


@dataclass(eq=False, slots=True)
class _Version:
    """The version of a tensor that was sent last.

    Attributes:
        used: The number of the upload in which the tensor was last sent.
        copy: The bytes of that version, uint8 [n] on the host; None if no copy is kept.
        address: The address of the copy; empty while the copy does not hold a whole version.
        ratio: The bytes of the tensor over those of its last difference; 0 if it is unknown.
        resting: How many of the next versions are sent whole without trying.
    """

    used: int
    copy: Tensor | None = None
    address: bytes = b""
    ratio: float = 0.0
    resting: int = 0


class _Costs:
    """The CPU time of differences, in seconds per byte of the tensor."""

    def __init__(self) -> None:
        self.encode_s = self.decode_s = 0.0

    def encoded(self, size_bytes: int, took_s: float) -> None:
        """Adds a measurement of encoding."""
        now = took_s / size_bytes
        self.encode_s = (7 * self.encode_s + now) / 8 if self.encode_s else now

    @property
    def total_s(self) -> float:
        """Encoding here and decoding on the worker, which is assumed to be as fast."""
        return self.encode_s + self.decode_s


class TensorDifference:
    """The difference of a tensor from the copy of its previous version. It brings the copy up to date as it is sent.

    Args:
        outgoing: The whole tensor, with its address.
        version: The copy that it differs from.
        encoder: The encoder of the blocks.
        costs: Gets the CPU time of encoding.

    Attributes:
        base: The address of the previous version.
        encoded_bytes: Bytes of the frames so far.
        took_s: CPU time of encoding so far, in seconds.
    """

    def __init__(self, outgoing: OutgoingTensor, version: _Version, encoder: BlockEncoder, costs: _Costs) -> None:
        self.base = version.address
        self.encoded_bytes = 0
        self.took_s = 0.0
        self._outgoing = outgoing
        self._version = version
        self._encoder = encoder
        self._costs = costs

    @property
    def spared_bytes(self) -> int:
        """Bytes of the whole tensor minus those of the frames."""
        return self._outgoing.layout.payload_bytes - self.encoded_bytes

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """See `EncodedDifference`."""
        version, layout = self._version, self._outgoing.layout
        assert version.copy is not None
        version.address, width = b"", width_in(layout)
        for offset, now, before in _blocks(self._outgoing, version.copy):
            began = thread_time()
            frame = self._encoder.encode(now, before, width)
            np.copyto(before, now)
            took_s = thread_time() - began
            self._costs.encoded(len(now), took_s)
            self.took_s += took_s
            self.encoded_bytes += len(frame)
            yield offset, frame
        version.address = self._outgoing.address
        version.ratio = layout.payload_bytes / self.encoded_bytes


def _blocks(outgoing: OutgoingTensor, copy: Tensor) -> Iterator[tuple[int, Bytes, Bytes]]:
    """Yields each block's offset, a snapshot of its present bytes, and the bytes of the copy, which may be written."""
    offset, target = 0, host_bytes(copy)
    for _, data, complete in in_order(outgoing):
        wait_for(complete)
        for start in range(0, len(data), BLOCK_BYTES):
            # A snapshot, because the tensor may be written to between encoding the block and copying it.
            now = np.frombuffer(data[start : start + BLOCK_BYTES], np.uint8).copy()
            yield offset, now, np.frombuffer(target[offset : offset + len(now)], np.uint8)
            offset += len(now)


class Compression:
    """Decides for one worker which tensors are sent as differences. One thread at a time uses it.

    Args:
        mode: The setting `compression`: "auto", "on" or "off".
        memory: The memory for copies.
    """

    def __init__(self, mode: str, memory: CopyMemory) -> None:
        self._mode = mode
        self._memory = memory
        self._versions: dict[tuple[int, Layout], _Version] = {}
        self._upload = 0
        self._encoder = BlockEncoder()
        self._costs = _Costs()
        self._failures = self._paused = 0
        self._checked_at_s = -_CHECK_S
        self._is_short = False
        self._rates: deque[float] = deque(maxlen=MAX_RATES)

    @property
    def bytes_per_s(self) -> float:
        """The rate of the link in bytes/s; 0 while it is unknown. The fastest upload counts: busy cores slow others."""
        return max(self._rates) if len(self._rates) >= FEWEST_RATES else 0.0

    def begin(self) -> None:
        """Begins an upload, to which the following calls of `outgoing` belong."""
        self._upload += 1

    def outgoing(
        self, outgoing: OutgoingTensor, knows: Callable[[bytes], bool], *, crosses_network: bool
    ) -> OutgoingTensor:
        """Returns a tensor as it should be sent: unchanged, or as a difference.

        A difference always has an address, which the trainer computes if `outgoing` has none.

        Args:
            outgoing: A tensor that later segments may name, as it would be sent whole.
            knows: Returns whether the worker stores a tensor, by its address.
            crosses_network: Whether the worker is reached over TCP, without shared memory.
        """
        layout = outgoing.layout
        if not self._is_used(crosses_network=crosses_network):  # the copies would take memory for nothing
            self.close()
            return outgoing
        # A copy and a comparison would cost more than they spare.
        if layout.payload_bytes < SMALLEST_BYTES or not may_differ(layout):
            return outgoing
        key = (outgoing.tensor.data_ptr(), layout)
        version = self._versions.pop(key, None)
        last_used = version.used if version is not None else self._upload
        self._versions[key] = entry = version or _Version(0)  # the order of the dict is that of the last use
        entry.used = self._upload
        if len(self._versions) > MOST_NOTED:  # tensors that were freed are never met again
            self._drop_oldest()
        if last_used == self._upload:  # it is new, or has two sources in this upload, which cannot share the copy
            return outgoing
        if entry.resting:  # its last difference took longer than the whole tensor
            entry.resting -= 1
            return outgoing
        # Without a whole copy of what the worker has, there is nothing to make a difference to.
        if self._paused or not entry.address or not knows(entry.address):
            self._keep(entry, outgoing, last_used)
            return outgoing
        if self._mode == "auto" and not self._wins(entry, outgoing):
            self._drop(entry)
            entry.ratio, entry.resting = 0.0, RESTING
            return outgoing
        address = outgoing.address or address_of(outgoing.tensor)  # its digest is not taken twice
        whole = OutgoingTensor(outgoing.tensor, layout, address)
        difference = TensorDifference(whole, entry, self._encoder, self._costs)
        return OutgoingTensor(outgoing.tensor, layout, address, difference=difference)

    def sent(self, size_bytes: int, took_s: float, *, has_differences: bool = False) -> None:
        """Notes that the worker has accepted an upload.

        Args:
            size_bytes: The bytes that were sent.
            took_s: The seconds that this took, without encoding.
            has_differences: Whether differences were among the tensors.
        """
        if has_differences:
            self._failures = 0
        else:
            self._paused = max(0, self._paused - 1)
        if size_bytes >= LINK_BYTES:
            self._rates.append(size_bytes / max(took_s, 1e-6))

    def failed(self, why: BaseException) -> None:
        """Notes that the worker has not accepted an upload with differences, which is repeated with whole tensors."""
        self._failures += 1
        self._paused = 1 + min(2**self._failures, LONGEST_PAUSE)  # the repetition counts too
        if self._failures == WARNED_FAILURES:
            logger.warning(
                "A worker refused compressed parameters %d times in a row: %s. They are sent whole for a while.",
                self._failures,
                why,
            )

    def close(self) -> None:
        """Drops all copies."""
        for version in self._versions.values():
            self._drop(version)
        self._versions.clear()

    def _is_used(self, *, crosses_network: bool) -> bool:
        if self._mode == "off":
            return False
        if self._mode == "auto" and not (crosses_network and 0 < self.bytes_per_s <= THIN_BYTES_PER_S):
            return False
        if monotonic() - self._checked_at_s > _CHECK_S:
            self._checked_at_s, self._is_short = monotonic(), available_memory() < SHORT_OF_MEMORY
        return not self._is_short

    def _wins(self, version: _Version, outgoing: OutgoingTensor) -> bool:
        """Whether a difference takes less time than the whole tensor. Encodes one block if nothing is known."""
        if not version.ratio or not self._costs.decode_s:
            assert version.copy is not None
            _, now, before = next(_blocks(outgoing, version.copy))
            width, began = width_in(outgoing.layout), thread_time()
            frame = self._encoder.encode(now, before, width)
            encoded = thread_time()
            BlockDecoder().decode(frame, before, width)
            self._costs.encoded(len(now), encoded - began)
            self._costs.decode_s = (thread_time() - encoded) / len(now)
            version.ratio = len(now) / len(frame)
        spared_s = (1 - 1 / version.ratio) / self.bytes_per_s
        return spared_s > MARGIN * self._costs.total_s

    def _keep(self, version: _Version, outgoing: OutgoingTensor, last_used: int) -> None:
        """Copies the present version of a tensor, if there is room (Rule 4)."""
        size, version.address = outgoing.layout.payload_bytes, b""
        if version.copy is None:
            if not self._take(size, last_used):
                return
            try:
                version.copy = torch.empty(size, dtype=torch.uint8, device="cpu")
            except (RuntimeError, MemoryError):  # torch raises RuntimeError if the system has no memory
                self._memory.give_back(size)
                self.close()
                return
        for _, now, before in _blocks(outgoing, version.copy):
            np.copyto(before, now)
        # The digest of a tensor on an accelerator is another function, which only the accelerator computes.
        version.address = (
            outgoing.address
            if outgoing.layout.is_on_accelerator
            else tensor_address(outgoing.layout, xxhash.xxh3_128_digest(host_bytes(version.copy)))
        )

    def _take(self, size_bytes: int, last_used: int) -> bool:
        while not self._memory.take(size_bytes):
            stale = next((version for version in self._versions.values() if version.copy is not None), None)
            if stale is None or stale.used >= last_used:
                return False
            self._drop(stale)
        return True

    def _drop(self, version: _Version) -> None:
        if version.copy is not None:
            self._memory.give_back(version.copy.numel())
        version.copy, version.address = None, b""

    def _drop_oldest(self) -> None:
        key = next(iter(self._versions))
        self._drop(self._versions.pop(key))

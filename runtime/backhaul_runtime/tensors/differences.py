"""Encodes the change of a tensor from one version to the next, exactly and in fewer bytes. Does not import torch.

NOTE [Differences]
1. A tensor is split into blocks of `BLOCK_BYTES`. Each block is one zstd frame, so it is encoded and decoded with
   bounded memory, and blocks can be sent while later ones are encoded.
2. In a block the old elements are subtracted from the new ones, as integers of their width modulo 2**bits. The sign
   moves to the lowest bit, so that small changes in both directions give small numbers. Then the lowest bytes of all
   elements come first, and so on up to the highest bytes, which are nearly all zero. This is exact for any bytes.
3. A frame comes from a client, and nothing in it is trusted. Before anything is decompressed its header must name
   exactly the size of the block. Frames with a dictionary or a larger window, frames that may be skipped, several
   frames, and truncated frames are refused. So no frame produces more bytes than the tensor was declared with.
4. A frame that passes these checks may still decode to other bytes. The receiver compares the digest of the whole
   tensor with the address that was declared for it, and uses the tensor only if they are equal.
"""

import threading
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from backhaul_runtime.errors import TransferError

BLOCK_BYTES = 256 << 10
"""Bytes of a tensor per frame. Blocks of 128 KiB and 1 MiB reach the same ratio; larger ones leave the CPU's cache."""

LEVEL = 1
"""The zstd level. Level 3 takes more time and compresses at most 1 % better; negative levels compress less."""

MAX_FRAME_BYTES = BLOCK_BYTES + (BLOCK_BYTES >> 8) + 1024
"""The largest frame of a block in bytes: zstd's bound for a block that cannot be compressed, and some more."""

_MAGIC = b"\x28\xb5\x2f\xfd"
_UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
Bytes = NDArray[np.uint8]


def width_of(itemsize: int, *, is_complex: bool = False) -> int:
    """Returns the bytes of one number of a dtype: 1, 2, 4 or 8."""
    return itemsize // 2 if is_complex else itemsize


class BlockEncoder:
    """Encodes blocks of tensors. Thread-safe.

    gRPC takes the messages of an upload in a thread of its own. When the upload breaks off, that thread may still
    encode a block while the next upload begins. The process crashes if two threads use one compressor of zstandard at
    once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards `_compressor`
        self._compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True, write_checksum=False)

    def encode(self, now: Bytes, before: Bytes, width: int) -> bytes:
        """Returns the frame of a block.

        Args:
            now: The new bytes of the block, uint8 [n] with n at most `BLOCK_BYTES` and a multiple of `width`.
            before: The old bytes of the block, uint8 [n].
            width: The bytes of one number, see `width_of`.
        """
        kind = _UNSIGNED[width]
        change = now.view(kind) - before.view(kind)
        sign = change >> kind(8 * width - 1)
        folded = (change << kind(1)) ^ (kind(0) - sign)
        planes = np.ascontiguousarray(folded.view(np.uint8).reshape(-1, width).T)
        with self._lock:
            return self._compressor.compress(planes.data)


class BlockDecoder:
    """Decodes blocks of tensors. One thread at a time uses it."""

    def __init__(self) -> None:
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=BLOCK_BYTES)

    def decode(self, frame: bytes | memoryview, before: Bytes, width: int) -> Bytes:
        """Returns the new bytes of a block, uint8 [n], owned by the caller.

        Args:
            frame: The frame from `BlockEncoder.encode`. It may come from an attacker.
            before: The old bytes of the block, uint8 [n] with n at most `BLOCK_BYTES`.
            width: The bytes of one number, see `width_of`.

        Raises:
            TransferError: The frame does not yield exactly n bytes, or is of a kind that no encoder here writes.
        """
        size = len(before)
        check_frame(frame, size)
        try:
            data = self._decompressor.decompress(frame, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise TransferError(f"a compressed block of {size} bytes cannot be read: {error}") from None
        if len(data) != size:
            raise TransferError(f"a compressed block has {len(data)} bytes instead of {size}")
        kind = _UNSIGNED[width]
        planes = np.frombuffer(data, np.uint8).reshape(width, -1)
        columns = np.empty((size // width, width), np.uint8)
        for position, plane in enumerate(planes):  # copying the transposed array takes five times as long
            columns[:, position] = plane
        folded = columns.reshape(-1).view(kind)
        change = (folded >> kind(1)) ^ (kind(0) - (folded & kind(1)))
        now: Bytes = (before.view(kind) + change).view(np.uint8)
        return now


def check_frame(frame: bytes | memoryview, size_bytes: int) -> None:
    """Checks a frame's header before anything is decompressed (Rule 3).

    Raises:
        TransferError: The frame is no single plain zstd frame with exactly this many bytes of content.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise TransferError(f"a compressed block has {len(frame)} bytes, more than {MAX_FRAME_BYTES}")
    if bytes(frame[:4]) != _MAGIC:  # a frame that may be skipped has another magic number
        raise TransferError("a compressed block does not begin with a zstd frame")
    try:
        header = zstandard.get_frame_parameters(frame)
    except zstandard.ZstdError as error:
        raise TransferError(f"a compressed block has no valid zstd header: {error}") from None
    if header.content_size != size_bytes:
        raise TransferError(f"a compressed block declares {header.content_size} bytes instead of {size_bytes}")
    if header.dict_id:
        raise TransferError(f"a compressed block needs the dictionary {header.dict_id}")
    if header.window_size > max(size_bytes, 1024):
        raise TransferError(f"a compressed block needs a window of {header.window_size} bytes for {size_bytes}")

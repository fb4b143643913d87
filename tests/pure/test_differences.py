"""The encoding of differences: exact for any bytes, and safe against any frame."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from backhaul_runtime.errors import TransferError
from backhaul_runtime.tensors.differences import (
    BLOCK_BYTES,
    MAX_FRAME_BYTES,
    BlockDecoder,
    BlockEncoder,
    width_of,
)

WIDTHS = st.sampled_from([1, 2, 4, 8])
SIZE = 1 << 12


def numbers(values: Any) -> Any:
    return np.frombuffer(bytes(values), np.uint8)


BEFORE = numbers(random.Random(0).randbytes(SIZE))
NOW = (BEFORE.view(np.uint16) + np.uint16(1)).view(np.uint8)


@given(width=WIDTHS, data=st.data())
def test_any_bytes_come_back(width: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 40)) * width
    now, before = (numbers(data.draw(st.binary(min_size=count, max_size=count))) for _ in range(2))
    frame = BlockEncoder().encode(now, before, width)
    assert BlockDecoder().decode(frame, before, width).tobytes() == now.tobytes()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_a_block_that_cannot_be_compressed_is_no_larger_than_a_frame_may_be(width: int) -> None:
    now, before = (numbers(random.Random(seed).randbytes(BLOCK_BYTES)) for seed in (1, 2))
    frame = BlockEncoder().encode(now, before, width)
    assert BLOCK_BYTES < len(frame) <= MAX_FRAME_BYTES
    assert BlockDecoder().decode(frame, before, width).tobytes() == now.tobytes()


@pytest.mark.parametrize("step", [1, -1])
def test_small_changes_in_either_direction_take_few_bytes(step: int) -> None:
    before = numbers(random.Random(3).randbytes(BLOCK_BYTES)).view(np.uint16) // np.uint16(2) + np.uint16(8)
    now = (before.astype(np.int32) + step).astype(np.uint16)
    assert len(BlockEncoder().encode(now.view(np.uint8), before.view(np.uint8), 2)) < BLOCK_BYTES // 1000


@given(frame=st.binary(max_size=200), position=st.integers(0, 40), flipped=st.integers(1, 255), is_random=st.booleans())
def test_any_other_frame_is_refused_or_yields_as_many_bytes(
    frame: bytes, position: int, flipped: int, is_random: bool
) -> None:
    if not is_random:
        damaged = bytearray(BlockEncoder().encode(NOW, BEFORE, 2))
        damaged[position % len(damaged)] ^= flipped
        frame = bytes(damaged)
    try:
        result = BlockDecoder().decode(frame, BEFORE, 2)
    except TransferError:
        return
    assert len(result) == len(BEFORE)


def frame_of(content: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(level=1, **options).compress(content)


def streamed(content: bytes) -> bytes:
    """A frame that does not say how many bytes it holds."""
    compressor = zstandard.ZstdCompressor(level=1).compressobj()
    return compressor.compress(content) + compressor.flush()


def with_declared_size(size: int) -> bytes:
    """A frame of SIZE bytes that declares another number of them, in the two bytes after the header's descriptor."""
    frame = bytearray(frame_of(bytes(SIZE)))
    assert zstandard.get_frame_parameters(bytes(frame)).content_size == SIZE
    frame[5:7] = (size - 256).to_bytes(2, "little")
    assert zstandard.get_frame_parameters(bytes(frame)).content_size == size
    return bytes(frame)


def dictionary() -> zstandard.ZstdCompressionDict:
    samples = [random.Random(seed).randbytes(40) * 4 for seed in range(200)]
    return zstandard.train_dictionary(2_000, list(samples))


SKIPPABLE = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
GOOD = frame_of(bytes(SIZE))
BAD = {
    "nothing": b"",
    "no frame": b"x" * 40,
    "only a magic number": GOOD[:4],
    "a cut header": GOOD[:6],
    "a cut frame": GOOD[:-1],
    "bytes after the frame": GOOD + b"x",
    "two frames": GOOD + GOOD,
    "an empty frame after the frame": GOOD + frame_of(b""),
    "a frame that may be skipped": SKIPPABLE,
    "one of the right size": b"\x50\x2a\x4d\x18" + SIZE.to_bytes(4, "little") + bytes(SIZE),
    "one before the frame": SKIPPABLE + GOOD,
    "one after the frame": GOOD + SKIPPABLE,
    "no declared size": streamed(bytes(SIZE)),
    "more bytes": frame_of(bytes(SIZE + 1)),
    "fewer bytes": frame_of(bytes(SIZE - 1)),
    "a bomb": frame_of(bytes(1 << 28)),
    "a bomb that declares the right size": with_declared_size(SIZE + 64),
    "a dictionary": frame_of(bytes(SIZE), dict_data=dictionary()),
    "too long": frame_of(random.Random(1).randbytes(SIZE)) + bytes(MAX_FRAME_BYTES),
}


@pytest.mark.parametrize("name", BAD)
def test_a_frame_that_no_encoder_writes_is_refused(name: str) -> None:
    before = np.zeros(SIZE + 64 if "declares" in name else SIZE, np.uint8)
    with pytest.raises(TransferError):
        BlockDecoder().decode(BAD[name], before, 2)
    assert BlockDecoder().decode(GOOD, np.zeros(SIZE, np.uint8), 2).tobytes() == bytes(SIZE)


class _Untouched:
    """A decompressor that must not be used."""

    def decompress(self, *_: Any, **__: Any) -> bytes:
        raise AssertionError("something was decompressed")


def large_window() -> bytes:
    """A frame whose header declares the right size and a window of 16 MiB."""
    descriptor = 0x40  # two bytes of content size, and a byte for the window
    return GOOD[:4] + bytes([descriptor, (24 - 10) << 3]) + (SIZE - 256).to_bytes(2, "little") + GOOD[7:]


BY_THEIR_HEADER = {
    **{name: frame for name, frame in BAD.items() if "frame after" not in name and "after the frame" not in name},
    "a large window": large_window(),
}
for _name in ("a cut frame", "two frames", "a bomb that declares the right size"):
    del BY_THEIR_HEADER[_name]  # the header is right


@pytest.mark.parametrize("name", BY_THEIR_HEADER)
def test_a_header_is_refused_before_anything_is_decompressed(name: str) -> None:
    decoder = BlockDecoder()
    decoder._decompressor = _Untouched()  # type: ignore[assignment]
    with pytest.raises(TransferError):
        decoder.decode(BY_THEIR_HEADER[name], np.zeros(SIZE, np.uint8), 2)


def test_a_larger_window_than_the_block_is_refused() -> None:
    options = zstandard.ZstdCompressionParameters(window_log=24, write_content_size=True)
    compressor = zstandard.ZstdCompressor(compression_params=options)
    with compressor.stream_writer(cast(Any, sink := _Sink()), size=1 << 24) as writer:
        writer.write(bytes(1 << 24))
    assert zstandard.get_frame_parameters(bytes(sink)).window_size == 1 << 24
    with pytest.raises(TransferError):
        BlockDecoder().decode(bytes(sink), np.zeros(SIZE, np.uint8), 2)


class _Sink(bytearray):
    """A file that keeps what is written."""

    def write(self, data: bytes) -> int:
        self += data
        return len(data)


@pytest.mark.parametrize(
    ("itemsize", "is_complex", "width"), [(2, False, 2), (4, True, 2), (8, True, 4), (16, True, 8)]
)
def test_complex_numbers_are_two_numbers(itemsize: int, is_complex: bool, width: int) -> None:
    assert width_of(itemsize, is_complex=is_complex) == width


class OneAtATime:
    """A compressor that refuses what crashes zstandard's: a second thread while one compresses."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor()
        self._busy = threading.Lock()

    def compress(self, data: memoryview) -> bytes:
        assert self._busy.acquire(blocking=False), "two threads compress at once"
        try:
            return self._compressor.compress(data)  # other threads run meanwhile
        finally:
            self._busy.release()


def test_the_thread_of_an_upload_that_broke_off_may_still_encode() -> None:
    encoder = BlockEncoder()
    vars(encoder)["_compressor"] = OneAtATime()
    before = numbers(random.Random(1).randbytes(BLOCK_BYTES))
    now = (before.view(np.uint16) + np.uint16(3)).view(np.uint8)

    def encode(_: int) -> bytes:
        return encoder.encode(now, before, 2)

    with ThreadPoolExecutor(4) as threads:
        frames = set(threads.map(encode, range(200)))
    (frame,) = frames
    assert BlockDecoder().decode(frame, before, 2).tobytes() == now.tobytes()

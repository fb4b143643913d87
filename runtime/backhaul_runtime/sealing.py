"""The checksum that ends every message between a trainer and a worker.

NOTE [Seal]
1. A sealed message is an encoded protobuf message followed by one more of its fields, `fixed64 checksum`, which holds
   the xxh3_64 of all bytes before that field. So it is still a message of the same type, and any stub can parse it.
2. The receiver compares the field's tag and the checksum before it parses anything. It refuses a message that does
   not end with the field: otherwise one flipped bit in the tag would disable the check.
3. gRPC replaces any exception of a deserializer by an error without the reason. So the deserializers of `splicing`
   return a refused message as a TransferError, and the code that takes the message raises it with `accepted`.

This module imports neither torch nor gRPC.
"""

from collections.abc import Iterable

import xxhash

FIELD_NUMBER = 1000
"""The number of the field `checksum` in every request and response of every service."""

_KEY = FIELD_NUMBER << 3 | 1  # wire type 1: eight bytes follow
_TAG = bytes([_KEY & 0x7F | 0x80, _KEY >> 7])
_CHECKSUM_BYTES = 8
SEAL_BYTES = len(_TAG) + _CHECKSUM_BYTES


def sealed(parts: Iterable[bytes | memoryview]) -> bytes:
    """Joins the parts of an encoded message and appends the seal. Copies and hashes each byte once."""
    parts, checksum = list(parts), xxhash.xxh3_64()
    for part in parts:
        checksum.update(part)
    return b"".join((*parts, _TAG, checksum.intdigest().to_bytes(_CHECKSUM_BYTES, "little")))


def is_sealed(data: bytes) -> bool:
    """Returns whether the bytes end with a seal whose checksum matches the bytes before it (Rule 2)."""
    end = len(data) - SEAL_BYTES
    if end < 0 or data[end : end + len(_TAG)] != _TAG:
        return False
    checksum = int.from_bytes(data[end + len(_TAG) :], "little")
    return xxhash.xxh3_64_intdigest(memoryview(data)[:end]) == checksum

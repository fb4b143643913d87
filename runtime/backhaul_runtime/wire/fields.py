"""Counts the fields of an encoded message before protobuf reads it.

Two bytes on the wire are enough for an empty submessage, which takes thirty times as much in memory. So the size of a
message says little of what it costs. This reads tags and lengths only, and stops at the first field beyond a limit.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from google.protobuf.message import Message

_WIDTHS = {0: 0, 1: 8, 5: 4}  # by wire type; a varint has its own
_VARINT, _BYTES = 0, 2
_ONE_BYTE = 0x80


def has_more_fields(data: bytes, kind: type[Message], most: int) -> bool:
    """Whether a message, with the messages in it, has more than so many fields. A packed list of numbers is one.

    Args:
        data: An encoded message. Where it is malformed counting ends: protobuf will refuse it.
        kind: The class of the message.
        most: The number of fields at which counting ends.
    """
    count = 0
    waiting = [(0, len(data), kind.DESCRIPTOR)]
    try:
        while waiting:
            at, end, message = waiting.pop()
            inner = _messages_in(message)
            while at < end:
                count += 1
                if count > most:
                    return True
                tag, at = _varint(data, at)
                wire_type = tag & 7
                if wire_type == _BYTES:
                    size, at = _varint(data, at)
                    submessage = inner.get(tag >> 3)
                    if submessage is not None and size:
                        waiting.append((at, min(at + size, end), submessage))
                    at += size
                elif wire_type == _VARINT:
                    _, at = _varint(data, at)
                else:
                    at += _WIDTHS.get(wire_type, 0)  # a group has no width: what is in it is counted like the rest
    except IndexError:
        pass
    return False


@cache
def _messages_in(kind: Any) -> Mapping[int, Any]:
    """The fields of a message that are messages, by number."""
    return {field.number: field.message_type for field in kind.fields if field.message_type is not None}


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number, and where what follows it begins."""
    value = data[at]
    if value < _ONE_BYTE:
        return value, at + 1
    value, shift = value & 0x7F, 7
    while (byte := data[at + 1]) & _ONE_BYTE:
        value |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
    return value | byte << shift, at + 2

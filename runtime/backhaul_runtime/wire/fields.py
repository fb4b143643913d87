"""Counts the fields of an encoded message before protobuf reads it.

An empty submessage takes two bytes on the wire and thirty times as much in memory. So the size of a message does not
bound the memory of the parsed message. This module reads tags and lengths only, and stops at the first field beyond a
limit.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from google.protobuf.message import Message

_WIDTHS = {0: 0, 1: 8, 5: 4}  # by wire type; a varint encodes its own length
_VARINT, _BYTES = 0, 2
_ONE_BYTE = 0x80


def has_more_fields(data: bytes, kind: type[Message], most: int) -> bool:
    """Returns whether a message and its submessages have more than `most` fields. A packed list counts as one field.

    Args:
        data: The encoded message. Counting ends where the message is malformed: protobuf will refuse it.
        kind: The class of the message.
        most: The largest number of fields for which the result is False.
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
                    at += _WIDTHS.get(
                        wire_type, 0
                    )  # a group's tags have no value: the fields in it are counted like others
    except IndexError:
        pass
    return False


@cache
def _messages_in(kind: Any) -> Mapping[int, Any]:
    """Returns the types of a message's fields that are messages, by field number."""
    return {field.number: field.message_type for field in kind.fields if field.message_type is not None}


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the number that begins at offset `at`, and the offset behind it."""
    value = data[at]
    if value < _ONE_BYTE:
        return value, at + 1
    value, shift = value & 0x7F, 7
    while (byte := data[at + 1]) & _ONE_BYTE:
        value |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
    return value | byte << shift, at + 2

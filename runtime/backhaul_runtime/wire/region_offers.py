"""The Unix socket on which a worker offers regions of shared memory to trainers of its own user, and they ask for more.

A trainer first sends the name of its session, and then requests of the kinds in `SharedMemoryRequest`. The worker sends
offers, each with the descriptor of a region. See NOTE [Regions] in `shared_memory.py`.
"""

import os
import socket
import struct
from enum import IntEnum

from backhaul_runtime.errors import TransferError
from backhaul_runtime.wire.shared_memory import Region

_CREDENTIALS = struct.Struct("3i")
_OFFER = struct.Struct("<?I")
_ASK = struct.Struct("<BQ")


def offer(peer: socket.socket, region: Region, descriptor: int, *, is_down: bool) -> None:
    """Sends a region's descriptor to the trainer at the other end of a Unix socket. Called by the worker.

    Args:
        peer: The connected socket of the trainer.
        region: The region, which both sides will name by its number.
        descriptor: The descriptor of its memfd. The caller keeps ownership.
        is_down: Whether tensors go from the worker to the trainer through it.

    Raises:
        OSError: The socket is closed, or its buffer is full.
    """
    socket.send_fds(peer, [_OFFER.pack(is_down, region.number)], [descriptor])


def offer_nothing(peer: socket.socket) -> None:
    """Answers a MORE request when the worker has no room for another region. Raises OSError as `offer` does."""
    peer.send(_OFFER.pack(False, 0))


def take_offer(peer: socket.socket) -> tuple[bool, Region | None] | None:
    """Receives the next offer of the worker, and maps its region. Called by the trainer.

    Returns:
        Whether the region leads from the worker to the trainer, and the region, which is None if the worker has no
        room. None instead of both if the worker has closed the socket.

    Raises:
        BlockingIOError: The worker has sent nothing more yet.
        TransferError: The message is no offer, or its memfd is not sealed.
        OSError: The socket failed, or the region can't be mapped.
    """
    data, descriptors, _, _ = socket.recv_fds(peer, _OFFER.size, 1)
    try:
        if not data:
            return None
        if len(data) != _OFFER.size:
            raise TransferError(f"an offer of shared memory has {len(data)} bytes instead of {_OFFER.size}")
        is_down, number = _OFFER.unpack(data)
        return is_down, Region(number, descriptors[0]) if descriptors else None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


class SharedMemoryRequest(IntEnum):
    """The kinds of messages that a trainer sends on the Unix socket, after the name of its session."""

    MORE = 1
    """No region had room for a tensor. The number is the tensor's bytes. The worker answers with an offer."""

    ROOM = 2
    """The next upload will not fit. The number is the bytes that must become free. There is no answer."""

    ENDED = 3
    """The trainer reads no more tensors of an answer, except those it uses in place. The number is the answer's."""

    def message(self, number: int) -> bytes:
        """Encodes the message; `number` is what the kind describes."""
        return _ASK.pack(self, number)

    @staticmethod
    def read(message: bytes) -> "tuple[SharedMemoryRequest, int]":
        """Decodes a message. Raises TransferError for bytes that are no message."""
        try:
            kind, number = _ASK.unpack(message)
            return SharedMemoryRequest(kind), number
        except (struct.error, ValueError):
            raise TransferError(
                f"a message of {len(message)} bytes on the socket for shared memory is none that a trainer sends"
            ) from None


def is_same_user(peer: socket.socket) -> bool:
    """Returns whether the process at the other end of a Unix socket belongs to this process's user (Rule 3)."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.geteuid())

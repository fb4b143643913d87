"""Shares memory with trainers on the same machine. Everything here runs in the event loop's thread.

A region is a piece of shared memory that the worker and one trainer map. Tensors travel up (to the worker) in some
regions, and down (to the trainer) in others.

NOTE [Bounds of regions]
1. Regions are part of the worker's budget, and those of each direction take at most the fraction below. An uploaded
   tensor is charged like any other, and so is the free part of its region (see NOTE [Room] of the store). A tensor that
   goes down is a copy of the result.
2. A trainer whose tensor finds no free slot is given another region. A trainer with less free memory than its last
   upload took has its least recently used cached tensors moved to ordinary memory, so that regions are reused instead
   of growing. No more tensors than necessary are moved: trained parameters stay cached between steps, and the trainer
   supersedes them before their memory is needed.
3. A trainer never waits for a region: it sends a tensor that finds no slot in messages instead.
"""

import asyncio
import itertools
import logging
import os
import socket
import weakref
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from torch import Tensor

from backhaul_proto.v1 import tensor_pb2
from backhaul_runtime.errors import SessionUnknownError, TransferError
from backhaul_runtime.process.addresses import MAX_UNIX_PATH_BYTES
from backhaul_runtime.process.logs import about
from backhaul_runtime.tensors.layout import Layout, copy_exact
from backhaul_runtime.wire.region_offers import SharedMemoryRequest, is_same_user, offer, offer_nothing
from backhaul_runtime.wire.shared_memory import LEAST_BYTES, Outbox, Region, Slot, checksum_of, make_memory
from backhaul_runtime.wire.tensor_batches import OutgoingTensor, SharedWriter
from backhaul_server.worker.engine.heap import return_freed_memory
from backhaul_server.worker.engine.segment import SessionState
from backhaul_server.worker.engine.worker import Worker
from backhaul_server.worker.limits import SHARED_ANSWERS
from backhaul_server.worker.listening import ListenError, SocketPath

logger = logging.getLogger("backhaul.worker")
REGION_BYTES = 65 << 20  # holds 64 MiB of tensors of any size, and the table of slots
UP_PART, DOWN_PART = 4, 16
"""The fraction of the budget for regions in each direction: 1/4 up, 1/16 down.

If the fraction is smaller than a region there are none, because a small budget is needed for replays.
"""
_LONGEST_NAME = 64
_NAMED_IN_S = 5.0
_MOST_UNNAMED = 64
_MOST_READ = 64
"""Upper bound of the messages of one trainer that are read in a turn of the event loop."""


class Handover:
    """The socket on which trainers ask for shared memory.

    Args:
        worker: The worker that has the trainers' sessions.
        path: The socket's path, in a directory that only this user can access. `close` or an error releases it.

    Raises:
        ListenError: The path is too long for a socket.
    """

    def __init__(self, worker: Worker, path: SocketPath) -> None:
        if len(bytes(path.path)) > MAX_UNIX_PATH_BYTES:
            path.release()
            raise ListenError(
                f"can't listen on {path.path}: a Unix socket's path has at most {MAX_UNIX_PATH_BYTES} bytes"
            )
        self.worker = worker
        self.numbers = itertools.count(1)
        self._regions: dict[bool, list[weakref.ref[Region]]] = {False: [], True: []}  # by `is_down`
        self._tasks: set[asyncio.Task[object]] = set()
        self._unnamed: set[socket.socket] = set()
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(str(path.path))
        self._listener.listen()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listener, self._accept)

    @property
    def path(self) -> str:
        """The path of the socket."""
        return str(self._path.path)

    def close(self) -> None:
        """Accepts no more trainers, and removes the socket. Each session closes its own connection."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for peer in list(self._unnamed):
            self._drop_unnamed(peer)
        self._path.release()
        for task in self._tasks:
            task.cancel()

    def room(self, *, is_down: bool) -> int:
        """Returns the bytes that further regions of a direction may take (Rule 1)."""
        part = self.worker.store.budget_bytes // (DOWN_PART if is_down else UP_PART)
        if part < REGION_BYTES:
            return 0
        return part - sum(region.size_bytes for region in self._mapped(is_down=is_down))

    def _mapped(self, *, is_down: bool) -> list[Region]:
        return [region for reference in self._regions[is_down] if (region := reference()) is not None]

    def _free_bytes(self) -> int:
        free = sum([region.size_bytes - region.used_bytes for region in self._mapped(is_down=False)])
        return free + sum([region.size_bytes for region in self._mapped(is_down=True)])

    def track(self, region: Region, *, is_down: bool) -> None:
        """Counts a region until it is unmapped."""
        self.worker.store.free_shared_bytes = self._free_bytes  # only now: each request asks for it many times
        self._regions[is_down] = [weakref.ref(mapped) for mapped in (*self._mapped(is_down=is_down), region)]

    def run(self, work: Coroutine[Any, Any, object]) -> None:
        """Runs a coroutine as a task, which `close` cancels."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError:  # the peer has closed the connection already
            return
        if not is_same_user(peer):
            logger.warning("A process of another user asked for shared memory, and was refused.")
            peer.close()
            return
        if len(self._unnamed) >= _MOST_UNNAMED:
            peer.close()
            return
        peer.setblocking(False)
        self._unnamed.add(peer)
        self._loop.add_reader(peer, self._read_name, peer)
        self._loop.call_later(_NAMED_IN_S, self._drop_unnamed, peer)

    def _drop_unnamed(self, peer: socket.socket) -> None:
        """Closes a connection that has not named its session."""
        if peer in self._unnamed:
            self._unnamed.discard(peer)
            self._loop.remove_reader(peer)
            peer.close()

    def _read_name(self, peer: socket.socket) -> None:
        """Reads the first message, which names the session."""
        self._unnamed.discard(peer)
        self._loop.remove_reader(peer)
        try:
            session = self.worker.session(peer.recv(_LONGEST_NAME).decode())
        except (OSError, UnicodeDecodeError, SessionUnknownError):
            peer.close()
            return
        if session.memory is not None:
            session.memory.close()
        session.memory = SharedMemoryEnd(self, peer, session)


class SharedMemoryEnd:
    """The worker's end of the memory shared with one session's trainer. Event loop only.

    Args:
        handover: The socket on which the trainer asked.
        peer: The connection to the trainer, owned by this object from now on.
        session: The session that the trainer has named.
    """

    def __init__(self, handover: Handover, peer: socket.socket, session: SessionState) -> None:
        self._handover = handover
        self._peer = peer
        self._session = session
        self._up: dict[int, Region] = {}
        self._down = Outbox()
        self._answers: dict[int, list[Slot]] = {}
        self._growing: set[bool] = set()
        self._moving = asyncio.Lock()  # guards `_move_out`: two at once would copy the same tensors
        self._is_making_room = False
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(peer, self._read)

    def use(self, location: tensor_pb2.Location, layout: Layout) -> tuple[Tensor, Callable[[], None]]:
        """Returns an uploaded tensor where it lies, and a function that frees its slot. Raises TransferError."""
        region = self._up.get(location.region)
        if region is None:
            raise TransferError(f"a tensor is declared in region {location.region}, which this session does not have")
        region.check(location, layout)
        return region.use(location, layout), partial(region.free_slot, location.slot, location.ticket)

    def answering(self, answer: int) -> SharedWriter:
        """Returns a function that copies tensors of an answer to shared memory, until the trainer ends the answer."""
        if answer not in self._answers and len(self._answers) >= SHARED_ANSWERS.most:
            return lambda _: None
        self._answers.setdefault(answer, [])

        def write(outgoing: OutgoingTensor) -> tensor_pb2.Location | None:
            layout, slots = outgoing.layout, self._answers.get(answer)
            if slots is None or not Outbox.takes(layout):
                return None
            slot = self._down.put(outgoing)
            if slot is None:
                self._grow(layout.span_bytes, is_down=True)
                return None
            slots.append(slot)
            return slot.location(layout, checksum_of(outgoing.tensor, layout))

        return write

    def close(self) -> None:
        """Stops sharing. A region stays mapped while tensors in it are in use."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._peer)
            self._peer.close()
            regions = list(self._up.values())
            self._up, self._down, self._answers = {}, Outbox(), {}
            if self._session.memory is self:
                self._session.memory = None
            # Other sessions may possess cached tensors in these regions: copies of them let the regions go.
            if regions and self._handover.worker.sessions:
                self._handover.run(self._move_out(regions, sum(region.size_bytes for region in regions)))

    def _read(self) -> None:
        try:
            for _ in range(_MOST_READ):  # further messages are read in the next turn of the loop
                message = self._peer.recv(_LONGEST_NAME)
                if not message:
                    break
                kind, number = SharedMemoryRequest.read(message)
                if kind is SharedMemoryRequest.MORE:
                    self._grow(number, is_down=False)
                elif kind is SharedMemoryRequest.ROOM:
                    self._make_room(number)
                else:
                    self._down.end(self._answers.pop(number, []))
            else:
                return
        except BlockingIOError:
            return
        except (OSError, TransferError) as error:
            logger.info("Sharing memory with a trainer ended: %s", error, extra=about(self._session.run))
        self.close()

    def _make_room(self, wanted_bytes: int) -> None:
        """Frees slots of the present regions. Does nothing while an earlier call is still freeing slots."""

        async def make() -> None:
            try:
                await self._move_out(list(self._up.values()), wanted_bytes)
            finally:
                self._is_making_room = False

        if not self._is_making_room:
            self._is_making_room = True
            self._handover.run(make())

    def _grow(self, least_bytes: int, *, is_down: bool) -> None:
        if is_down not in self._growing and not self._closed:
            self._growing.add(is_down)
            self._handover.run(self._add_region(least_bytes, is_down=is_down))

    async def _add_region(self, least_bytes: int, *, is_down: bool) -> None:
        """Adds a region that holds at least this many bytes, or else frees slots of the present regions (Rule 2)."""
        region = None
        try:
            size = min(max(REGION_BYTES, least_bytes + 2 * LEAST_BYTES), self._handover.room(is_down=is_down))
            size -= size % LEAST_BYTES
            store = self._handover.worker.store
            if size >= least_bytes + LEAST_BYTES and store.has_room(size):
                region = await asyncio.to_thread(_make, next(self._handover.numbers), size)
            if self._closed:
                return
            if region is not None and store.has_room(size):
                self._handover.track(region[0], is_down=is_down)
                offer(self._peer, *region, is_down=is_down)
                if is_down:
                    self._down.add(region[0])
                else:
                    self._up[region[0].number] = region[0]
            elif not is_down:
                await self._move_out(list(self._up.values()), least_bytes)
                offer_nothing(self._peer)
        except OSError as error:
            logger.warning("Shared memory could not be created: %s", error, extra=about(self._session.run))
            self.close()
        finally:
            if region is not None:
                os.close(region[1])
            self._growing.discard(is_down)

    async def _move_out(self, regions: list[Region], wanted_bytes: int) -> None:
        """Moves cached tensors to ordinary memory until this many bytes of slots are free."""
        store, moved = self._handover.worker.store, 0
        async with self._moving:
            while moved < wanted_bytes:
                oldest = store.oldest_shared(
                    lambda value: isinstance(value, Tensor) and any(region.holds(value) for region in regions)
                )
                if oldest is None:
                    return
                address, tensor = oldest
                if not isinstance(tensor, Tensor) or not store.has_room(tensor.nbytes):
                    return
                store.replace(address, tensor, await asyncio.to_thread(copy_exact, tensor))
                moved += tensor.nbytes
                del oldest, tensor  # a reference in this frame would keep the slot in use during the next copy


def _make(number: int, size_bytes: int) -> tuple[Region, int]:
    return_freed_memory()  # the region may need the pages that malloc keeps
    descriptor = make_memory(size_bytes)
    try:
        return Region(number, descriptor), descriptor
    except BaseException:
        os.close(descriptor)
        raise

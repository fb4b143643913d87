"""Hands shared memory over to trainers on this machine, and bounds it. Everything here runs in the event loop's thread.

NOTE [Bounds of regions]
1. Regions take part of the worker's budget, those of a direction at most the part below: a tensor that came is charged
   as any other, and what is free beside it too (see NOTE [Room] of the store). What goes down lies there as a copy.
2. Who finds no room gets another region. Who has less left than the last upload took has tensors that are only cached
   moved to ordinary memory, those that were not used for longest first: so regions are used again instead of growing.
   No more than that: parameters that are trained are cached between steps, and superseded before they are in the way.
3. Whoever finds no room sends chunks meanwhile: nobody waits for a region.
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
from backhaul_runtime.wire.shared_memory import (
    LEAST_BYTES,
    Outbox,
    Region,
    SharedMemoryRequest,
    Slot,
    checksum_of,
    is_same_user,
    make_memory,
    offer,
    offer_nothing,
)
from backhaul_runtime.wire.tensor_stream import OutgoingTensor, SharedWriter
from backhaul_server.worker.engine.heap import return_freed_memory
from backhaul_server.worker.engine.segment import SessionState
from backhaul_server.worker.engine.worker import Worker
from backhaul_server.worker.limits import SHARED_ANSWERS
from backhaul_server.worker.listening import ListenError, SocketPath

logger = logging.getLogger("backhaul.worker")
REGION_BYTES = 65 << 20  # with its table room for 64 MiB of tensors, however large they are
UP_PART, DOWN_PART = 4, 16
"""Of the budget, for tensors that come up, and that go down. Of a small one nothing goes down this way: its room is for
replays."""
_LONGEST_NAME = 64
_NAMED_IN_S = 5.0
_MOST_UNNAMED = 64
_MOST_READ = 64
"""Messages of one trainer that are read in a turn of the event loop."""


class Handover:
    """The socket where trainers ask for memory.

    Args:
        worker: Whose sessions they are.
        path: For the socket; its directory is this user's alone. Released by `close`, or by an error.

    Raises:
        ListenError: There can be no socket.
    """

    def __init__(self, worker: Worker, path: SocketPath) -> None:
        if len(bytes(path.path)) > MAX_UNIX_PATH_BYTES:
            path.release()
            raise ListenError(f"can't listen on {path.path}: a Unix socket takes {MAX_UNIX_PATH_BYTES} bytes")
        self.worker = worker
        self.numbers = itertools.count(1)
        self._regions: dict[bool, list[weakref.ref[Region]]] = {False: [], True: []}  # asked at every turn of the store
        worker.store.free_shared_bytes = self._free_bytes
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
        """Of the socket."""
        return str(self._path.path)

    def close(self) -> None:
        """Takes no more trainers, and removes the socket. Sessions close their own."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for peer in list(self._unnamed):
            self._give_up(peer)
        self._path.release()
        for task in self._tasks:
            task.cancel()

    def room(self, *, is_down: bool) -> int:
        """Bytes that regions of a direction may still take (Rule 1)."""
        part = self.worker.store.budget_bytes // (DOWN_PART if is_down else UP_PART)
        if part < REGION_BYTES:
            return 0
        return part - sum(region.size_bytes for region in self._mapped(is_down=is_down))

    def _mapped(self, *, is_down: bool) -> list[Region]:
        return [region for reference in self._regions[is_down] if (region := reference()) is not None]

    def _free_bytes(self) -> int:
        free = sum([region.size_bytes - region.used_bytes for region in self._mapped(is_down=False)])
        return free + sum([region.size_bytes for region in self._mapped(is_down=True)])

    def made(self, region: Region, *, is_down: bool) -> None:
        """Counts a region for as long as it is mapped."""
        self._regions[is_down] = [weakref.ref(mapped) for mapped in (*self._mapped(is_down=is_down), region)]

    def run(self, work: Coroutine[Any, Any, object]) -> None:
        """Has work done beside what goes on."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError:  # it has left again
            return
        if not is_same_user(peer):
            logger.warning("a process of another user asked for shared memory: refused")
            peer.close()
            return
        if len(self._unnamed) >= _MOST_UNNAMED:
            peer.close()
            return
        peer.setblocking(False)
        self._unnamed.add(peer)
        self._loop.add_reader(peer, self._name, peer)
        self._loop.call_later(_NAMED_IN_S, self._give_up, peer)

    def _give_up(self, peer: socket.socket) -> None:
        """Closes a connection that has named no session yet."""
        if peer in self._unnamed:
            self._unnamed.discard(peer)
            self._loop.remove_reader(peer)
            peer.close()

    def _name(self, peer: socket.socket) -> None:
        """The first message names the session."""
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
    """Memory shared with a session's trainer."""

    def __init__(self, handover: Handover, peer: socket.socket, session: SessionState) -> None:
        self._handover = handover
        self._peer = peer
        self._session = session
        self._up: dict[int, Region] = {}
        self._down = Outbox()
        self._answers: dict[int, list[Slot]] = {}
        self._growing: set[bool] = set()
        self._moving = asyncio.Lock()
        self._is_making_room = False
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(peer, self._read)

    def use(self, location: tensor_pb2.Location, layout: Layout) -> tuple[Tensor, Callable[[], None]]:
        """A tensor that came, in place, and what lets it go at once. Raises TransferError where none can be."""
        region = self._up.get(location.region)
        if region is None:
            raise TransferError(f"a tensor is declared in region {location.region}, which this session does not have")
        region.check(location, layout)
        return region.use(location, layout), partial(region.let_go, location.slot, location.ticket)

    def answering(self, answer: int) -> SharedWriter:
        """Puts tensors of an answer where its trainer finds them, until that has ended it."""
        if answer not in self._answers and len(self._answers) >= SHARED_ANSWERS.most:
            return lambda _: None
        self._answers.setdefault(answer, [])

        def place(parcel: OutgoingTensor) -> tensor_pb2.Location | None:
            layout, places = parcel.layout, self._answers.get(answer)
            if places is None or not Outbox.takes(layout):
                return None
            found = self._down.put(parcel)
            if found is None:
                self._grow(layout.span_bytes, is_down=True)
                return None
            places.append(found)
            return found.location(layout, checksum_of(parcel.tensor, layout))

        return place

    def close(self) -> None:
        """Shares nothing more. Regions stay mapped while tensors in them are held."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._peer)
            self._peer.close()
            left = list(self._up.values())
            self._up, self._down, self._answers = {}, Outbox(), {}
            if self._session.memory is self:
                self._session.memory = None
            if left and self._handover.worker.sessions:  # which may have use for what is cached, but not for regions
                self._handover.run(self._move_out(left, sum(region.size_bytes for region in left)))

    def _read(self) -> None:
        try:
            for _ in range(_MOST_READ):  # what is left is read in the next turn
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
            logger.info("shared memory: %s", error, extra=about(self._session.run))
        self.close()

    def _make_room(self, wanted_bytes: int) -> None:
        """Makes room in the regions there are; who asks while that goes on has been heard."""

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
            self._handover.run(self._more(least_bytes, is_down=is_down))

    async def _more(self, least_bytes: int, *, is_down: bool) -> None:
        """Another region, or more room in those there are (Rule 2)."""
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
                self._handover.made(region[0], is_down=is_down)
                offer(self._peer, *region, is_down=is_down)
                if is_down:
                    self._down.add(region[0])
                else:
                    self._up[region[0].number] = region[0]
            elif not is_down:
                await self._move_out(list(self._up.values()), least_bytes)
                offer_nothing(self._peer)
        except OSError as error:
            logger.warning("no more shared memory: %s", error, extra=about(self._session.run))
            self.close()
        finally:
            if region is not None:
                os.close(region[1])
            self._growing.discard(is_down)

    async def _move_out(self, regions: list[Region], wanted_bytes: int) -> None:
        """Copies tensors that no segment names to ordinary memory, so that their slots come back."""
        store, moved = self._handover.worker.store, 0
        async with self._moving:
            while moved < wanted_bytes:
                found = store.oldest_shared(
                    lambda held: isinstance(held, Tensor) and any(region.holds(held) for region in regions)
                )
                if found is None:
                    return
                address, tensor = found
                if not isinstance(tensor, Tensor) or not store.has_room(tensor.nbytes):
                    return
                store.replace(address, tensor, await asyncio.to_thread(copy_exact, tensor))
                moved += tensor.nbytes
                del found, tensor


def _make(number: int, size_bytes: int) -> tuple[Region, int]:
    return_freed_memory()  # of which the region's pages may be had
    descriptor = make_memory(size_bytes)
    try:
        return Region(number, descriptor), descriptor
    except BaseException:
        os.close(descriptor)
        raise

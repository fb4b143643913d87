"""The further connections of a session to its worker, over which large tensors are striped.

NOTE [Lanes]
1. A lane is a channel of its own, so a connection of its own, with the same TLS and token as the main one. It belongs
   to one worker session, and is used once the worker has answered a KeepSession for that session on it.
2. Lanes join in the background. Transfers use those that have joined, and wait for none.
3. A lane that fails is closed, and another one joins after a pause, which doubles with each failure. What broke one may
   have broken others, so none is used until each has answered again.
4. Lanes are no part of the state of the connection: the main connection alone decides whether the worker is up.

What the pieces of a transfer are, and what happens when a lane breaks: NOTE [Stripes] in
`backhaul_runtime.wire.stripes`.
"""

import itertools
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from time import monotonic
from types import SimpleNamespace
from typing import Any

import grpc

from backhaul._worker_client.connection.connection_count import ConnectionCount
from backhaul_proto.v1 import session_pb2
from backhaul_runtime.wire.tensor_batches import OutgoingTensor, payload_bytes

LANE_LOST = "LANE_LOST"
"""The status of a WorkerLostError after which the transfer is to be repeated on the main connection alone."""
JOIN_S = 10.0
"""Seconds after which a lane that has not joined is given up."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
"""Bounds of the pause after which a lane is opened in the place of a broken one."""


class Lane:
    """One further connection to a worker.

    Args:
        channel: The gRPC channel, which the lane owns.
        sessions: The stub of the service of sessions on that channel.
        tensors: The stub of the service of tensors on that channel.

    Attributes:
        put: Calls PutStripes on the lane.
        get: Calls GetStripes on the lane.
        has_joined: Whether the worker knows the session on this connection (Rule 1).
    """

    def __init__(self, channel: grpc.Channel, sessions: SimpleNamespace, tensors: SimpleNamespace) -> None:
        self._channel = channel
        self._keep: Any = sessions.KeepSession
        self.put: Any = tensors.PutStripes
        self.get: Any = tensors.GetStripes
        self.has_joined = False

    def join(self, session: str, on_failure: Callable[["Lane"], None]) -> None:
        """Asks the worker for the session, without waiting for the answer. Calls `on_failure` if none comes."""

        def answered(future: Any) -> None:
            if not future.cancelled() and future.exception() is None:
                self.has_joined = isinstance(future.result(), session_pb2.KeepSessionResponse)
            if not self.has_joined:
                on_failure(self)

        request = session_pb2.KeepSessionRequest(session=session)
        self._keep.future(request, timeout=JOIN_S, wait_for_ready=True).add_done_callback(answered)

    def close(self) -> None:
        """Closes the channel in a thread of its own, because gRPC waits for a message that it is writing."""
        self.has_joined = False
        threading.Thread(target=self._channel.close, name="backhaul-close", daemon=True).start()


@dataclass(frozen=True, slots=True)
class LaneOffer:
    """The lanes that may carry a part of one answer.

    Attributes:
        session: The worker's id of the session.
        number: The number by which the lanes name the answer; 0 if there are no lanes.
        lanes: The lanes, all of which have joined.
        broke: Called with each lane that has failed.
    """

    session: str = ""
    number: int = 0
    lanes: Sequence[Lane] = ()
    broke: Callable[[Lane], None] = lambda _: None


NO_LANES = LaneOffer()


class Lanes:
    """The lanes of one connection. Thread-safe.

    Args:
        connections: The number of connections that the user has set, the main one included; 0 to measure it.
    """

    def __init__(self, connections: int = 0) -> None:
        self._given = connections
        self.choice = ConnectionCount(connections)
        self._lock = threading.Lock()  # guards the fields below
        self._session = ""
        self._lanes: list[Lane] = []
        self._has_accelerator = False  # whether tensors of an accelerator were sent
        self._is_suspect = False  # a lane broke, and the others have not been asked since (Rule 3)
        self._pause_s, self._paused_until_s = FIRST_PAUSE_S, 0.0
        self._numbers = itertools.count(1)

    def keep(self, session: str, open_lane: Callable[[], Lane]) -> None:
        """Opens missing lanes, and closes those beyond the chosen number. Waits for nothing.

        Args:
            session: The worker's id of the session. If it is a new one, all lanes of the last one end.
            open_lane: Opens a further connection to the worker.
        """
        if session != self._session:
            self.end()
            with self._lock:
                self.choice, self._session = ConnectionCount(self._given), session
                self._pause_s, self._paused_until_s = FIRST_PAUSE_S, 0.0
        with self._lock:
            wanted = self.choice.count - 1
            surplus, self._lanes[wanted:] = self._lanes[wanted:], []
            joining = list(self._lanes) if self._is_suspect else []
            self._is_suspect = False
            for lane in joining:
                lane.has_joined = False
            while len(self._lanes) < wanted and monotonic() >= self._paused_until_s:
                self._lanes.append(open_lane())
                joining.append(self._lanes[-1])
        for lane in surplus:
            lane.close()
        for lane in joining:  # outside the lock, because a call that fails at once calls `broke`
            lane.join(session, self.broke)

    def settle(self) -> None:
        """Chooses one connection, to a worker on this machine. Further ones gain nothing for the host's tensors.

        Those of an accelerator can't use shared memory. Once some were sent, the number is measured.
        """
        if not self._has_accelerator:
            self.choice.settle()

    def sent(self, connections: int, outgoing_tensors: Collection[OutgoingTensor], took_s: float) -> None:
        """Notes an upload of whole tensors in messages, by which the number of connections is chosen.

        Args:
            connections: The number of connections that it used.
            outgoing_tensors: The tensors that were sent.
            took_s: Seconds that it took.
        """
        if not self._has_accelerator and any(outgoing.layout.is_on_accelerator for outgoing in outgoing_tensors):
            self._has_accelerator, self.choice = True, ConnectionCount(self._given)
        self.choice.sent(connections, payload_bytes(outgoing_tensors), took_s)

    def joined(self, session: str) -> Sequence[Lane]:
        """Returns the lanes that transfers of a worker session may use now."""
        with self._lock:
            if session != self._session or self._is_suspect:
                return []
            return [lane for lane in self._lanes if lane.has_joined]

    def offer(self, session: str) -> LaneOffer:
        """Returns the lanes that may carry a part of an answer, under a new number."""
        lanes = self.joined(session)
        return LaneOffer(session, self.number(), lanes, self.broke) if lanes else NO_LANES

    def number(self) -> int:
        """Returns a number for a striped transfer that no other transfer of the connection has."""
        return next(self._numbers)

    def broke(self, lane: Lane) -> None:
        """Closes a lane that has failed (Rule 3). Any thread may call it, also twice."""
        with self._lock:
            if lane not in self._lanes:
                return
            self._lanes.remove(lane)
            self._is_suspect = True
            self._paused_until_s = monotonic() + self._pause_s
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        lane.close()

    def end(self) -> None:
        """Closes all lanes. The worker session is lost, or its main connection is replaced."""
        with self._lock:
            lanes, self._lanes, self._session = self._lanes, [], ""
        for lane in lanes:
            lane.close()

    def forget(self) -> None:
        """Lets go of the parent's lanes in the child of a fork. Takes no lock, because its holder may not exist."""
        self._lock = threading.Lock()  # guards the fields below
        self._lanes, self._session = [], ""

"""The workers of a session, which may join and leave while it is open.

NOTE [Roster]
1. A worker that the user named by its address belongs to the session from its beginning to its end, up or down.
2. One thread asks the resolvers once a second (NOTE [Resolvers]). A worker that a resolver begins to name joins: it
   gets segments once its connection is up.
3. A worker that is no longer named leaves: it gets no further segments, and its connection is closed when the trainer
   needs none of those that it has. So a step in flight ends as if nothing had happened.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic
from typing import overload

from backhaul._dispatch.worker_handle import WorkerHandle
from backhaul._worker_client.connection.connection import FULL, Connection
from backhaul_runtime.errors import BackhaulError, ConnectError
from backhaul_runtime.process.addresses import Address
from backhaul_runtime.process.discovery import LOOK_INTERVAL_S, Resolver
from backhaul_runtime.process.latch import Latch
from backhaul_runtime.process.logs import about
from backhaul_runtime.process.threads import only_in

logger = logging.getLogger("backhaul")

OTHERS_S = 1.0
"""Seconds that `Roster.open` waits for further workers of a resolver after the first one has answered."""
_POLL_S = 0.02
_END_S = 2.0
"""Seconds that `close` waits for the thread, which ends by itself when a name server has answered."""


class Roster(Sequence[WorkerHandle]):
    """The workers of a session, those included that are leaving. Thread-safe.

    Args:
        run: The id of the session, for logs.
        connect: Returns a connection to an address with a token file, which is not open yet.
        handle: Returns the handle of a connection.
        timeout_s: Seconds that `open` waits for the workers.
    """

    def __init__(
        self,
        run: str,
        connect: Callable[[Address, str], Connection],
        handle: Callable[[Connection], WorkerHandle],
        timeout_s: float,
    ) -> None:
        self._run, self._connect, self._handle, self._timeout_s = run, connect, handle, timeout_s
        self._handles: tuple[WorkerHandle, ...] = ()  # replaced as a whole, so readers need no lock
        self._named: dict[str, WorkerHandle] = {}  # by address, those that resolvers name
        self._resolvers: list[tuple[Resolver, str]] = []
        self._fixed: set[str] = set()  # gRPC's names of the workers that stay, which a resolver may name as well
        self._last: dict[str, list[Address]] = {}  # what each resolver named last
        self._troubles: dict[str, str] = {}  # why a resolver cannot be read, as it was logged
        self._closing = Latch()
        self._thread = threading.Thread(target=self._follow, name="backhaul-discovery", daemon=True)

    @overload
    def __getitem__(self, index: int) -> WorkerHandle: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[WorkerHandle]: ...

    def __getitem__(self, index: int | slice) -> WorkerHandle | Sequence[WorkerHandle]:
        return self._handles[index]

    def __iter__(self) -> Iterator[WorkerHandle]:
        return iter(self._handles)

    def __len__(self) -> int:
        return len(self._handles)

    def open(self, resolvers: Mapping[Resolver, str], *, strict: bool) -> None:
        """Connects to the workers that resolvers name now, and follows the resolvers from then on.

        Args:
            resolvers: The token file of each resolver's workers; empty for no token.
            strict: Raise an error for workers that have no room for another session. Otherwise they are asked again in
                the background.

        Raises:
            BackhaulError: A worker that was named by its address does not answer, a resolver cannot be read, or of all
                workers that resolvers name none answers. See `Session`.
        """
        for resolver, token_file in resolvers.items():
            if resolver.is_fixed:
                (address,) = resolver.resolve()
                self._fixed.add(address.target)
                self.add(self._connect(address, token_file), strict=strict)
            else:
                self._resolvers.append((resolver, token_file))
        if self._resolvers:
            self._wait_for_first(strict=strict)
            self._thread.start()

    def add(self, connection: Connection, *, strict: bool = False) -> None:
        """Opens a connection to a worker that stays. Raises BackhaulError as `Connection.open` does."""
        connection.open(self._timeout_s, strict=strict)
        self._handles += (self._handle(connection),)

    def forked(self) -> None:
        """Detaches from the parent's threads in the child of a fork."""
        for worker in self._handles:
            worker.connection.forked()
            worker.uploader.uncollected.forked()

    def close(self) -> None:
        """Ends all connections."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(_END_S)
        for resolver, _ in self._resolvers:
            resolver.close()
        for worker in self._handles:
            worker.connection.close()
        for worker in self._handles:
            worker.uploader.close()

    def _wait_for_first(self, *, strict: bool) -> None:
        """Waits until a worker of the resolvers is up, and for a moment longer until all are.

        If all of them have answered that they have no room for another session, nothing is waited for but one answer of
        each resolver.
        """
        has_others = bool(self._handles)
        for resolver, token_file in self._resolvers:
            self._update(resolver, token_file)  # may take seconds, which the workers have to answer as well
        now_s = monotonic()
        until_s = now_s + self._timeout_s
        look_at_s = now_s + LOOK_INTERVAL_S
        while now_s < until_s:
            if now_s >= look_at_s:  # a resolver may name its first worker only after a while
                look_at_s = now_s + LOOK_INTERVAL_S
                for resolver, token_file in self._resolvers:
                    self._update(resolver, token_file)
            named = list(self._named.values())
            ups = sum(worker.connection.up is not None for worker in named)
            if ups or has_others:  # training can begin, so further workers get a moment more and no longer
                until_s = min(until_s, now_s + OTHERS_S)
                has_others = False
            if ups and ups == len(named):
                return
            if named and all(worker.connection.is_full for worker in named):
                break
            self._closing.wait(_POLL_S)
            now_s = monotonic()
        if not any(worker.connection.up is not None for worker in self._handles):
            if not self._named:  # nobody was asked, so no connection has an error to raise
                texts = ", ".join(resolver.text for resolver, _ in self._resolvers)
                raise ConnectError(f"{texts} named no worker within {self._timeout_s:g} s", address=texts)
            errors = [worker.connection.why_unanswered(self._timeout_s) for worker in self._named.values()]
            # A worker without room may have some later, and until then the trainer recomputes.
            if strict or not any(isinstance(error, FULL) for error in errors):
                raise errors[0]

    @only_in("backhaul-discovery")
    def _follow(self) -> None:
        while not self._closing.wait(LOOK_INTERVAL_S):
            for resolver, token_file in self._resolvers:
                try:
                    self._update(resolver, token_file)
                except BackhaulError as error:  # Rule 3 of NOTE [Resolvers]
                    if self._troubles.get(resolver.text) != error.message:
                        self._troubles[resolver.text] = error.message
                        logger.warning("%s. Its workers stay as they are.", error.message, extra=about(self._run))
                else:
                    self._troubles.pop(resolver.text, None)
            self._part()

    def _update(self, resolver: Resolver, token_file: str) -> None:
        """Asks a resolver, and notes who joins and who leaves. Raises BackhaulError."""
        self._last[resolver.text] = resolver.resolve()
        named = {address.target: address for addresses in self._last.values() for address in addresses}
        named = {target: address for target, address in named.items() if target not in self._fixed}
        for target, worker in self._named.items():
            if worker.is_leaving == (target in named):
                worker.is_leaving = target not in named
                does = "leaves" if worker.is_leaving else "stays"
                logger.info("Worker %s %s.", worker.connection.name, does, extra=about(self._run))
        for target, address in named.items():
            if target not in self._named and not self._closing.is_set:
                connection = self._connect(address, token_file)
                connection.start()
                self._named[target] = self._handle(connection)
                self._handles += (self._named[target],)

    def _part(self) -> None:
        """Closes the connections of workers that have left and of which nothing is needed (Rule 3).

        That of a worker that was wrong stays, so that the worker can't join again.
        """
        for target, worker in list(self._named.items()):
            if worker.connection.is_expelled:
                continue
            if worker.is_leaving and not worker.uploader.segments() and not worker.uploader.uncollected:
                del self._named[target]
                self._handles = tuple(other for other in self._handles if other is not worker)
                worker.connection.close()
                worker.uploader.close()
                logger.info("Worker %s has left.", worker.connection.name, extra=about(self._run))

"""The order in which one executor serves many sessions. The queue knows neither threads nor clocks."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from backhaul_server.worker.accounts import Owner

_MOST_TURNS = 4096
"""The number of credentials and sessions whose last turn is remembered; the longest ago are forgotten first."""


@dataclass(slots=True, eq=False)
class Job:
    """A piece of work for the executor.

    Attributes:
        account: The name of the credential that the work is for.
        session: Id of the session that the work is for.
        begin: Called in the event loop just before the work. Returns False if it must wait while other jobs run.
        work: Called in the executor's thread. Must not raise.
        end: Called in the event loop after the work.
        expected_s: Seconds that the trainer expects the work to take.
        name: Name of the segment, for the log.
    """

    account: str
    session: str
    begin: Callable[[], bool]
    work: Callable[[], None]
    end: Callable[[], None]
    expected_s: float
    name: str


def job_of(
    session: Owner,
    begin: Callable[[], bool],
    work: Callable[[], None],
    end: Callable[[], None],
    expected_s: float = 0.0,
    name: str = "",
) -> Job:
    """Returns a job for a session. See `Job` for the arguments."""
    return Job(session.account.name, session.id, begin, work, end, expected_s, name)


class FairQueue:
    """A round-robin queue: credentials take turns, then the sessions of each, and a session's jobs run in order.

    So a credential gets its share however many sessions it has. Whoever had a turn longest ago comes first, also if
    its queue was empty meanwhile: most trainers send the next request only after the answer to the last one, and would
    otherwise wait for two jobs of a credential that always has some queued.
    """

    def __init__(self) -> None:
        self._queues: dict[str, dict[str, deque[Job]]] = {}
        self._turns = 0
        # The number of the last turn of each session and, under an empty session, of each credential. Those that had
        # none yet come after all that wait, so that new sessions cannot delay the others.
        self._last_turn: OrderedDict[tuple[str, str], int] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(jobs) for sessions in self._queues.values() for jobs in sessions.values())

    def __bool__(self) -> bool:
        return bool(self._queues)

    def push(self, job: Job) -> None:
        """Appends a job to its session's queue."""
        for key in ((job.account, ""), (job.account, job.session)):
            if key not in self._last_turn:
                self._note_turn(key)
        self._queues.setdefault(job.account, {}).setdefault(job.session, deque()).append(job)

    def pop(self) -> Job | None:
        """Removes and returns the next job that can begin, or None.

        Credentials and sessions whose job could not begin keep their turn.
        """
        for account, sessions in self._in_order():
            for session, jobs in sessions:
                if jobs[0].begin():
                    job = jobs.popleft()
                    self._turns += 1
                    self._note_turn((account, ""))
                    self._note_turn((account, session))
                    if not jobs:
                        del self._queues[account][session]
                    if not self._queues[account]:
                        del self._queues[account]
                    return job
        return None

    def queued_before(self, job: Job) -> float:
        """Returns the expected seconds of the queued work that runs before a job; 0 for a job that is not queued."""
        order = list(_in_turns([_in_turns([jobs for _, jobs in sessions]) for _, sessions in self._in_order()]))
        return sum(other.expected_s for other in order[: order.index(job)]) if job in order else 0.0

    def _note_turn(self, key: tuple[str, str]) -> None:
        self._last_turn[key] = self._turns
        self._last_turn.move_to_end(key)
        if len(self._last_turn) > _MOST_TURNS:
            self._last_turn.popitem(last=False)

    def _in_order(self) -> list[tuple[str, list[tuple[str, deque[Job]]]]]:
        """Returns the credentials that wait with their sessions and jobs, both in the order of their next turns."""
        return [
            (account, sorted(sessions.items(), key=lambda item: self._last_turn.get((account, item[0]), 0)))
            for account, sessions in sorted(
                self._queues.items(), key=lambda item: self._last_turn.get((item[0], ""), 0)
            )
        ]


def _in_turns(queues: Iterable[Iterable[Job]]) -> Iterator[Job]:
    """Yields the jobs of several queues in the order in which they run."""
    return (job for turn in zip_longest(*queues) for job in turn if job is not None)

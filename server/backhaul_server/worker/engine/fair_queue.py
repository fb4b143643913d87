"""The order in which one executor serves many sessions. The queue knows neither threads nor clocks."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from backhaul_server.worker.accounts import Owner


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

    So a credential gets its share however many sessions it has.
    """

    def __init__(self) -> None:
        self._queues: OrderedDict[str, OrderedDict[str, deque[Job]]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(jobs) for sessions in self._queues.values() for jobs in sessions.values())

    def __bool__(self) -> bool:
        return bool(self._queues)

    def push(self, job: Job) -> None:
        """Appends a job to its session's queue."""
        self._queues.setdefault(job.account, OrderedDict()).setdefault(job.session, deque()).append(job)

    def pop(self) -> Job | None:
        """Removes and returns the next job that can begin, or None.

        The job's credential and session move to the end of their rounds. Those whose job could not begin keep their
        turn.
        """
        for account, sessions in self._queues.items():
            for session, jobs in sessions.items():
                if jobs[0].begin():
                    job = jobs.popleft()
                    sessions.move_to_end(session)
                    self._queues.move_to_end(account)
                    if not jobs:
                        del sessions[session]
                    if not sessions:
                        del self._queues[account]
                    return job
        return None

    def queued_before(self, job: Job) -> float:
        """Returns the expected seconds of the queued work that runs before a job; 0 for a job that is not queued."""
        order = list(_in_turns([_in_turns(sessions.values()) for sessions in self._queues.values()]))
        return sum(other.expected_s for other in order[: order.index(job)]) if job in order else 0.0


def _in_turns(queues: Iterable[Iterable[Job]]) -> Iterator[Job]:
    """Yields the jobs of several queues in the order in which they run."""
    return (job for turn in zip_longest(*queues) for job in turn if job is not None)

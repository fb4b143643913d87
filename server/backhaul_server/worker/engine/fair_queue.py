"""The order in which one executor serves many sessions. The queue knows neither threads nor clocks."""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Job:
    """A piece of work for the executor.

    Attributes:
        session: Id of the session that the work is for.
        begin: Called in the event loop just before the work. Returns False if it must wait while other jobs run.
        work: Called in the executor's thread. Must not raise.
        end: Called in the event loop after the work.
        expected_s: Seconds that the trainer expects the work to take.
        name: Name of the segment, for the log.
    """

    session: str
    begin: Callable[[], bool]
    work: Callable[[], None]
    end: Callable[[], None]
    expected_s: float
    name: str


class FairQueue:
    """A round-robin queue: sessions take turns, and each session's jobs run in order."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[Job]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __bool__(self) -> bool:
        return bool(self._queues)

    def push(self, job: Job) -> None:
        """Appends a job to its session's queue."""
        self._queues.setdefault(job.session, deque()).append(job)

    def pop(self) -> Job | None:
        """Removes and returns the next job that can begin, or None.

        The job's session moves to the end of the round. Sessions whose job could not begin keep their turn.
        """
        for session, jobs in self._queues.items():
            if jobs[0].begin():
                job = jobs.popleft()
                self._queues.move_to_end(session)
                if not jobs:
                    del self._queues[session]
                return job
        return None

    def queued_before(self, job: Job) -> float:
        """Returns the expected seconds of the queued work that runs before a job; 0 for a job that is not queued."""
        own_jobs = self._queues.get(job.session, deque())
        if job not in own_jobs:
            return 0.0
        turns = own_jobs.index(job)
        own = sum(other.expected_s for other in list(own_jobs)[:turns])
        others = sum(
            other.expected_s
            for session, jobs in self._queues.items()
            if session != job.session
            for other in list(jobs)[: turns + 1]
        )
        return own + others

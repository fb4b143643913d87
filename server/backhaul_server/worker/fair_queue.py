"""The order in which one executor serves many sessions. Pure: no threads, no clocks."""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Job:
    """A piece of work for the executor.

    Attributes:
        session: Whose work it is.
        begin: Called in the event loop just before it runs.
        work: Called in the executor's thread. Must not raise.
        end: Called in the event loop when it has run.
        expected_s: What its trainer thinks it takes.
        is_demanded: Somebody waits for it; else it is done ahead.
    """

    session: str
    begin: Callable[[], None]
    work: Callable[[], None]
    end: Callable[[], None]
    expected_s: float
    is_demanded: bool


class FairQueue:
    """Sessions take turns, each in its own order. Work that nobody waits for yet comes after all that is demanded."""

    def __init__(self) -> None:
        self._demanded: OrderedDict[str, deque[Job]] = OrderedDict()
        self._ahead: OrderedDict[str, deque[Job]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(jobs) for queue in (self._demanded, self._ahead) for jobs in queue.values())

    def push(self, job: Job) -> None:
        """Adds a job at the end of its session's line."""
        queue = self._demanded if job.is_demanded else self._ahead
        queue.setdefault(job.session, deque()).append(job)

    def hurry(self, job: Job) -> None:
        """Moves a job that was to be done ahead to the end of its session's demanded ones, if it still waits."""
        jobs = self._ahead.get(job.session, deque())
        if job in jobs:
            jobs.remove(job)
            if not jobs:
                del self._ahead[job.session]
            job.is_demanded = True
            self.push(job)

    def pop(self) -> Job | None:
        """The next job, or None. Its session goes to the end of the round."""
        for queue in (self._demanded, self._ahead):
            if queue:
                session, jobs = queue.popitem(last=False)
                job = jobs.popleft()
                if jobs:
                    queue[session] = jobs
                return job
        return None

    def ahead_of(self, job: Job) -> float:
        """Expected seconds of the work that will run before this job, were nothing added. 0 for one not queued."""
        rounds = self._demanded.get(job.session, deque())
        if job not in rounds:
            return 0.0
        place = rounds.index(job)
        own = sum(other.expected_s for other in list(rounds)[:place])
        others = sum(
            other.expected_s
            for session, jobs in self._demanded.items()
            if session != job.session
            for other in list(jobs)[: place + 1]
        )
        return own + others

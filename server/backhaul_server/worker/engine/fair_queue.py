"""The order in which one executor serves many sessions. Pure: no threads, no clocks."""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Job:
    """A piece of work for the executor.

    Attributes:
        session: Whose work it is.
        begin: Called in the event loop just before it runs. Returns whether it can; else it waits, while others run.
        work: Called in the executor's thread. Must not raise.
        end: Called in the event loop when it has run.
        expected_s: What its trainer thinks it takes.
        name: Of the segment, for the log.
    """

    session: str
    begin: Callable[[], bool]
    work: Callable[[], None]
    end: Callable[[], None]
    expected_s: float
    name: str


class FairQueue:
    """Sessions take turns, each in its own order."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[Job]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return bool(self._lines)

    def push(self, job: Job) -> None:
        """Adds a job at the end of its session's line."""
        self._lines.setdefault(job.session, deque()).append(job)

    def pop(self) -> Job | None:
        """The next job that can begin, or None. Its session goes to the end of the round, those passed over do not."""
        for session, jobs in self._lines.items():
            if jobs[0].begin():
                job = jobs.popleft()
                self._lines.move_to_end(session)
                if not jobs:
                    del self._lines[session]
                return job
        return None

    def ahead_of(self, job: Job) -> float:
        """Expected seconds of the work that will run before this job, were nothing added. 0 for one not queued."""
        rounds = self._lines.get(job.session, deque())
        if job not in rounds:
            return 0.0
        place = rounds.index(job)
        own = sum(other.expected_s for other in list(rounds)[:place])
        others = sum(
            other.expected_s
            for session, jobs in self._lines.items()
            if session != job.session
            for other in list(jobs)[: place + 1]
        )
        return own + others

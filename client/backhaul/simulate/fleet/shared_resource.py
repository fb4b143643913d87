"""A core or a link that serves its sessions in equal parts. Imports no torch."""

from heapq import heappop, heappush

NOBODY = -1
"""Stands for a session when a job ends that nobody waits for."""


class SharedResource:
    """Divides its capacity equally among its jobs. Jobs that nobody waits for yet are served while there is no other.

    Each job has as much work served per second as every other one. So a job ends when the work served to each, counted
    from the beginning, reaches what it was at the job's arrival plus the job's own work. Arrivals and ends therefore
    take logarithmic time, however many jobs there are.

    Args:
        per_s: Work that is done per second: 1 for a core, whose work is seconds, or bytes for a link.

    Attributes:
        busy_s: Seconds with at least one job, up to the last change.
        changes: Number of arrivals and ends so far. A planned end is valid until this number changes.
    """

    __slots__ = ("_ahead", "_ahead_ends", "_ahead_served", "_at_s", "_jobs", "_per_s", "_served", "busy_s", "changes")

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._jobs: list[tuple[float, int, float, float]] = []
        self._served = 0.0
        self._ahead: list[tuple[float, int]] = []
        self._ahead_ends: dict[int, float] = {}  # by session; entries of the heap that differ from it are void
        self._ahead_served = 0.0
        self._at_s = 0.0
        self.busy_s = 0.0
        self.changes = 0

    @property
    def waited_for(self) -> int:
        """The number of jobs that sessions wait for."""
        return len(self._jobs)

    def advance(self, now_s: float) -> None:
        """Serves the jobs up to a time. No job may end before it."""
        passed_s = now_s - self._at_s
        if self._jobs:
            self._served += passed_s * self._per_s / len(self._jobs)
            self.busy_s += passed_s
        elif self._ahead_ends:
            self._ahead_served += passed_s * self._per_s / len(self._ahead_ends)
            self.busy_s += passed_s
        self._at_s = now_s

    def arrive(self, now_s: float, work: float, session: int, tail_s: float) -> float:
        """Adds a job that its session waits for. Returns when the first job will end if no other one arrives.

        Args:
            now_s: The time, not before that of the last call.
            work: Seconds of a core, or bytes.
            session: Number of the session that the job belongs to.
            tail_s: Seconds that the session needs after the end of the job.
        """
        self.advance(now_s)
        heappush(self._jobs, (self._served + work, session, tail_s, work))
        self.changes += 1
        return self._at_s + max(0.0, self._jobs[0][0] - self._served) * len(self._jobs) / self._per_s

    def arrive_ahead(self, now_s: float, work: float, session: int) -> float | None:
        """Adds a job that nobody waits for yet. Returns when the first job will end; None if there is no need to know.

        Args:
            now_s: The time, not before that of the last call.
            work: Seconds of a core.
            session: Number of the session that will need the job's result. It has no other such job here.
        """
        self.advance(now_s)
        self._ahead_ends[session] = self._ahead_served + work
        heappush(self._ahead, (self._ahead_served + work, session))
        if self._jobs:
            return None
        self.changes += 1
        return self.next_end_s()

    def take_ahead(self, now_s: float, session: int) -> float:
        """Removes the job of a session that nobody waited for. Returns its work that is left; 0 if it has ended."""
        self.advance(now_s)
        end = self._ahead_ends.pop(session, None)
        if end is None:
            return 0.0
        if not self._jobs:
            self.changes += 1
        return max(0.0, end - self._ahead_served)

    def end(self, now_s: float) -> tuple[int, float]:
        """Ends the job that ends first. Returns its session, or `NOBODY`, and its tail in seconds."""
        self.advance(now_s)
        self.changes += 1
        if self._jobs:
            self._served = max(self._served, self._jobs[0][0])  # so that rounding leaves no work
            _, session, tail_s, _ = heappop(self._jobs)
            return session, tail_s
        end, session = heappop(self._ahead)
        self._ahead_served = max(self._ahead_served, end)
        del self._ahead_ends[session]
        return NOBODY, 0.0

    def remove_all(self, now_s: float) -> list[tuple[int, float]]:
        """Removes all jobs.

        Returns:
            The session of each job that was waited for, and the part of its work that was not done, from 0 to 1.
        """
        self.advance(now_s)
        left = [(session, max(0.0, end - self._served) / work) for end, session, _, work in self._jobs]
        self._jobs.clear()
        self._ahead.clear()
        self._ahead_ends.clear()
        self.changes += 1
        return left

    def next_end_s(self) -> float | None:
        """Returns the time at which the next job will end; None if there is none."""
        if self._jobs:
            return self._at_s + max(0.0, self._jobs[0][0] - self._served) * len(self._jobs) / self._per_s
        # A session that took its job back has left its entry in the heap.
        while self._ahead and self._ahead_ends.get(self._ahead[0][1]) != self._ahead[0][0]:
            heappop(self._ahead)
        if not self._ahead:
            return None
        return self._at_s + max(0.0, self._ahead[0][0] - self._ahead_served) * len(self._ahead_ends) / self._per_s

"""A core or a link that serves its sessions in equal parts. Imports no torch."""

from heapq import heapify, heappop, heappush


class SharedResource:
    """Divides its capacity equally among its jobs.

    Each job has as much work served per second as every other one, so a job ends when the work served to each, counted
    from the beginning, reaches what it was at the job's arrival plus the job's own work. Arrivals and ends therefore take
    logarithmic time, however many jobs there are.

    Args:
        per_s: Work that is done per second: 1 for a core, whose work is seconds, or bytes for a link.

    Attributes:
        busy_s: Seconds with at least one job, up to the last change.
        changes: Number of arrivals and ends so far. A planned end is valid until this number changes.
    """

    __slots__ = ("_at_s", "_jobs", "_per_s", "_served", "busy_s", "changes")

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._jobs: list[tuple[float, int, float, float]] = []
        self._served = 0.0
        self._at_s = 0.0
        self.busy_s = 0.0
        self.changes = 0

    def advance(self, now_s: float) -> None:
        """Serves the jobs up to a time. No job may end before it."""
        if self._jobs:
            passed_s = now_s - self._at_s
            self._served += passed_s * self._per_s / len(self._jobs)
            self.busy_s += passed_s
        self._at_s = now_s

    def arrive(self, now_s: float, work: float, session: int, tail_s: float) -> float:
        """Adds a job. Returns the time at which the first of the jobs will end if no other one arrives.

        Args:
            now_s: The time, not before that of the last call.
            work: Seconds of a core, or bytes.
            session: Number of the session that the job belongs to.
            tail_s: Seconds that the session needs after the end of the job.
        """
        self.advance(now_s)
        heappush(self._jobs, (self._served + work, session, tail_s, work))
        self.changes += 1
        return self._next_end_s()

    def end(self, now_s: float) -> tuple[int, float, float | None]:
        """Ends the job that ends first.

        Returns:
            Its session, its tail in seconds, and the time at which the next job will end; None if there is none.
        """
        self.advance(now_s)
        self._served = max(self._served, self._jobs[0][0])  # so that rounding leaves no work
        _, session, tail_s, _ = heappop(self._jobs)
        self.changes += 1
        return session, tail_s, self._next_end_s() if self._jobs else None

    def remove_all(self, now_s: float) -> list[tuple[int, float]]:
        """Removes all jobs. Returns the session of each, and the part of its work that was not done, from 0 to 1."""
        self.advance(now_s)
        left = [(session, max(0.0, end - self._served) / work) for end, session, _, work in self._jobs]
        self._jobs.clear()
        self.changes += 1
        return left

    def remove(self, now_s: float, sessions: set[int]) -> float | None:
        """Removes the jobs of some sessions. Returns the time at which the next job will end; None if there is none."""
        self.advance(now_s)
        self._jobs = [job for job in self._jobs if job[1] not in sessions]
        heapify(self._jobs)
        self.changes += 1
        return self._next_end_s() if self._jobs else None

    def _next_end_s(self) -> float:
        return self._at_s + max(0.0, self._jobs[0][0] - self._served) * len(self._jobs) / self._per_s

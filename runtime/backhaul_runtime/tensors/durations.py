"""How long a device works, measured without a wait for it.

NOTE [Durations]
1. An accelerator works after the host has queued the work, so the host's clock would measure launches. There a span of
   work is the time between two events on its stream. On the host the duration is a number of seconds at once.
2. Training threads never wait for a span. A decision that needs a span that is not over uses an earlier span of the
   same work. Sums take spans in when they are over. Only the methods and functions named after waiting wait, for the
   threads of telemetry and of a worker's executions, and for callers of `Session.report`.
3. A span contains the work that is queued in it, and the time for which the stream had nothing to do because the host
   was busy or waited. So a span around a wait for a worker is the time for which the device was held up, without the
   time for which it was still at work.
4. These durations stay on the host's clock: what a thread does besides launching work, the time from a request to its
   answer, and what ends with a wait for the device.
"""

import threading
from collections import deque
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # commands import this module, and start faster without torch
    from backhaul_runtime.tensors.staging import DeviceMoment


class DeviceSpan:
    """The time between two points of a stream of an accelerator. Thread-safe.

    Args:
        began: The first point, from `timed_moment`.
        ended: A later point of the same stream.
        began_at_s: When the first point was queued, in seconds since 1970 by the host's clock.
    """

    __slots__ = ("_moments", "_seconds", "began_at_s")

    def __init__(self, began: "DeviceMoment", ended: "DeviceMoment", began_at_s: float) -> None:
        self._moments: tuple[DeviceMoment, DeviceMoment] | None = began, ended
        self._seconds = 0.0
        self.began_at_s = began_at_s

    @property
    def seconds(self) -> float | None:
        """The seconds between the points; None before the device has reached the second one. Does not wait."""
        moments = self._moments
        if moments is not None:
            began, ended = moments
            if not ended.has_come:
                return None
            self._seconds = began.event.elapsed_time(ended.event) / 1e3
            self._moments = None  # last, because another thread may read the seconds now; frees the events
        return self._seconds

    def wait(self) -> float:
        """Waits until the device has reached the second point. Returns the seconds between the points."""
        moments = self._moments
        if moments is not None:
            moments[1].wait()
        seconds = self.seconds
        assert seconds is not None
        return seconds


Duration: TypeAlias = float | DeviceSpan
"""Seconds of the host, or a span of an accelerator that may not be over yet."""


def known_s(*durations: Duration | None) -> float | None:
    """Returns the seconds of the first of these durations that is over, the latest first; None if none is."""
    for duration in durations:
        seconds = duration.seconds if isinstance(duration, DeviceSpan) else duration
        if seconds is not None:
            return seconds
    return None


def wait_s(duration: Duration) -> float:
    """Returns the seconds of a duration, after a wait for its device (Rule 2)."""
    return duration.wait() if isinstance(duration, DeviceSpan) else duration


class DurationSum:
    """A sum of durations. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards both fields; nothing waits for a device under it
        self._seconds = 0.0
        self._open: deque[tuple[DeviceSpan, float]] = deque()

    def add(self, duration: Duration, factor: float = 1.0) -> None:
        """Adds a duration, multiplied by a factor."""
        with self._lock:
            if isinstance(duration, DeviceSpan):
                self._open.append((duration, factor))
            else:
                self._seconds += factor * duration
            self._take_in()

    def add_all(self, other: "DurationSum") -> None:
        """Adds all durations of another sum."""
        with other._lock:
            seconds, unfinished = other._seconds, list(other._open)
        with self._lock:
            self._seconds += seconds
            self._open += unfinished
            self._take_in()

    @property
    def so_far_s(self) -> float:
        """The seconds of those durations that are over. Does not wait."""
        with self._lock:
            self._take_in()
            return self._seconds

    @property
    def is_over(self) -> bool:
        """Whether all durations are over. Does not wait."""
        with self._lock:
            self._take_in()
            return not self._open

    def wait(self) -> float:
        """Waits until all durations so far are over. Returns their sum."""
        with self._lock:
            unfinished = self._open.copy()
        for span, _ in unfinished:
            span.wait()
        return self.so_far_s

    def _take_in(self) -> None:
        while self._open and (seconds := self._open[0][0].seconds) is not None:
            self._seconds += self._open.popleft()[1] * seconds

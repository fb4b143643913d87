"""Counts what ran where, why, and at what cost, for `session.report()`."""

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from backhaul._observe.report import BlockReport, Decision, Report, SegmentReport, StepsReport
from backhaul_runtime.process.logs import about
from backhaul_runtime.tensors.durations import Duration, DurationSum
from backhaul_runtime.torch_internals.captured_graphs import TorchCompilation

logger = logging.getLogger("backhaul")

MAX_PROGRAMS = 1_000
"""The most programs of one name that are counted."""


@dataclass(eq=False)
class SegmentLog:
    """The counts of one name. Thread-safe.

    Attributes:
        name: The name of the checkpointed function or module.
        session: Id of the session, for log lines.
    """

    name: str
    session: str = ""
    _calls: int = 0
    _decisions: Counter[Decision] = field(default_factory=Counter)
    _wait: DurationSum = field(default_factory=DurationSum)
    _fallbacks: int = 0
    _reasons: Counter[str] = field(default_factory=Counter)
    _kept: Counter[str] = field(default_factory=Counter)
    _inside: Counter[str] = field(default_factory=Counter)
    _blocked: Counter[str] = field(default_factory=Counter)
    _known: int = 0
    _recorded: Counter[str] = field(default_factory=Counter)
    _whole: int = 0
    _losses_read: int = 0
    _not_whole: Counter[str] = field(default_factory=Counter)
    _rechecked: int = 0
    _not_rechecked: Counter[str] = field(default_factory=Counter)
    _programs: set[bytes] = field(default_factory=set)
    _compilations: list[TorchCompilation] = field(default_factory=list)
    _told_compilations: int = 0
    _up_bytes: int = 0
    _spared_bytes: int = 0
    _down_bytes: int = 0
    _drift: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)  # guards all counts

    def call(self) -> None:
        """Counts a forward call."""
        with self._lock:
            self._calls += 1

    def repeated(self) -> None:
        """Takes back the count of a call, whose function runs once more."""
        with self._lock:
            self._calls -= 1

    def add(self, decision: Decision, wait: Duration) -> None:
        """Counts a recomputation, and the time for which backward waited for it."""
        with self._lock:
            self._decisions[decision] += 1
            self._wait.add(wait)

    def wait(self, wait: Duration) -> None:
        """Adds a time for which backward waited."""
        with self._lock:
            self._wait.add(wait)

    def traffic(self, up_bytes: int = 0, down_bytes: int = 0) -> None:
        """Counts the bytes of messages."""
        with self._lock:
            self._up_bytes += up_bytes
            self._down_bytes += down_bytes

    def whole(self) -> None:
        """Counts a micro-batch that a worker gets whole."""
        with self._lock:
            self._whole += 1

    def loss_read(self) -> None:
        """Counts a loss that was read before its block ended, so that the trainer waited for a worker."""
        with self._lock:
            self._losses_read += 1

    def not_whole(self, reason: str) -> None:
        """Notes why no worker gets a micro-batch whole. Logs each reason once."""
        with self._lock:
            self._not_whole[reason] += 1
            first = self._not_whole[reason] == 1
        if first:
            text = "Micro-batches of %s run on the trainer: %s"
            logger.info(text, self.name, reason, extra=about(self.session, self.name, None))

    def rechecked(self) -> None:
        """Counts gradients that were computed twice, with equal results."""
        with self._lock:
            self._rechecked += 1

    def not_rechecked(self, reason: str) -> None:
        """Counts gradients that were to be computed twice, and could not."""
        with self._lock:
            self._not_rechecked[reason] += 1

    def spared(self, size_bytes: int) -> None:
        """Counts bytes that differences have spared."""
        with self._lock:
            self._spared_bytes += size_bytes

    def drift(self, drift: float) -> None:
        """Notes the drift of a recomputation."""
        with self._lock:
            self._drift = max(self._drift, drift)

    def on_trainer(self, reason: str, *, is_said: bool = False, step: int | None = None) -> None:
        """Notes why the trainer recomputes a segment. Logs each reason once.

        Args:
            reason: The reason, as the log and the report show it.
            is_said: Whether the reason was logged elsewhere.
            step: The step of the call; None if steps are not counted.
        """
        with self._lock:
            self._reasons[reason] += 1
            first = self._reasons[reason] == 1
        if first and not is_said:
            extra = about(self.session, self.name, step)
            logger.warning("Segment %s is recomputed on the trainer: %s", self.name, reason, extra=extra)

    def kept(self, reason: str, *, is_chosen: bool = False, step: int | None = None) -> None:
        """Notes why the trainer keeps activations. Logs each reason once.

        Args:
            reason: The reason, as the log and the report show it.
            is_chosen: Whether the user has chosen that, so that it is not logged.
            step: The step of the call; None if steps are not counted.
        """
        with self._lock:
            self._decisions[Decision.KEPT] += 1
            self._kept[reason] += 1
            first = self._kept[reason] == 1
        if first and not is_chosen:
            extra = about(self.session, self.name, step)
            text = "Segment %s keeps its activations on the trainer, as without checkpointing: %s"
            logger.warning(text, self.name, reason, extra=extra)

    def inside(self, reason: str) -> None:
        """Notes why a worker will return activations instead of gradients."""
        with self._lock:
            self._inside[reason] += 1

    def blocked(self, reason: str) -> None:
        """Notes why the backward of a micro-batch was not deferred."""
        with self._lock:
            self._blocked[reason] += 1

    def known(self) -> None:
        """Counts a call whose program was known."""
        with self._lock:
            self._known += 1

    def recorded(self, reason: str) -> None:
        """Notes why a call was recorded although it was compiled, or should have been."""
        with self._lock:
            self._recorded[reason] += 1

    def program(self, address: bytes) -> None:
        """Notes the program of a segment that a worker gets."""
        if len(self._programs) < MAX_PROGRAMS:  # a program with a number that changes is another one each time
            self._programs.add(address)

    def compiled(self, compilation: TorchCompilation) -> None:
        """Notes that torch.compile has captured a graph, or made kernels for one."""
        with self._lock:
            self._compilations.append(compilation)

    def new_compilations(self) -> list[TorchCompilation]:
        """Returns the compilations since the last call of this method."""
        with self._lock:
            new = self._compilations[self._told_compilations :]
            self._told_compilations = len(self._compilations)
            return new

    def fallback(self, reason: str, *, is_said: bool = False, step: int | None = None) -> None:
        """Notes why a segment that was meant for a worker runs on the trainer."""
        with self._lock:
            self._fallbacks += 1
        self.on_trainer(reason, is_said=is_said, step=step)

    def report(self) -> SegmentReport:
        """Returns the current counts, after a wait for what is being measured."""
        wait_s = self._wait.wait()  # without the lock, which training takes
        with self._lock:
            return SegmentReport(
                self.name,
                self._calls,
                dict(self._decisions),
                wait_s,
                self._fallbacks,
                dict(self._reasons),
                dict(self._kept),
                dict(self._inside),
                self._up_bytes,
                self._down_bytes,
                self._drift,
                dict(self._blocked),
                self._spared_bytes,
                self._known,
                dict(self._recorded),
                len(self._programs),
                len(self._compilations),
                sum(compilation.took_s for compilation in self._compilations),
                dict(Counter(compilation.guard for compilation in self._compilations if compilation.guard)),
                self._rechecked,
                dict(self._not_rechecked),
                self._whole,
                self._losses_read,
                dict(self._not_whole),
            )


class Journal:
    """The logs of a session, by name. Thread-safe.

    Attributes:
        session: Id of the session, for log lines.
        block: Returns the report of the last accumulation block, after a wait for its end; None if there was none.
    """

    def __init__(self, session: str = "") -> None:
        self.session = session
        self.block: Callable[[], BlockReport] | None = None
        self._logs: dict[str, SegmentLog] = {}
        self._lock = threading.Lock()  # guards the dict of logs

    def log(self, name: str) -> SegmentLog:
        """Returns the log of a name. The first call creates it."""
        with self._lock:
            log = self._logs.get(name)
            if log is None:
                log = self._logs[name] = SegmentLog(name, self.session)
            return log

    def report(self, copied_bytes: int = 0, steps: StepsReport | None = None) -> Report:
        """Returns all counts so far.

        Args:
            copied_bytes: Bytes of the copies of parameters that the trainer keeps.
            steps: What is measured of the steps, if anything is.
        """
        with self._lock:
            logs = list(self._logs.values())
        block = self.block
        return Report(tuple(log.report() for log in logs), None if block is None else block(), copied_bytes, steps)

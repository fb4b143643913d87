"""A cluster that is made up: many workers, a large training and distributed jobs, all of which keep reporting."""

import math
import random
import threading
import time
from collections.abc import Sequence
from typing import Self

from backhaul_proto.v1 import telemetry_pb2
from backhaul_runtime.version import version
from support.reporting import FakeWorker, Training

GIB = 1 << 30
CALLS_OF_A_REPORT = 1_000
METHODS = (("Backward", 0.03), ("Save", 0.002), ("PutTensors", 0.01), ("KeepSession", 5e-4))
"""The RPCs that workers count, each with a typical duration in seconds."""


class Member:
    """A training of the cluster, as one of its trainers reports it.

    Args:
        training: What it trains, and with which workers.
        name: The name of its run.
        tags: The tags of its run.
        notes: The notes of its run.
        rank: Its rank.
        world_size: The number of ranks of its job; 0 for a training that is not distributed.

    Attributes:
        training: As given.
        trainer: Its host and process.
    """

    def __init__(
        self,
        training: Training,
        name: str,
        tags: Sequence[str] = (),
        notes: str = "",
        rank: int = 0,
        world_size: int = 0,
    ) -> None:
        self.training = training
        self.trainer = f"{name}-{rank}:4711"
        self._fields = {"name": name, "notes": notes, "rank": rank, "world_size": world_size, "trainer": self.trainer}
        self._tags = tags
        self._events: list[telemetry_pb2.Event] = []
        self._sent_bytes = 0
        self._last_step = -1

    def happened(self, kind: str, text: str, worker: str = "", segment: str = "") -> None:
        """Adds an event to the next reports."""
        number = len(self._events)
        event = telemetry_pb2.Event(
            at_s=time.time(), kind=kind, worker=worker, segment=segment, text=text, number=number, count=1
        )
        self._events.append(event)

    def next_step(self, now_s: float) -> int:
        """Returns the number of the step that ends about now. Each call returns a larger number than the one before."""
        training = self.training
        self._last_step = max(self._last_step + 1, int((now_s - training.began_at_s) / training.step_s) - 1)
        return self._last_step

    def report(
        self, steps: Sequence[telemetry_pb2.Step] = (), calls: Sequence[telemetry_pb2.SegmentCall] = ()
    ) -> telemetry_pb2.TrainerReport:
        """Returns a report of these steps and calls, with the links to all workers and all events so far."""
        about = self.training.about()
        for field, value in self._fields.items():
            setattr(about, field, value)
        about.tags.extend(self._tags)
        self._sent_bytes += 50_000_000
        links = [
            telemetry_pb2.Link(
                worker=worker,
                round_trip_s=0.0003 + 0.0001 * index,
                clock_offset_s=0.002 * (index % 3 - 1),
                clock_error_s=0.00015,
                up_bytes=self._sent_bytes * (1 + index),
                down_bytes=self._sent_bytes,
                connected=True,
            )
            for index, worker in enumerate(self.training.workers)
        ]
        return telemetry_pb2.TrainerReport(
            drift=2e-6, run=about, steps=steps, calls=calls, links=links, events=self._events, sent_at_s=time.time()
        )


class Cluster:
    """Workers, a large training on all of them, and jobs of several ranks on some; a context manager.

    Each second brings a step of each training, part of the calls of the large one, and other numbers of the workers.
    The jobs begin when they are started: a dashboard keeps segments only of the runs that it has heard of first.

    Args:
        workers: Number of workers.
        segments: Number of segments of the large training. The first report has all of them.
        jobs: Number of distributed jobs.
        ranks: Number of ranks of each job.
        workers_of_rank: Number of workers that each rank uses.
        told_a_second: Number of calls of the large training that are reported each second.

    Attributes:
        workers: The workers.
        addresses: Their addresses.
        large: The large training.
        ranks: The trainings of all jobs, by job and rank.
        sessions: The number of sessions on all workers together, once the jobs have begun.
    """

    def __init__(
        self,
        workers: int = 50,
        segments: int = 10_000,
        jobs: int = 5,
        ranks: int = 6,
        workers_of_rank: int = 5,
        told_a_second: int = 200,
    ) -> None:
        self.workers = [FakeWorker() for _ in range(workers)]
        self.addresses = [worker.address for worker in self.workers]
        began_at_s = time.time() - 10
        large = Training(segments=segments, workers=self.addresses, step_s=1.0, began_at_s=began_at_s)
        self.large = Member(large, "pretrain", ("7b", "bf16"), "All workers, one trainer.")
        self.ranks = []
        for number in range(jobs * ranks):
            job, rank = divmod(number, ranks)
            first = number * workers_of_rank
            own = [self.addresses[(first + index) % workers] for index in range(min(workers_of_rank, workers))]
            training = Training(segments=4, workers=own, step_s=1.0, began_at_s=began_at_s - 20 - 300 * job)
            self.ranks.append(Member(training, f"sweep-{job}", ("sweep",), f"Job {job}.", rank, ranks))
        self.sessions = sum(len(member.training.workers) for member in [self.large, *self.ranks])
        self._members: list[Member] = []
        self._told_a_second = told_a_second
        self._random = random.Random(0)
        self._rounds = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live)

    def tell(self, member: Member, report: telemetry_pb2.TrainerReport) -> None:
        """Gives a report to the first worker of a training."""
        self.workers[self.addresses.index(member.training.workers[0])].tell(report)

    def start(self) -> None:
        """Reports all segments of the large training once, and then begins to change."""
        self._open_sessions(self.large)
        training = self.large.training
        calls = [training.call(0, number) for number in range(training.segments)]
        for start in range(0, len(calls), CALLS_OF_A_REPORT):
            self.tell(self.large, self.large.report(calls=calls[start : start + CALLS_OF_A_REPORT]))
        self._members = [self.large]
        self._thread.start()

    def start_jobs(self) -> None:
        """Has the distributed jobs begin to train."""
        for member in self.ranks:
            self._open_sessions(member)
        self._members = [self.large, *self.ranks]

    def advance(self) -> None:
        """Reports the next step of each training, and changes the numbers of each worker."""
        now_s = time.time()
        for member in self._members:
            training, step = member.training, member.next_step(now_s)
            first = self._rounds * self._told_a_second % training.segments
            numbers = range(first, min(first + self._told_a_second, training.segments))
            calls = [training.call(step, number) for number in numbers]
            self.tell(member, member.report([training.step(step)], calls))
        self._rounds += 1
        for number, worker in enumerate(self.workers):
            self._change(worker, number)

    def _live(self) -> None:
        while not self._ended.wait(1.0):
            self.advance()

    def _open_sessions(self, member: Member) -> None:
        for address in member.training.workers:
            worker = self.workers[self.addresses.index(address)]
            with worker.lock:
                worker.telemetry.sessions.add(
                    run=member.training.run,
                    trainer=member.trainer,
                    client_version=version(),
                    segments=4,
                    held_bytes=64 << 20,
                )

    def _change(self, worker: FakeWorker, number: int) -> None:
        for method, typical_s in METHODS:
            worker.served(method, [typical_s * self._random.lognormvariate(0, 0.5) for _ in range(5)])
        wave = 0.5 + 0.4 * math.sin(number / 3 + self._rounds / 20)
        with worker.lock:
            telemetry = worker.telemetry
            telemetry.uptime_s += 1
            telemetry.busy_s += wave
            telemetry.clock_s = time.time()
            telemetry.recomputed_segments += 20
            telemetry.received_bytes += 100_000_000
            telemetry.sent_bytes += 80_000_000
            budget = telemetry.memory.budget_bytes or 4 * GIB
            telemetry.memory.segment_bytes = int(0.3 * wave * budget)
            telemetry.memory.cached_bytes = int(0.2 * budget)
            telemetry.memory.working_bytes = int(0.2 * wave * budget)
            if number % 2:
                accelerator = telemetry.accelerator
                accelerator.name = "NVIDIA H100 80GB HBM3"
                accelerator.utilization = wave
                accelerator.used_bytes, accelerator.total_bytes = int(40 * wave) * GIB, 80 * GIB

    def close(self) -> None:
        """Ends everything."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        for worker in self.workers:
            worker.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

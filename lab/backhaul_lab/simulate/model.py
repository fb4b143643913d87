"""Simulates training steps with workers. Simulated workers order their work with the real worker's `Schedule`.

The model covers the trainer's core, which computes and sends; each worker's core, which receives, computes and answers;
one link in each direction; and the workers' memory budgets. It does not cover unresponsive workers, deadlines,
fallbacks to the trainer, or memory bandwidth and caches that cores share.
"""

from collections import deque
from dataclasses import dataclass, field

from backhaul._dispatch.placement import Placement
from backhaul_lab.simulate.costs import Costs, Setup
from backhaul_lab.simulate.engine import Compute, Event, SimulatedCore, SimulatedLink, Simulation, Thread, Transfer
from backhaul_runtime.replay.schedule import Key, Schedule

STEPS = 3
"""Simulated steps. In the first one the number of segments is unknown; only the last one is reported."""
INFLIGHT_BYTES = 64 << 20
"""Forward blocks while more bytes than this are queued for upload, and more than two boundaries. It is the default of
`inflight_bytes`."""
_ENOUGH_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class Predicted:
    """A predicted step.

    Attributes:
        step_s: Duration of the step, in seconds.
        replays: Number of replays. If it exceeds the number of segments, some replays were discarded and repeated.
    """

    step_s: float
    replays: int


@dataclass(eq=False)
class _Segment:
    saved: Event = field(default_factory=Event)
    answered: Event = field(default_factory=Event)
    was_requested: bool = False
    is_ready: bool = False
    is_done: bool = False


class _Worker:
    """A worker that executes segments one at a time, as `backhaul_server.worker.engine.segment_engine` does."""

    def __init__(self, simulation: Simulation, costs: Costs, setup: Setup, core: SimulatedCore) -> None:
        self.core = core
        self.up = SimulatedLink(setup.bytes_per_s or float("inf"), setup.latency_s)
        self.down = SimulatedLink(setup.bytes_per_s or float("inf"), setup.latency_s)
        self.segments: dict[int, _Segment] = {}
        self.replays = 0
        self._simulation = simulation
        self._costs = costs
        self._memory_bytes = setup.memory_bytes or _ENOUGH_BYTES
        self._schedule = Schedule()
        self._demanded: deque[int] = deque()
        self._results_bytes = 0
        self._wakes = Event()
        simulation.start(self._execute())

    def save(self, number: int) -> None:
        """Stores a segment that has arrived."""
        self._schedule.saved(("trainer", number), self._costs.footprint, self._costs.result_bytes)
        self._schedule.expected(("trainer", number))
        self._simulation.happens(self.segments[number].saved)
        self._wake()

    def request_gradients(self, number: int) -> None:
        """Requests the gradients of a segment."""
        segment = self.segments[number]
        segment.was_requested = True
        self._schedule.requested(("trainer", number))
        if segment.is_done:
            self._done(number)
        else:
            self._demanded.append(number)
        self._wake()

    def release(self, number: int) -> None:
        """Frees a segment whose gradients the trainer has received."""
        del self.segments[number]
        self._schedule.released(("trainer", number))
        self._results_bytes -= self._costs.result_bytes
        self._wake()

    def _wake(self) -> None:
        self._simulation.happens(self._wakes)

    def _execute(self) -> Thread:
        while True:
            if self._demanded:
                number = self._demanded.popleft()
                if not self.segments[number].answered.has_happened:
                    yield from self._backward(number)
                    self._done(number)
            elif (step := self._schedule.next(self._room_bytes())) is not None:
                for key in step.evicts:
                    self._discard_replay(key)
                number = step.key[1]
                if self.segments[number].is_ready:
                    yield from self._backward(number)
                    if self.segments[number].was_requested:
                        self._demanded.remove(number)
                        self._done(number)
                    else:
                        self.segments[number].is_done = True
                        self._schedule.ready(step.key, self._costs.result_bytes, is_done=True)
                else:
                    yield from self._replay()
                    self.segments[number].is_ready = True
                    self._schedule.ready(step.key, self._costs.footprint.ready_bytes)
            else:
                self._wakes = Event()
                yield self._wakes

    def _replay(self) -> Thread:
        self.replays += 1
        yield Compute(self.core, self._costs.replay_s)

    def _backward(self, number: int) -> Thread:
        """Runs the backward of a segment, replaying it first if necessary, and then marks the one before as guessed."""
        segment = self.segments[number]
        self._schedule.started(("trainer", number))
        while self._schedule.held_bytes + self._costs.footprint.execution_bytes > self._room_bytes():
            if not self._schedule.held_bytes:
                break
            self._discard_replay(self._schedule.last_needed())
        if not segment.is_ready:
            yield from self._replay()
        segment.is_ready = False
        yield Compute(self.core, self._costs.replay_backward_s)
        before = self.segments.get(number - 1)
        if before is not None and not before.was_requested and before.saved.has_happened:
            self._schedule.backward_predicted(("trainer", number - 1))

    def _done(self, number: int) -> None:
        self._schedule.started(("trainer", number))
        self._results_bytes += self._costs.result_bytes
        self._simulation.happens(self.segments[number].answered)

    def _discard_replay(self, key: Key) -> None:
        self.segments[key[1]].is_ready = self.segments[key[1]].is_done = False
        self._schedule.dropped(key)

    def _room_bytes(self) -> int:
        saved = sum(segment.saved.has_happened for segment in self.segments.values())
        return self._memory_bytes - saved * self._costs.upload_bytes - self._results_bytes


class _Trainer:
    def __init__(self, simulation: Simulation, costs: Costs, setup: Setup, workers: list[_Worker]) -> None:
        self.core = SimulatedCore()
        self.times_s: list[float] = []
        self.replays: list[int] = []
        self._simulation = simulation
        self._costs = costs
        self._setup = setup
        self._workers = workers
        self._placement, self._by_name = Placement(), {f"{number:03}": worker for number, worker in enumerate(workers)}
        self._speeds = dict(zip(self._by_name, setup.worker_speeds, strict=True))
        # Other cores than the trainer's send and receive, if it has any.
        self._transport = SimulatedCore() if setup.has_free_transport else self.core
        self._derived: set[int] = set()
        self._queues: dict[_Worker, deque[int]] = {worker: deque() for worker in workers}
        self._arrived = {worker: Event() for worker in workers}
        self._waiting_bytes = 0
        self._sent = Event()
        for worker in workers:
            simulation.start(self._upload(worker))
        simulation.start(self._train())

    def _train(self) -> Thread:
        costs, numbers = self._costs, iter(range(10**9))
        for _ in range(STEPS):
            began_s = self._simulation.now_s
            replays = sum(worker.replays for worker in self._workers)
            calls: list[tuple[int, _Worker]] = []
            for _ in range(self._setup.segments):
                name = self._placement.choose_worker(self._speeds)
                worker = self._by_name[name or "000"]
                number = next(numbers)
                is_derived = self._setup.derives and bool(calls) and calls[-1][1] is worker
                is_predicted = self._setup.is_predicted and not is_derived
                calls.append((number, worker))
                worker.segments[number] = _Segment()
                if is_derived:
                    self._derived.add(number)
                if is_predicted:
                    yield from self._queue(number, worker)
                yield Compute(self.core, costs.forward_s + costs.record_s)
                if not is_predicted:
                    yield from self._queue(number, worker)
            yield Compute(self.core, self._setup.outside_s)
            next_worker: _Worker | None = None
            for number, worker in reversed(calls):
                self._placement.backward()
                yield worker.segments[number].saved
                yield Transfer(worker.up, 0 if worker is next_worker else costs.boundary_bytes)
                segment = worker.segments[number]
                worker.request_gradients(number)
                yield segment.answered
                yield from self._receive(worker)
                worker.release(number)
                next_worker = worker
            yield Compute(self.core, self._setup.segments * costs.optimizer_s)
            self.times_s.append(self._simulation.now_s - began_s)
            self.replays.append(sum(worker.replays for worker in self._workers) - replays)

    def _queue(self, number: int, worker: _Worker) -> Thread:
        most_bytes = max(INFLIGHT_BYTES, 2 * self._costs.boundary_bytes)
        while self._waiting_bytes + self._costs.boundary_bytes > most_bytes:
            self._sent = Event()
            yield self._sent
        self._waiting_bytes += self._costs.boundary_bytes
        self._queues[worker].append(number)
        self._simulation.happens(self._arrived[worker])

    def _upload(self, worker: _Worker) -> Thread:
        queue = self._queues[worker]
        while True:
            if not queue:
                self._arrived[worker] = Event()
                yield self._arrived[worker]
            number = queue.popleft()
            costs, part = self._costs, 1.0
            if number in self._derived:
                part = costs.weight_bytes / costs.upload_bytes
            # Chunks are sent, transferred and received concurrently.
            concurrent = [
                self._simulation.start(_one(Compute(self._transport, part * costs.upload_s))),
                self._simulation.start(_one(Transfer(worker.up, part * costs.upload_bytes))),
                self._simulation.start(_one(Compute(worker.core, part * costs.ingest_s))),
            ]
            yield from concurrent
            self._waiting_bytes -= self._costs.boundary_bytes
            self._simulation.happens(self._sent)
            worker.save(number)

    def _receive(self, worker: _Worker) -> Thread:
        concurrent = [
            self._simulation.start(_one(Compute(worker.core, self._costs.answer_s))),
            self._simulation.start(_one(Transfer(worker.down, self._costs.result_bytes))),
            self._simulation.start(_one(Compute(self.core, self._costs.finish_s))),
        ]
        yield from concurrent


def _one(wanted: Compute | Transfer) -> Thread:
    yield wanted


def predict(costs: Costs, setup: Setup) -> Predicted:
    """Predicts a step of a training that has run for many steps."""
    simulation = Simulation()
    workers = [_Worker(simulation, costs, setup, SimulatedCore(speed)) for speed in setup.worker_speeds]
    trainer = _Trainer(simulation, costs, setup, workers)
    simulation.run()
    return Predicted(trainer.times_s[-1], trainer.replays[-1])

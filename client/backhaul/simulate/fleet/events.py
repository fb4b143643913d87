"""Simulates each session and each worker of a fleet (NOTE [Fleet]). Imports no torch."""

import math
import random
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count

from backhaul.simulate.costs import Costs
from backhaul.simulate.fleet.flow import flow, torch_step_s
from backhaul.simulate.fleet.outcome import SimulatedFleet
from backhaul.simulate.fleet.phases import Demand, StepPhase, WorkerShare
from backhaul.simulate.fleet.resources import FleetResources
from backhaul.simulate.fleet.setup import SILENCE_S, FleetSetup
from backhaul.simulate.fleet.shared_resource import NOBODY, SharedResource

WARM_STEPS, MEASURED_STEPS = 2.5, 2.5
"""Steps of the balance of flows that are simulated before anything counts, and those that count."""


def simulate(costs: Costs, setup: FleetSetup, *, seed: int = 0, steps: float = MEASURED_STEPS) -> SimulatedFleet:
    """Simulates a fleet whose sessions have run for long, and the loss of racks if the setup has one.

    Args:
        costs: Costs of one segment with one micro-batch.
        setup: The fleet. Its lost racks fail when steps begin to count.
        seed: Seed of the sessions' offsets in time and, if they are placed at random, of their workers.
        steps: Number of steps that count, in the balance of flows before the loss.
    """
    return _Fleet(costs, setup, seed, steps).run()


@dataclass(frozen=True, slots=True)
class _Asking:
    """A session's request for a worker's part of a backward.

    Attributes:
        share: What is asked for.
        worker: Number of the worker in the fleet.
        calls: Number of its segments that nobody computes yet.
        left_s: Seconds that their replays still take, because the worker had no time to do them ahead.
    """

    share: WorkerShare
    worker: int
    calls: int
    left_s: float


class _Fleet:
    def __init__(self, costs: Costs, setup: FleetSetup, seed: int, steps: float) -> None:
        self._costs, self._setup = costs, setup
        expected = flow(costs, setup)
        self._counted_from_s = WARM_STEPS * expected.step_s
        self._until_s = self._counted_from_s + steps * expected.step_s
        self._random = random.Random(seed)
        self._workers_of = self._place()
        self._resources = FleetResources(setup)
        sessions = range(setup.sessions)
        self._now_s = 0.0
        self._events: list[tuple[float, int, SharedResource | None, int]] = []
        self._numbers = count()
        self._balanced = expected.demand
        self._demand_of = [self._balanced] * setup.sessions
        self._phase = [-1 for _ in sessions]
        self._pending = [0 for _ in sessions]
        self._ready_s = [0.0 for _ in sessions]
        self._step_began_s = [0.0 for _ in sessions]
        self._fell_back: dict[int, set[int]] = {}
        self._owed_bytes: dict[tuple[int, int], float] = {}
        self._releases: dict[int, tuple[int, int, float]] = {}  # session, worker and work, by negative numbers
        self._asking: dict[int, _Asking] = {}
        self._busy_calls = 0
        self._ends_s, self._durations_s = array("d"), array("d")
        self._recomputed, self._resent = 0.0, 0.0
        self._lost_at_s: float | None = None
        self._survivors = setup.workers
        for session in sessions:
            heappush(self._events, (self._random.random() * expected.step_s, next(self._numbers), None, session))

    def _place(self) -> list[list[int]]:
        setup, size = self._setup, self._setup.workers_per_session
        if setup.placement == "random":
            return [self._random.sample(range(setup.workers), size) for _ in range(setup.sessions)]
        # Which of its workers comes first changes from lap to lap, because the first ones may get more segments.
        laps = [session * size // setup.workers for session in range(setup.sessions)]
        return [
            [(session * size + (own + laps[session]) % size) % setup.workers for own in range(size)]
            for session in range(setup.sessions)
        ]

    def run(self) -> SimulatedFleet:
        """Runs the simulation."""
        events, used = self._events, 0
        busy_before: dict[str, float] | None = None
        while events:
            at_s, _, resource, number = heappop(events)
            if at_s >= self._counted_from_s and busy_before is None:
                self._now_s = self._counted_from_s
                busy_before = self._resources.busy_s(self._now_s)
                self._lose_racks()
                heappush(events, (at_s, next(self._numbers), resource, number))  # the loss may have made it invalid
                continue
            if at_s > self._until_s:
                break
            used += 1
            self._now_s = at_s
            if resource is None:
                if number < 0:
                    self._begin_ahead(*self._releases.pop(number))
                elif number in self._asking:
                    self._ask(number)
                else:
                    self._next_phase(number)
            elif resource.changes == number:
                session, tail_s = resource.end(at_s)
                self._plan(resource, resource.next_end_s())
                if session != NOBODY:
                    self._job_ended(session, at_s + tail_s)
        return self._result(busy_before or {}, used)

    def _next_phase(self, session: int) -> None:
        phases = self._demand_of[session].phases
        self._phase[session] += 1
        if self._phase[session] == len(phases):
            self._end_step(session)
            phases = self._demand_of[session].phases
        elif self._phase[session] == 0:
            self._step_began_s[session] = self._now_s
        self._begin(session, phases[self._phase[session]])

    def _end_step(self, session: int) -> None:
        self._ends_s.append(self._now_s)
        self._durations_s.append(self._now_s - self._step_began_s[session])
        self._fell_back.pop(session, None)
        self._demand_of[session] = self._balanced
        self._phase[session], self._step_began_s[session] = 0, self._now_s

    def _begin(self, session: int, phase: StepPhase) -> None:
        """Lets a session begin a phase of its step."""
        self._ready_s[session], self._pending[session] = self._now_s + phase.trainer_s, 0
        fell_back: Collection[int] = self._fell_back.get(session, ())
        if fell_back and self._survivors and phase.shares and not phase.shares[0].down_bytes:
            del self._fell_back[session]  # a new micro-batch begins, which uses the other workers
            fell_back = ()
        for share in phase.shares:
            if share.worker not in fell_back:
                self._give(session, share, self._workers_of[session][share.worker])
            elif share.down_bytes:
                self._ready_s[session] += self._recompute(session, share, 1.0)
        if session in self._asking:
            self._ask(session)
        elif not self._pending[session]:
            self._wake(session)

    def _give(self, session: int, share: WorkerShare, worker: int) -> None:
        """Gives a worker its part of a phase."""
        now_s, core = self._now_s, self._resources.cores[worker]
        if share.ahead_s:
            number = ~next(self._numbers)
            self._releases[number] = (session, worker, share.ahead_s)
            heappush(self._events, (now_s + share.ahead_from_s, next(self._numbers), None, number))
        if share.compute_s and self._demand_of[session].most_waiting < math.inf:
            self._asking[session] = _Asking(share, worker, share.calls, core.take_ahead(now_s, session))
            return
        if share.compute_s:
            self._arrive(core, share.compute_s, session, share.compute_tail_s)
        self._transfer(session, share, worker, share.down_bytes)

    def _begin_ahead(self, session: int, worker: int, work_s: float) -> None:
        """Lets a worker replay a session's segments that have reached it, while nobody waits for it."""
        if worker in self._workers_of[session]:  # it may have been lost meanwhile
            core = self._resources.cores[worker]
            self._plan(core, core.arrive_ahead(self._now_s, work_s, session))

    def _ask(self, session: int) -> None:
        """Asks a worker for the backward of a session's segments, or lets the trainer compute the next one of them."""
        asking = self._asking.pop(session)
        asked, share, core = self._demand_of[session], asking.share, self._resources.cores[asking.worker]
        if not asking.calls:
            self._wake(session)
            return
        if core.waited_for >= asked.most_waiting:
            self._busy_calls += 1
            self._ready_s[session] = max(self._ready_s[session], self._now_s + asked.own_s)
            left_s = asking.left_s * (asking.calls - 1) / asking.calls
            self._asking[session] = _Asking(share, asking.worker, asking.calls - 1, left_s)
            heappush(self._events, (self._now_s + asked.own_s, next(self._numbers), None, session))
            return
        part = asking.calls / share.calls
        self._arrive(core, asking.left_s + part * share.compute_s, session, share.compute_tail_s)
        self._transfer(session, share, asking.worker, part * share.down_bytes)

    def _transfer(self, session: int, share: WorkerShare, worker: int, down_bytes: float) -> None:
        """Lets links carry a worker's part of a phase, and the frozen parameters that a new worker has not got yet."""
        up_bytes = share.up_bytes
        if self._owed_bytes and up_bytes:
            owed = self._owed_bytes.pop((session, share.worker), 0.0)
            self._resent += owed
            up_bytes += owed
        for link, size_bytes, tail_s in self._resources.links(worker, share, up_bytes, down_bytes):
            self._arrive(link, size_bytes, session, tail_s)

    def _arrive(self, resource: SharedResource, work: float, session: int, tail_s: float) -> None:
        self._pending[session] += 1
        self._plan(resource, resource.arrive(self._now_s, work, session, tail_s))

    def _plan(self, resource: SharedResource, end_s: float | None) -> None:
        """Plans the end of a resource's next job, which is void if the resource changes before."""
        if end_s is not None:
            heappush(self._events, (end_s, next(self._numbers), resource, resource.changes))

    def _job_ended(self, session: int, ready_s: float) -> None:
        self._ready_s[session] = max(self._ready_s[session], ready_s)
        self._pending[session] -= 1
        if not self._pending[session]:
            self._wake(session)

    def _wake(self, session: int) -> None:
        """Lets the next phase begin when this one is complete; no part of the phase is left to wait for."""
        heappush(self._events, (self._ready_s[session], next(self._numbers), None, session))

    def _lose_racks(self) -> None:
        """Takes the workers of the lost racks away, and moves their sessions to the others."""
        lost = self._setup.workers_lost
        if not lost:
            return
        self._lost_at_s = self._now_s
        left, removed = self._resources.lose(self._now_s)
        affected = {
            session: [own for own, worker in enumerate(workers) if worker < lost]
            for session, workers in enumerate(self._workers_of)
            if any(worker < lost for worker in workers)
        }
        spare = count()
        self._survivors -= lost
        self._balanced = self._balance_without_lost()
        for session, lost_workers in affected.items():
            parts = {self._workers_of[session].index(worker): part for worker, part in left[session].items()}
            asking = self._asking.get(session)
            if asking is not None and asking.share.worker in lost_workers:
                parts[asking.share.worker] = asking.calls / asking.share.calls
                self._asking[session] = replace(asking, calls=0)  # so that the trainer does not ask again
            self._fall_back(session, lost_workers, parts)
            for own in lost_workers:
                if self._survivors:
                    self._workers_of[session][own] = lost + next(spare) % self._survivors
                    size = self._demand_of[session].frozen_bytes / self._setup.workers_per_session
                    self._owed_bytes[session, own] = size
            if session in removed:
                self._pending[session] -= removed[session]
                if not self._pending[session]:
                    self._wake(session)

    def _balance_without_lost(self) -> Demand:
        """Returns what a session asks for from its next step on; without any worker its trainer computes everything."""
        if self._survivors:
            return flow(self._costs, self._setup, workers=self._survivors).demand
        alone_s = torch_step_s(self._costs, self._setup)
        return Demand((StepPhase(alone_s, ()),), 0, 0, alone_s, 0.0, math.inf, 0.0, 0.0, 0.0)

    def _fall_back(self, session: int, positions: Sequence[int], left: Mapping[int, float]) -> None:
        """Lets a trainer recompute what its lost workers had not returned in the step that it is in."""
        if self._phase[session] < 0:
            return
        phase = self._demand_of[session].phases[self._phase[session]]
        for share in phase.shares:
            if share.worker in positions and share.worker in left and share.down_bytes:
                # The sums of a block's gradients are lost with their worker, so all of its part is computed again.
                part = 1.0 if self._setup.is_deferred else left[share.worker]
                again_s = self._recompute(session, share, part)
                self._ready_s[session] = max(self._ready_s[session] + again_s, self._now_s + SILENCE_S + again_s)
        self._fell_back[session] = {*positions}

    def _recompute(self, session: int, share: WorkerShare, part: float) -> float:
        """Counts a part of a worker's segments as recomputed by the trainer. Returns the seconds that takes."""
        self._recomputed += part * share.calls
        return part * share.calls * self._demand_of[session].own_s

    def _result(self, busy_before: Mapping[str, float], used: int) -> SimulatedFleet:
        busy, passed_s = self._resources.busy_s(self._until_s), self._until_s - self._counted_from_s
        return SimulatedFleet(
            ends_s=self._ends_s,
            durations_s=self._durations_s,
            counted_from_s=self._counted_from_s,
            until_s=self._until_s,
            lost_at_s=self._lost_at_s,
            recomputed_calls=self._recomputed,
            busy_calls=self._busy_calls,
            resent_bytes=self._resent,
            busy_s=busy,
            utilization={kind: (busy[kind] - busy_before.get(kind, 0.0)) / passed_s for kind in busy},
            events=used,
        )

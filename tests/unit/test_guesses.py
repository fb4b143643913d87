"""A worker that goes on by itself from one segment's backward into that of the segment before."""

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from backhaul import SegmentUnknownError
from backhaul_proto.v1 import segment_pb2
from backhaul_runtime.program.codec import encode_program
from backhaul_runtime.program.program import Node, Program, ResultRef, Source, SourceRef
from backhaul_runtime.tensors.digest import address_of
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.wire.splicing import SPLICED_BYTES
from backhaul_server.worker.engine import runs, speculation
from backhaul_server.worker.engine.segment import Segment, SessionState
from backhaul_server.worker.engine.segment_machine import (
    Key,
    Phase,
)
from backhaul_server.worker.engine.worker import Worker
from backhaul_server.worker.rpc import segment_service
from unit.test_core import put, squaring, with_worker

FIRST = Key("backward", 1)
STATE = ambient_state.capture()


@pytest.fixture(autouse=True, params=[0.0, 10.0], ids=["one by one", "in one go"])
def short_s(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """How long guesses may take that run in one go: whatever it is, they are the same."""
    monkeypatch.setattr(speculation, "SHORT_S", request.param)
    return float(request.param)


async def chain(worker: Worker, values: list[float]) -> list[Segment]:
    """Segments that square, each fed by the one before. The second value is what the first squared, and so on."""
    session = worker.open_session("trainer")
    program = await worker.put_program(session, squaring())
    for number, value in enumerate(values, start=1):
        address = put(worker, session, torch.full((4,), value))
        predecessors = {0: (number - 1, 0)} if number > 1 else {}
        assert worker.save(session, number, program, [address], [0], [], "square", False, predecessors) == (False, [])
    return [worker.segment(session, number) for number in range(1, len(values) + 1)]


async def backward(worker: Worker, segment: Segment, gradient: torch.Tensor, *, runs_anew: bool) -> torch.Tensor:
    """The gradient that comes back. Fails if it was computed for this request and should not, or the other way."""
    start = runs.BackwardInputs(((0, address_of(gradient)),), STATE)
    ran = []

    def perform(work: runs.SegmentInputs, ready: runs.LiveReplay | None) -> runs.RunResult:
        ran.append(True)
        return runs.backward(work, ready, start, {0: gradient}, segment.predecessors)

    found = await worker.engine.request(segment, FIRST, lambda: perform, 0.1, start).answer
    assert bool(ran) is runs_anew
    bundle = found.bundle
    return sum(bundle.parcels[view.parcel].tensor for view in bundle.views)  # type: ignore[return-value]


async def idle(worker: Worker) -> None:
    while not worker.engine.executor.is_idle:
        await asyncio.sleep(0)


def test_a_guess_that_is_right_is_the_answer() -> None:
    async def test(worker: Worker) -> None:
        segments = await chain(worker, [2.0, 4.0, 16.0])
        gradient = await backward(worker, segments[2], torch.ones(4), runs_anew=True)
        await idle(worker)
        for segment, value in ((segments[1], 4.0), (segments[0], 2.0)):
            expected = gradient * 2 * value
            gradient = await backward(worker, segment, gradient, runs_anew=False)
            assert torch.equal(gradient, expected)
        assert (worker.engine.speculation.hits, worker.engine.speculation.misses, worker.engine.recomputed) == (2, 0, 3)
        assert worker.store.usage().working == 0

    with_worker(test)


def test_a_guess_that_is_wrong_is_thrown_away() -> None:
    async def test(worker: Worker) -> None:
        segments = await chain(worker, [2.0, 4.0])
        await backward(worker, segments[1], torch.ones(4), runs_anew=True)
        await idle(worker)
        gradient = await backward(worker, segments[0], torch.full((4,), 0.5), runs_anew=True)
        assert torch.equal(gradient, torch.full((4,), 2.0))
        assert (worker.engine.speculation.hits, worker.engine.speculation.misses) == (0, 1)
        assert worker.store.usage().working == 0

    with_worker(test)


def test_a_request_that_comes_while_its_guess_runs_waits_for_it() -> None:
    async def test(worker: Worker) -> None:
        segments = await chain(worker, [2.0, 4.0])
        await idle(worker)  # both replays are there
        gradient = await backward(worker, segments[1], torch.ones(4), runs_anew=True)
        assert segments[0].speculation is not None
        assert segments[0].speculation.result is None
        await backward(worker, segments[0], gradient, runs_anew=False)

    with_worker(test)


def test_other_ambient_settings_are_another_request() -> None:
    async def test(worker: Worker) -> None:
        segments = await chain(worker, [2.0, 4.0])
        gradient = await backward(worker, segments[1], torch.ones(4), runs_anew=True)
        await idle(worker)
        with torch.autocast("cpu", torch.bfloat16):
            start = runs.BackwardInputs(((0, address_of(gradient)),), ambient_state.capture())
        perform = partial(runs.backward, start=start, gradients={0: gradient})
        await worker.engine.request(segments[0], FIRST, lambda: perform, 0.1, start).answer
        assert (worker.engine.speculation.hits, worker.engine.speculation.misses) == (0, 1)

    with_worker(test)


def test_room_that_is_needed_is_taken_from_guesses() -> None:
    async def test(worker: Worker) -> None:
        segments = await chain(worker, [2.0, 4.0])
        gradient = await backward(worker, segments[1], torch.ones(4), runs_anew=True)
        await idle(worker)
        usage = worker.store.usage()
        held = usage.segments + usage.sessions
        worker.store.expect(usage.budget - held - segments[0].footprint.run_bytes)
        assert segments[0].speculation is None
        assert segments[0].machine.phase is Phase.SAVED
        assert torch.equal(await backward(worker, segments[0], gradient, runs_anew=True), gradient * 4)

    with_worker(test)


def test_a_segment_released_while_its_guess_runs_leaves_nothing() -> None:
    async def test(worker: Worker) -> None:
        segments = await chain(worker, [2.0, 4.0])
        await backward(worker, segments[1], torch.ones(4), runs_anew=True)
        session: SessionState = segments[0].session
        worker.close_session(session.id)
        await idle(worker)
        usage = worker.store.usage()
        assert (usage.segments, usage.working, usage.results) == (0, 0, 0)
        assert segments[0].speculation is None
        assert session.segments == {}

    with_worker(test)


def test_a_predecessor_that_is_gone_is_passed_over() -> None:
    async def test(worker: Worker) -> None:
        segments = await chain(worker, [2.0, 4.0])
        worker.release(segments[0].session, [1])
        await backward(worker, segments[1], torch.ones(4), runs_anew=True)
        await idle(worker)
        assert worker.engine.recomputed == 1

    with_worker(test)


def test_short_guesses_run_in_one_go(monkeypatch: pytest.MonkeyPatch, short_s: float) -> None:
    async def test(worker: Worker) -> None:
        found = await chain(worker, [2.0, 4.0, 16.0, 256.0])
        await idle(worker)
        jobs = []
        run_backward = worker.engine.speculation.run_backward
        monkeypatch.setattr(
            worker.engine.speculation, "run_backward", lambda each: (jobs.append(each.id), run_backward(each))[1]
        )
        telling = found[0].session.open_push_queue()
        await backward(worker, found[3], torch.ones(4), runs_anew=True)
        await idle(worker)
        assert jobs == ([3] if short_s else [3, 2, 1])
        told = [telling.get_nowait() for _ in range(telling.qsize())]
        assert [each.id for each in told if each is not None] == [3, 2, 1]

    with_worker(test)


@pytest.mark.parametrize("gone", [1, 2])
def test_a_segment_released_in_the_midst_of_its_chain(monkeypatch: pytest.MonkeyPatch, gone: int) -> None:
    async def test(worker: Worker) -> None:
        found = await chain(worker, [2.0, 4.0, 16.0, 256.0])
        await idle(worker)
        run = runs.backward

        def run_and_release(work: runs.SegmentInputs, *args: Any) -> runs.RunResult:
            if work is first:
                asyncio.run_coroutine_threadsafe(release(), loop).result()
            return run(work, *args)

        async def release() -> None:
            worker.release(found[0].session, [gone])

        loop, first = asyncio.get_running_loop(), found[2].inputs
        monkeypatch.setattr(runs, "backward", run_and_release)
        await backward(worker, found[3], torch.ones(4), runs_anew=True)
        await idle(worker)
        assert [each.speculation is not None for each in found] == [False, gone == 1, True, False]
        assert found[gone - 1].ready is None
        worker.close_session(found[0].session.id)
        usage = worker.store.usage()
        assert (usage.segments, usage.working, usage.results) == (0, 0, 0)

    with_worker(test)


def test_a_request_in_the_midst_of_its_chain_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(worker: Worker) -> None:
        found = await chain(worker, [2.0, 4.0, 16.0])
        await idle(worker)
        run, asked = runs.backward, []

        def run_and_ask(work: runs.SegmentInputs, *args: Any) -> runs.RunResult:
            if work is middle and not asked:
                asked.append(asyncio.run_coroutine_threadsafe(ask(), loop).result())
            return run(work, *args)

        async def ask() -> "asyncio.Task[torch.Tensor]":
            task = asyncio.create_task(backward(worker, found[0], torch.full((4,), 0.5), runs_anew=True))
            await asyncio.sleep(0)
            return task

        loop, middle = asyncio.get_running_loop(), found[1].inputs
        monkeypatch.setattr(runs, "backward", run_and_ask)
        await backward(worker, found[2], torch.ones(4), runs_anew=True)
        await idle(worker)
        assert torch.equal(await asked[0], torch.full((4,), 2.0))
        worker.close_session(found[0].session.id)
        usage = worker.store.usage()
        assert (usage.segments, usage.working, usage.results) == (0, 0, 0)

    with_worker(test)


def test_short_answers_go_together_and_no_more_are_made_than_are_sent() -> None:
    made: list[int] = []

    def answers() -> Iterator[bytes]:
        for segment, size_bytes in ((5, 10), (4, 10), (3, SPLICED_BYTES), (2, 10), (1, SPLICED_BYTES)):
            made.append(segment)
            result = segment_pb2.BackwardResult(tensor_digests=[bytes(size_bytes)])
            yield segment_pb2.AheadResponse(segment=segment, result=result).SerializeToString()

    found = []
    for message in segment_service._joined(answers()):
        response = segment_pb2.AheadResponse.FromString(message)
        found.append([response.segment, *(each.segment for each in response.more)])
        assert made[-1] == found[-1][-1]
        assert all(len(each.result.tensor_digests) == 1 for each in (response, *response.more))
    assert found == [[5, 4, 3], [2, 1]]


def drawing() -> bytes:
    """Two draws of four numbers each, with x."""
    x = SourceRef(0)
    draw = Node("aten.rand_like.default", (x,), (), 0, (16,), draws=True)
    product = Node("aten.mul.Tensor", (x, ResultRef(1, 0)), (), 0, (16,), draws=False)
    return encode_program(
        Program(
            sources=(Source(requires_grad=True, is_leaf=False, is_written=False),),
            nodes=(draw, draw, product),
            ambient_states=(ambient_state.capture(),),
            outputs=(ResultRef(2, 0),),
            saved_count=1,
            saved_bytes=0,
        )
    )


def states() -> list[bytes]:
    """Of two draws of four numbers in a row."""
    found = []
    for _ in range(2):
        found.append(torch.get_rng_state().numpy().tobytes())
        torch.rand(4)
    return found


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("is_early", [True, False])
def test_a_replay_that_began_before_its_call_had_ended(*, is_right: bool, is_early: bool) -> None:
    async def test(worker: Worker) -> None:
        session = worker.open_session("trainer")
        program = await worker.put_program(session, drawing())
        address = put(worker, session, torch.ones(4))
        first, second = states()
        more = () if is_right else states()

        def save(given: list[bytes], *, is_predicted: bool) -> None:
            found = worker.save(session, 1, program, [address], [0], given, "", False, is_predicted=is_predicted)
            assert found == (False, [])

        save([first, b""], is_predicted=True)
        with pytest.raises(SegmentUnknownError):
            worker.segment(session, 1)
        if not is_early:
            await idle(worker)
        replayed = session.segments[1].ready
        save([first, *(more[:1] or [second])], is_predicted=False)
        segment = worker.segment(session, 1)
        await idle(worker)
        assert segment.ready is not None
        assert (segment.ready is replayed) is (is_right and not is_early)
        assert segment.ready.replay.drawn_from == list(segment.inputs.generator_states)
        assert worker.engine.speculation.misses == (not is_right and not is_early)
        worker.release(session, [1])
        worker.close_session(session.id)
        usage = worker.store.usage()
        assert (usage.segments, usage.working, usage.cached) == (0, 0, 0)

    with_worker(test)


def test_a_call_that_was_another_takes_the_place_of_what_was_predicted() -> None:
    async def test(worker: Worker) -> None:
        session = worker.open_session("trainer")
        program = await worker.put_program(session, squaring())
        two, three = put(worker, session, torch.full((4,), 2.0)), put(worker, session, torch.full((4,), 3.0))
        worker.save(session, 1, program, [two], [0], [], "", False, is_predicted=True)
        await asyncio.sleep(0)  # its replay may run now
        assert worker.save(session, 1, program, [three], [0], [], "", False) == (False, [])
        segment = worker.segment(session, 1)
        gradient = await backward(worker, segment, torch.ones(4), runs_anew=True)
        assert torch.equal(gradient, torch.full((4,), 6.0))
        assert worker.engine.speculation.misses == 1
        await idle(worker)
        worker.release(session, [1])
        worker.close_session(session.id)
        usage = worker.store.usage()
        assert (usage.segments, usage.working, usage.results, usage.cached) == (0, 0, 0, 0)

    with_worker(test)

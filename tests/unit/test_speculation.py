"""Speculative work: a worker that continues with the backward of the segment before, before it is requested."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import torch

from backhaul import SegmentUnknownError
from backhaul_proto.v1 import segment_pb2
from backhaul_runtime.program.codec import encode_program
from backhaul_runtime.program.program import Node, ResultRef, SourceRef
from backhaul_runtime.tensors.digest import address_of
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.wire.splicing import SPLICED_BYTES
from backhaul_server.worker.engine import executions, speculation
from backhaul_server.worker.engine.segment import Segment, SessionState
from backhaul_server.worker.engine.segment_machine import (
    Key,
    Phase,
)
from backhaul_server.worker.engine.store import ENTRY_BYTES
from backhaul_server.worker.engine.worker import Worker
from backhaul_server.worker.rpc.segment_answers import joined
from support.hostile import of_nodes
from unit.test_core import in_worker, put, squaring

FIRST = Key("backward", 1)
STATE = ambient_state.capture()


@pytest.fixture(autouse=True, params=[0.0, 10.0], ids=["one by one", "in one job"])
def short_s(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """The duration up to which speculative backwards share a job. It does not change their results."""
    monkeypatch.setattr(speculation, "SHORT_S", request.param)
    return float(request.param)


async def chain(worker: Worker, values: list[float]) -> list[Segment]:
    """Saves segments that square their input. Each one but the first has the output of the one before as its input."""
    session = worker.open_session("trainer")
    program = await worker.put_program(session, squaring())
    for number, value in enumerate(values, start=1):
        address = put(worker, session, torch.full((4,), value))
        predecessors = {0: (number - 1, 0)} if number > 1 else {}
        assert worker.saver.save(session, number, program, [address], [0], [], "square", False, predecessors) == (
            False,
            [],
        )
    return [worker.segment(session, number) for number in range(1, len(values) + 1)]


async def backward(worker: Worker, segment: Segment, gradient: torch.Tensor, *, is_anew: bool) -> torch.Tensor:
    """Requests a backward, and returns the gradient. Checks whether a run or a speculative result answered it."""
    start = executions.BackwardInputs(((0, address_of(gradient)),), STATE)
    ran = []

    def perform(work: executions.SegmentInputs, ready: executions.LiveReplay | None) -> executions.ExecutionResult:
        ran.append(True)
        return executions.backward(work, ready, start, {0: gradient}, segment.predecessors)

    result = await worker.engine.request(segment, FIRST, lambda: perform, 0.1, start).answer
    assert bool(ran) is is_anew
    bundle = result.bundle
    return sum(bundle.tensors[view.tensor_index].tensor for view in bundle.views)  # type: ignore[return-value]


async def idle(worker: Worker) -> None:
    while not worker.engine._executor.is_idle:
        await asyncio.sleep(0)


@in_worker()
async def test_a_speculative_backward_from_the_right_gradients_is_the_answer(worker: Worker) -> None:
    segments = await chain(worker, [2.0, 4.0, 16.0])
    gradient = await backward(worker, segments[2], torch.ones(4), is_anew=True)
    await idle(worker)
    for segment, value in ((segments[1], 4.0), (segments[0], 2.0)):
        expected = gradient * 2 * value
        gradient = await backward(worker, segment, gradient, is_anew=False)
        assert torch.equal(gradient, expected)
    assert (worker.engine.work.hits, worker.engine.work.misses, worker.engine.work.recomputed) == (2, 0, 3)
    assert worker.store.usage().working == 0


@in_worker()
async def test_an_execution_evicts_no_replay_that_it_takes_over_itself(worker: Worker) -> None:
    segments = await chain(worker, [2.0, 4.0, 16.0])
    await idle(worker)
    store = worker.store

    def free_bytes() -> int:
        usage = store.usage()
        return usage.budget - usage.segments - usage.cached - usage.working - usage.results - usage.sessions

    for part in (2, 1):  # tensors that arrive for a segment which is not saved yet are evicted after replays
        put(worker, segments[0].session, torch.ones((free_bytes() // part - ENTRY_BYTES) // 4))
    first = segments[0].footprint
    assert free_bytes() < first.execution_bytes - first.ready_bytes
    assert worker.engine._start_execution(segments[0], first.execution_bytes) is not None
    assert [segment.machine.phase for segment in segments] == [Phase.READY, Phase.SAVED, Phase.READY]
    assert segments[0].ready is not None


@in_worker()
async def test_a_speculative_backward_from_other_gradients_is_discarded(worker: Worker) -> None:
    segments = await chain(worker, [2.0, 4.0])
    await backward(worker, segments[1], torch.ones(4), is_anew=True)
    await idle(worker)
    gradient = await backward(worker, segments[0], torch.full((4,), 0.5), is_anew=True)
    assert torch.equal(gradient, torch.full((4,), 2.0))
    assert (worker.engine.work.hits, worker.engine.work.misses) == (0, 1)
    assert worker.store.usage().working == 0


@in_worker()
async def test_a_request_waits_for_its_speculative_backward(worker: Worker) -> None:
    segments = await chain(worker, [2.0, 4.0])
    await idle(worker)  # both replays are there
    gradient = await backward(worker, segments[1], torch.ones(4), is_anew=True)
    assert segments[0].speculation is not None
    assert segments[0].speculation.result is None
    await backward(worker, segments[0], gradient, is_anew=False)


@in_worker()
async def test_other_ambient_settings_are_another_request(worker: Worker) -> None:
    segments = await chain(worker, [2.0, 4.0])
    gradient = await backward(worker, segments[1], torch.ones(4), is_anew=True)
    await idle(worker)
    with torch.autocast("cpu", torch.bfloat16):
        start = executions.BackwardInputs(((0, address_of(gradient)),), ambient_state.capture())
    perform = partial(executions.backward, start=start, gradients={0: gradient})
    await worker.engine.request(segments[0], FIRST, lambda: perform, 0.1, start).answer
    assert (worker.engine.work.hits, worker.engine.work.misses) == (0, 1)


@in_worker()
async def test_speculative_results_are_evicted_when_memory_is_needed(worker: Worker) -> None:
    segments = await chain(worker, [2.0, 4.0])
    gradient = await backward(worker, segments[1], torch.ones(4), is_anew=True)
    await idle(worker)
    usage = worker.store.usage()
    held = usage.segments + usage.sessions
    worker.store.expect(segments[0].session, usage.budget - held - segments[0].footprint.execution_bytes)
    assert segments[0].speculation is None
    assert segments[0].machine.phase is Phase.SAVED
    assert torch.equal(await backward(worker, segments[0], gradient, is_anew=True), gradient * 4)


@in_worker()
async def test_a_segment_released_during_its_speculative_backward_leaves_nothing(worker: Worker) -> None:
    segments = await chain(worker, [2.0, 4.0])
    await backward(worker, segments[1], torch.ones(4), is_anew=True)
    session: SessionState = segments[0].session
    worker.close_session(session.id)
    await idle(worker)
    usage = worker.store.usage()
    assert (usage.segments, usage.working, usage.results) == (0, 0, 0)
    assert segments[0].speculation is None
    assert session.segments == {}


@in_worker()
async def test_a_released_predecessor_is_skipped(worker: Worker) -> None:
    segments = await chain(worker, [2.0, 4.0])
    worker.release(segments[0].session, [1])
    await backward(worker, segments[1], torch.ones(4), is_anew=True)
    await idle(worker)
    assert worker.engine.work.recomputed == 1


@in_worker()
async def test_short_speculative_backwards_share_a_job(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, short_s: float
) -> None:
    segments = await chain(worker, [2.0, 4.0, 16.0, 256.0])
    await idle(worker)
    jobs: list[int] = []
    executed_backwards = worker.engine._run_backwards

    def noted(first: Segment) -> None:
        jobs.append(first.id)
        executed_backwards(first)

    monkeypatch.setattr(worker.engine, "_run_backwards", noted)
    queue = segments[0].session.open_push_queue()
    await backward(worker, segments[3], torch.ones(4), is_anew=True)
    await idle(worker)
    assert jobs == ([3] if short_s else [3, 2, 1])
    pushed = [queue.get_nowait() for _ in range(queue.qsize())]
    assert [segment.id for segment in pushed if segment is not None] == [3, 2, 1]


@pytest.mark.parametrize("gone", [1, 2])
@in_worker()
async def test_a_segment_released_in_the_midst_of_its_chain(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, gone: int
) -> None:
    segments = await chain(worker, [2.0, 4.0, 16.0, 256.0])
    await idle(worker)
    run = executions.backward

    def run_and_release(work: executions.SegmentInputs, *args: Any) -> executions.ExecutionResult:
        if work is first:
            asyncio.run_coroutine_threadsafe(release(), loop).result()
        return run(work, *args)

    async def release() -> None:
        worker.release(segments[0].session, [gone])

    loop, first = asyncio.get_running_loop(), segments[2].inputs
    monkeypatch.setattr(executions, "backward", run_and_release)
    await backward(worker, segments[3], torch.ones(4), is_anew=True)
    await idle(worker)
    assert [segment.speculation is not None for segment in segments] == [False, gone == 1, True, False]
    assert segments[gone - 1].ready is None
    worker.close_session(segments[0].session.id)
    usage = worker.store.usage()
    assert (usage.segments, usage.working, usage.results) == (0, 0, 0)


@in_worker()
async def test_a_request_in_the_midst_of_its_chain_is_answered(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = await chain(worker, [2.0, 4.0, 16.0])
    await idle(worker)
    run = executions.backward
    asked: list[asyncio.Task[torch.Tensor]] = []

    def run_and_ask(work: executions.SegmentInputs, *args: Any) -> executions.ExecutionResult:
        if work is middle and not asked:
            asked.append(asyncio.run_coroutine_threadsafe(ask(), loop).result())
        return run(work, *args)

    async def ask() -> "asyncio.Task[torch.Tensor]":
        task = asyncio.create_task(backward(worker, segments[0], torch.full((4,), 0.5), is_anew=True))
        await asyncio.sleep(0)
        return task

    loop, middle = asyncio.get_running_loop(), segments[1].inputs
    monkeypatch.setattr(executions, "backward", run_and_ask)
    await backward(worker, segments[2], torch.ones(4), is_anew=True)
    await idle(worker)
    assert torch.equal(await asked[0], torch.full((4,), 2.0))
    worker.close_session(segments[0].session.id)
    usage = worker.store.usage()
    assert (usage.segments, usage.working, usage.results) == (0, 0, 0)


def test_short_answers_share_a_message_and_none_is_taken_before_it_is_sent() -> None:
    made: list[int] = []

    def key(segment: int) -> segment_pb2.OperationKey:
        return segment_pb2.OperationKey(segment=segment)

    async def answers() -> AsyncIterator[bytes]:
        for segment, size_bytes in ((5, 10), (4, 10), (3, SPLICED_BYTES), (2, 10), (1, SPLICED_BYTES)):
            made.append(segment)
            result = segment_pb2.BackwardResult(tensor_digests=[bytes(size_bytes)])
            yield segment_pb2.Answer(key=key(segment), backward=result).SerializeToString()

    received = []

    async def receive() -> None:
        async for message in joined(answers()):
            first = segment_pb2.Answer.FromString(message)
            received.append([answer.key.segment for answer in (first, *first.more)])
            assert made[-1] == received[-1][-1]
            assert all(len(answer.backward.tensor_digests) == 1 for answer in (first, *first.more))

    asyncio.run(receive())
    assert received == [[5, 4, 3], [2, 1]]


def drawing() -> bytes:
    """A program that draws four numbers twice, and multiplies x by the second draw."""
    x = SourceRef(0)
    draw = Node("aten.rand_like.default", (x,), (), 0, (16,), draws=True)
    product = Node("aten.mul.Tensor", (x, ResultRef(1, 0)), (), 0, (16,), draws=False)
    return encode_program(of_nodes(draw, draw, product, saved=1))


def states() -> list[bytes]:
    """The generator states before two draws of four numbers in a row."""
    drawn = []
    for _ in range(2):
        drawn.append(torch.get_rng_state().numpy().tobytes())
        torch.rand(4)
    return drawn


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("is_early", [True, False])
@in_worker()
async def test_a_replay_that_began_before_its_call_had_ended(worker: Worker, *, is_right: bool, is_early: bool) -> None:
    session = worker.open_session("trainer")
    program = await worker.put_program(session, drawing())
    address = put(worker, session, torch.ones(4))
    first, second = states()
    more = () if is_right else states()

    def save(given: list[bytes], *, is_predicted: bool) -> None:
        missing = worker.saver.save(session, 1, program, [address], [0], given, "", False, is_predicted=is_predicted)
        assert missing == (False, [])

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
    assert segment.inputs is not None
    assert (segment.ready is replayed) is (is_right and not is_early)
    assert segment.ready.replay.drawn_from == list(segment.inputs.generator_states)
    assert worker.engine.work.misses == (not is_right and not is_early)
    worker.release(session, [1])
    worker.close_session(session.id)
    usage = worker.store.usage()
    assert (usage.segments, usage.working, usage.cached) == (0, 0, 0)


@in_worker()
async def test_a_mispredicted_segment_is_replaced(worker: Worker) -> None:
    session = worker.open_session("trainer")
    program = await worker.put_program(session, squaring())
    two, three = put(worker, session, torch.full((4,), 2.0)), put(worker, session, torch.full((4,), 3.0))
    worker.saver.save(session, 1, program, [two], [0], [], "", False, is_predicted=True)
    await asyncio.sleep(0)  # its replay may run now
    assert worker.saver.save(session, 1, program, [three], [0], [], "", False) == (False, [])
    segment = worker.segment(session, 1)
    gradient = await backward(worker, segment, torch.ones(4), is_anew=True)
    assert torch.equal(gradient, torch.full((4,), 6.0))
    assert worker.engine.work.misses == 1
    await idle(worker)
    worker.release(session, [1])
    worker.close_session(session.id)
    usage = worker.store.usage()
    assert (usage.segments, usage.working, usage.results, usage.cached) == (0, 0, 0, 0)

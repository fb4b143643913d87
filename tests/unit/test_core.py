"""The worker's engine in this process, without RPCs."""

import asyncio
import gc
import inspect
import weakref
from collections.abc import Awaitable, Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch

from backhaul import BudgetError, DrainingError, LimitError, ProgramError, SegmentUnknownError, SessionUnknownError
from backhaul_runtime.program.codec import encode_program
from backhaul_runtime.program.program import NODE_BYTES, Node, SourceRef
from backhaul_runtime.tensors.digest import address_of
from backhaul_runtime.tensors.layout import layout_of
from backhaul_runtime.torch_internals import ambient_state
from backhaul_server.worker.engine import executions, segment_saver
from backhaul_server.worker.engine.segment import Segment, SessionState
from backhaul_server.worker.engine.segment_machine import Key
from backhaul_server.worker.engine.worker import Worker
from backhaul_server.worker.limits import Limit
from support.hostile import of_nodes

FIRST = Key("backward", 1)
START = executions.BackwardInputs(((0, address_of(torch.ones(4))),), ambient_state.capture())


def with_worker(
    test: Callable[[Worker], Awaitable[None]], *, budget_bytes: int = 1 << 20, lease_s: float = 30.0
) -> None:
    async def main() -> None:
        worker = Worker(torch.device("cpu"), budget_bytes, lease_s)
        try:
            await test(worker)
        finally:
            await worker.close()

    asyncio.run(main())


def in_worker(*, budget_bytes: int = 1 << 20, lease_s: float = 30.0) -> Callable[[Callable[..., Any]], Any]:
    """Makes a test of a coroutine function, which gets a worker in this process as its first argument."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        @wraps(test)
        def run(**fixtures: Any) -> None:
            with_worker(partial(test, **fixtures), budget_bytes=budget_bytes, lease_s=lease_s)

        _worker, *others = inspect.signature(test).parameters.values()
        run.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]  # pytest asks for fixtures by it
        return run

    return decorate


def squaring() -> bytes:
    """Encodes a program that returns x * x, with a gradient for x."""
    x = SourceRef(0)
    return encode_program(of_nodes(Node("aten.mul.Tensor", (x, x), (), 0, (16,), draws=False), saved=2))


def put(worker: Worker, session: SessionState, tensor: torch.Tensor) -> bytes:
    layout, address = layout_of(tensor), address_of(tensor)
    worker.store.arrived(session, address, tensor, worker.expect_tensor(session, layout))
    return address


async def saved(worker: Worker, session: SessionState, number: int = 1, value: float = 3.0) -> Segment:
    program = await worker.put_program(session, squaring())
    address = put(worker, session, torch.full((4,), value))
    assert worker.saver.save(session, number, program, [address], [0], [], "square", False) == (False, [])
    return worker.segment(session, number)


async def backward(
    worker: Worker, session: SessionState, segment: Segment, key: Key = FIRST
) -> executions.ExecutionResult:
    def prepare() -> Any:
        return partial(executions.backward, start=START, gradients={0: torch.ones(4)})

    return await worker.engine.request(segment, key, prepare, 0.1).answer


@in_worker()
async def test_a_segment_from_save_to_release(worker: Worker) -> None:
    session = worker.open_session("trainer")
    segment = await saved(worker, session)
    result = await backward(worker, session, segment)
    assert [outgoing.tensor.tolist() for outgoing in result.bundle.tensors] == [[3.0] * 4] * 2  # each use of x
    assert result.sources == (0, 0)
    worker.release(session, [1])
    worker.close_session(session.id)
    usage = worker.store.usage()
    assert (usage.segments, usage.cached, usage.working, usage.results) == (0, 0, 0, 0)
    with pytest.raises(SegmentUnknownError):
        worker.segment(session, 1)


@pytest.mark.parametrize("is_predicted", [False, True])
@in_worker()
async def test_a_save_that_its_release_has_overtaken_is_refused(worker: Worker, *, is_predicted: bool) -> None:
    session = worker.open_session("trainer")
    program = await worker.put_program(session, squaring())
    address = put(worker, session, torch.ones(4))

    def save(number: int, after_release: int) -> tuple[bool, list[bytes]]:
        return worker.saver.save(
            session,
            number,
            program,
            [address],
            [],
            [],
            "",
            False,
            is_predicted=is_predicted,
            after_release=after_release,
        )

    assert save(1, 0) == (False, [])
    worker.release(session, [1, 2], 5)
    worker.release(session, [1], 4)
    for number in (1, 2):
        with pytest.raises(SegmentUnknownError, match="given it up"):
            save(number, 4)
    assert session.segments == {}
    assert save(3, 5) == (False, [])
    assert list(session.segments) == [3]


@in_worker()
async def test_one_computation_for_a_request_that_is_repeated(worker: Worker) -> None:
    session = worker.open_session("trainer")
    segment = await saved(worker, session)
    both = await asyncio.gather(backward(worker, session, segment), backward(worker, session, segment))
    again = await backward(worker, session, segment)
    assert both[0] is both[1] is again
    assert worker.engine.work.recomputed == 1
    assert await backward(worker, session, segment, Key("backward", 2)) is not again
    assert worker.engine.work.recomputed == 2


@in_worker()
async def test_a_repeated_save_changes_nothing(worker: Worker) -> None:
    session = worker.open_session("trainer")
    segment = await saved(worker, session)
    before = worker.store.usage().segments
    assert await saved(worker, session) is segment
    assert worker.store.usage().segments == before


@in_worker()
async def test_what_replaces_a_prediction_is_bounded_as_well(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_saver, "NAMED", Limit("sources", 1, "of the test"))
    session = worker.open_session("trainer")
    program = await worker.put_program(session, squaring())
    address = put(worker, session, torch.ones(4))
    worker.saver.save(session, 1, program, [address], [], [], "", False, is_predicted=True)
    with pytest.raises(LimitError, match="2 sources"):
        worker.saver.save(session, 1, program, [address] * 2, [], [], "", False)


@in_worker()
async def test_the_sources_of_a_prediction_are_not_derived(worker: Worker) -> None:
    session = worker.open_session("trainer")
    segment = await saved(worker, session)
    program, address, layout = segment.addresses[0], b"of an output", layout_of(torch.ones(4))

    def save(number: int, *, is_predicted: bool) -> tuple[bool, list[bytes]]:
        return worker.saver.save(
            session,
            number,
            program,
            [address],
            [],
            [],
            "",
            False,
            {0: (1, 0)},
            {0: layout},
            is_predicted=is_predicted,
        )

    assert save(2, is_predicted=True) == (False, [address])
    assert save(2, is_predicted=False) == (False, [])


@pytest.mark.parametrize("is_predicted", [False, True])
@in_worker()
async def test_a_later_save_does_not_replace_what_may_run(worker: Worker, *, is_predicted: bool) -> None:
    session = worker.open_session("trainer")
    segment = await saved(worker, session)
    program, other = segment.addresses[0], put(worker, session, torch.zeros(4))

    def save(number: int, *, is_predicted: bool) -> tuple[bool, list[bytes]]:
        return worker.saver.save(session, number, program, [other], [], [], "", False, is_predicted=is_predicted)

    assert save(1, is_predicted=is_predicted) == (False, [])
    assert worker.segment(session, 1) is segment
    for _ in range(2):
        save(2, is_predicted=True)
    assert not session.segments[2].is_confirmed


@in_worker()
async def test_a_save_reports_missing_program_and_tensors(worker: Worker) -> None:
    session = worker.open_session("trainer")
    address = address_of(torch.ones(4))
    assert worker.saver.save(session, 1, b"no such program", [address], [], [], "x", False) == (True, [address])
    assert session.segments == {}


@pytest.mark.parametrize(("sources", "transient"), [(2, []), (0, []), (1, [1]), (1, [99])])
@in_worker()
async def test_lists_that_do_not_fit_the_program(worker: Worker, sources: int, transient: list[int]) -> None:
    session = worker.open_session("trainer")
    addresses = [put(worker, session, torch.full((4,), float(i))) for i in range(sources)]
    with pytest.raises(ProgramError):
        worker.saver.save(
            session, 1, await worker.put_program(session, squaring()), addresses, transient, [], "x", False
        )


def test_nothing_of_a_finished_segment_stays_until_garbage_is_collected() -> None:
    async def test(worker: Worker) -> None:
        session = worker.open_session("trainer")
        segment = await saved(worker, session)
        result = await backward(worker, session, segment)
        storage = weakref.ref(result.bundle.tensors[0].tensor.untyped_storage())
        del result
        reference = weakref.ref(segment)
        del segment
        worker.release(session, [1])
        await asyncio.sleep(0.05)
        assert (reference(), storage()) == (None, None)

    gc.disable()
    try:
        with_worker(test)
    finally:
        gc.enable()


@in_worker(lease_s=0.2)
async def test_the_session_of_a_silent_trainer_expires(worker: Worker) -> None:
    session = worker.open_session("trainer")
    await saved(worker, session)
    while worker.sessions:
        await asyncio.sleep(0.01)
    assert worker.store.usage().segments == 0
    with pytest.raises(SessionUnknownError, match="its lease of 0.2 s ran out"):
        worker.session(session.id)


@in_worker()
async def test_a_draining_worker_finishes_requests_and_accepts_nothing_new(worker: Worker) -> None:
    session = worker.open_session("trainer")
    segment = await saved(worker, session)
    worker.draining = True
    await backward(worker, session, segment)
    with pytest.raises(DrainingError):
        worker.open_session("another")
    with pytest.raises(DrainingError):
        await saved(worker, session, 2)


@in_worker()
async def test_a_segment_released_while_it_waits_is_not_run(worker: Worker) -> None:
    session = worker.open_session("trainer")
    segment = await saved(worker, session)
    request = asyncio.ensure_future(backward(worker, session, segment))
    await asyncio.sleep(0)
    worker.release(session, [1])
    with pytest.raises(SegmentUnknownError):
        await request
    while len(worker.engine._executor):
        await asyncio.sleep(0.01)
    assert worker.store.usage().working == 0


@in_worker(budget_bytes=300_000)
async def test_segments_beyond_the_budget_are_refused_and_the_others_still_run(worker: Worker) -> None:
    session = worker.open_session("trainer")
    number = 0
    with pytest.raises(BudgetError) as caught:
        for number in range(100):
            await saved(worker, session, number, float(number))
    assert 0 < number < 99
    assert caught.value.retry_after_s > 0
    for segment in list(session.segments.values()):
        await backward(worker, session, segment)


def test_a_small_budget_keeps_ready_what_backward_needs_first() -> None:
    async def test(worker: Worker) -> None:
        session = worker.open_session("trainer")
        for turn in (0, 4):
            were_ready: set[int] = set()
            for number in range(turn, turn + 4):
                await saved(worker, session, number, float(number))
                while not worker.engine._executor.is_idle:
                    await asyncio.sleep(0)
                are_ready = {n for n, segment in session.segments.items() if segment.ready is not None}
                were_ready |= are_ready
                usage = worker.store.usage()
                assert usage.segments + usage.cached + usage.working + usage.results <= usage.budget
            assert are_ready >= {turn + 2, turn + 3}
            for number in reversed(range(turn, turn + 4)):
                await backward(worker, session, worker.segment(session, number))
                worker.release(session, [number])
        assert were_ready == {6, 7}  # the second forward knows how many segments are saved

    taken: list[int] = []

    async def take(worker: Worker) -> None:
        session = worker.open_session("trainer")
        for number in range(4):
            await saved(worker, session, number, float(number))
        usage = worker.store.usage()
        taken.append(usage.segments + usage.sessions)

    with_worker(take)
    # Room for four segments, two replays of 16 bytes and a node each, two gradients, and a temporary
    # tensor while one of them runs.
    with_worker(test, budget_bytes=taken[0] + 2 * (16 + NODE_BYTES) + 3 * 16)


@pytest.mark.parametrize("states", [[b"state"], [bytes(1 << 20)]])
@in_worker()
async def test_generator_states_without_a_draw_are_refused(worker: Worker, states: list[bytes]) -> None:
    session = worker.open_session("trainer")
    program, address = await worker.put_program(session, squaring()), put(worker, session, torch.ones(4))
    with pytest.raises(ProgramError, match="draws"):
        worker.saver.save(session, 1, program, [address], [0], states, "square", False)


@pytest.mark.parametrize("end", ["release", "close", "lease"])
def test_the_end_of_a_segment_cancels_its_execution(end: str) -> None:
    async def test(worker: Worker) -> None:
        session = worker.open_session("trainer")
        segment = await saved(worker, session)
        segment.bounds.check()
        if end == "release":
            worker.release(session, [segment.id])
        elif end == "close":
            worker.close_session(session.id)
        else:
            while session.id in worker.sessions:
                await asyncio.sleep(0.01)
        with pytest.raises(SegmentUnknownError, match="was released meanwhile"):
            segment.bounds.check()

    with_worker(test, lease_s=0.05 if end == "lease" else 30.0)


@in_worker()
async def test_names_and_states_are_charged_to_the_session_and_refunded(worker: Worker) -> None:
    before = worker.store.usage()
    session = worker.open_session("\U0001f600" * 200)
    assert worker.store.usage().sessions >= before.sessions + 800
    program = await worker.put_program(session, squaring())
    address = put(worker, session, torch.ones(4))
    worker.saver.save(session, 1, program, [address], [0], [], "x", False)
    short = worker.store.usage().segments
    worker.saver.save(session, 2, program, [address], [0], [], "\U0001f600" * 1_000, False)
    assert worker.store.usage().segments >= short + 4_000
    worker.close_session(session.id)
    after = worker.store.usage()
    assert (after.sessions, after.segments, after.cached) == (0, 0, 0)

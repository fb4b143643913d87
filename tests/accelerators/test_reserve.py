"""What a worker on CUDA takes of its device beside the tensors that its store charges: NOTE [Reserve]."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import backhaul
from backhaul import BudgetError
from backhaul_runtime.tensors.digest import address_of
from backhaul_runtime.torch_internals import ambient_state
from backhaul_server.worker.engine import executions
from backhaul_server.worker.engine.device_memory import DeviceMemory
from backhaul_server.worker.engine.segment import SessionState
from backhaul_server.worker.engine.worker import Worker
from conftest import QUIET
from support.processes import WorkerProcess
from unit.test_core import FIRST, put, squaring

DEVICE = torch.device("cuda", 0)
BUDGET, WORKSPACE = 4 << 20, 3 << 20
DEVICE_BYTES = 16 << 30


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def with_worker(test: Callable[[Worker, SessionState], Awaitable[None]]) -> None:
    async def main() -> None:
        worker = Worker(DEVICE, BUDGET, 30.0, execution_memory=DeviceMemory(DEVICE, BUDGET))
        try:
            await test(worker, worker.open_session("trainer"))
        finally:
            await worker.close()

    asyncio.run(main())


async def run(worker: Worker, session: SessionState, number: int) -> None:
    """Saves a segment that squares four numbers, requests its backward, and releases it."""
    program = await worker.put_program(session, squaring())
    address = put(worker, session, torch.full((4,), 3.0, device=DEVICE))
    assert worker.saver.save(session, number, program, [address], [0], [], "square", False) == (False, [])
    await backward(worker, session, number)
    worker.release(session, [number])


async def backward(worker: Worker, session: SessionState, number: int) -> None:
    """Requests the backward of a segment that `run` has saved."""
    gradient = torch.ones(4, device=DEVICE)
    start = executions.BackwardInputs(((0, address_of(gradient)),), ambient_state.capture())

    def prepare() -> Any:
        return partial(executions.backward, start=start, gradients={0: gradient})

    result = await worker.engine.request(worker.segment(session, number), FIRST, prepare, 0.1).answer
    assert [outgoing.tensor.tolist() for outgoing in result.bundle.tensors] == [[3.0] * 4] * 2


def test_what_is_allocated_beyond_the_charges_is_not_given_away() -> None:
    async def test(worker: Worker, session: SessionState) -> None:
        before = torch.cuda.memory_allocated(DEVICE)
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=DEVICE)
        await run(worker, session, 1)
        assert WORKSPACE / 2 < worker.store.usage().reserve <= before + WORKSPACE
        with pytest.raises(BudgetError):
            worker.store.expect(session, BUDGET // 2)
        assert worker.store.room_for_replays() < BUDGET // 2
        del workspace
        await run(worker, session, 2)
        assert worker.store.usage().reserve <= before
        worker.store.expect(session, BUDGET // 2)
        worker.store.abandon(session, BUDGET // 2)

    with_worker(test)


def test_what_others_leave_too_little_of_is_not_given_away(simulation: Any) -> None:
    async def test(worker: Worker, session: SessionState) -> None:
        simulation.settings(limit=torch.cuda.memory_reserved(DEVICE) + BUDGET // 4)
        try:
            await run(worker, session, 1)
        finally:
            simulation.settings(limit=DEVICE_BYTES)
        assert worker.store.usage().reserve > BUDGET / 2

    with_worker(test)


def test_a_reserve_does_not_delay_an_accepted_segment() -> None:
    async def test(worker: Worker, session: SessionState) -> None:
        program = await worker.put_program(session, squaring())
        address = put(worker, session, torch.full((4,), 3.0, device=DEVICE))
        workspace = torch.empty(2 * BUDGET, dtype=torch.uint8, device=DEVICE)
        assert worker.saver.save(session, 1, program, [address], [0], [], "square", False) == (False, [])
        await backward(worker, session, 1)
        assert worker.store.usage().reserve > BUDGET
        del workspace

    with_worker(test)


def test_blocks_kept_for_several_streams_are_given_back_before_an_execution_beyond_the_budget() -> None:
    memory = DeviceMemory(DEVICE, BUDGET)
    held = torch.cuda.memory_reserved(DEVICE)
    for _ in range(2):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.empty(BUDGET, dtype=torch.uint8, device=DEVICE)
    assert torch.cuda.memory_reserved(DEVICE) >= held + 2 * BUDGET
    memory.begin(0)
    assert torch.cuda.memory_reserved(DEVICE) <= held


def test_a_device_that_is_broken_fails_in_the_execution_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    memory = DeviceMemory(DEVICE, 0)
    block = torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)  # beyond the budget
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", broken)
        patch.setattr(torch.cuda, "empty_cache", broken)
        assert memory.reserve_bytes(0) == 0
        assert memory.begin(0) == 0
    assert memory.reserve_bytes(0) >= block.nbytes


@pytest.mark.slow
def test_the_reserve_is_in_the_status(simulation: Any) -> None:
    more = DEVICE_BYTES // 4  # than the device has
    with (
        WorkerProcess("--memory", f"{(DEVICE_BYTES + more) >> 30}GiB", "--device", "cuda") as worker,
        backhaul.connect(worker.address, settings=QUIET) as session,
    ):
        x = torch.ones(4, device="cuda", requires_grad=True)
        session.checkpoint(torch.square, x, strict=True).sum().backward()
        assert more / 2 < worker.telemetry().memory.reserve_bytes < 2 * more


@pytest.mark.slow
def test_an_execution_that_the_device_has_no_memory_for_is_recovered(simulation: Any) -> None:
    def similar(x: Tensor) -> Tensor:
        with torch.no_grad():  # the op takes the size of [64, 64, 4096] for itself
            similarity = functional.cosine_similarity(x.unsqueeze(1), x.unsqueeze(0), dim=-1)
        return x * similarity.sum()

    def gradient(checkpoint: Callable[..., Tensor]) -> Tensor:
        torch.manual_seed(0)
        x = torch.randn(64, 4096).cuda().requires_grad_()
        checkpoint(similar, x).sum().backward()
        assert x.grad is not None
        return x.grad.cpu()

    with (
        WorkerProcess("--memory", "24MiB", "--device", "cuda") as worker,
        backhaul.connect(worker.address, settings=QUIET) as session,
    ):
        assert torch.equal(gradient(session.checkpoint), gradient(lambda function, x: function(x)))
        assert "out of memory" in str(session.report())
        y = torch.ones(4, device="cuda", requires_grad=True)
        session.checkpoint(torch.square, y, strict=True).sum().backward()
        assert y.grad is not None
        assert y.grad.tolist() == [2.0] * 4

"""The threads in which a worker waits for its device. The device is a fake one, or the CPU."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest
import torch

from backhaul_runtime.tensors.staging import DeviceMoment, Side, present_moment, queued_aside
from backhaul_runtime.wire.tensor_batches import OutgoingTensor
from backhaul_server.worker.audit import AuditLog
from backhaul_server.worker.engine.device_waits import DeviceWaits
from backhaul_server.worker.engine.worker import Worker
from backhaul_server.worker.rpc import segment_service
from backhaul_server.worker.rpc.meter import RpcMeter
from backhaul_server.worker.rpc.segment_service import SegmentServicer
from support.streams import FakeCuda, FakeStream

CPU = torch.device("cpu")


def run(test: Callable[[DeviceWaits], Awaitable[None]]) -> None:
    async def steps() -> None:
        waits = DeviceWaits(CPU)
        await test(waits)
        await waits.close()

    asyncio.run(steps())


def waiting_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("backhaul-wait")]


def stream_of(cuda: FakeCuda, side: Side) -> FakeStream:
    with queued_aside(side, [DeviceMoment(CPU)]):
        return cuda.current_stream(CPU)


def marked(side: Side) -> list[DeviceMoment]:
    with queued_aside(side, [DeviceMoment(CPU)]):
        return list(present_moment(CPU))


def test_where_nothing_is_to_be_waited_for_no_thread_starts() -> None:
    async def test(waits: DeviceWaits) -> None:
        await waits.copied(Side.TO_HOST, [])
        await waits.copied(Side.TO_HOST, [DeviceMoment(CPU)])
        await waits.computed([])
        assert waiting_threads() == []

    run(test)


def test_the_loop_goes_on_while_a_thread_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda.installed(monkeypatch)
    side = stream_of(cuda, Side.TO_HOST)
    side.begin()

    async def test(waits: DeviceWaits) -> None:
        waiting = asyncio.ensure_future(waits.copied(Side.TO_HOST, marked(Side.TO_HOST)))
        while not waiting_threads():
            await asyncio.sleep(0)
        await waits.copied(Side.TO_DEVICE, marked(Side.TO_DEVICE))  # it does not queue behind the other direction
        assert not waiting.done()
        side.end()
        await waiting

    run(test)


def test_what_is_cancelled_ends_only_when_its_thread_no_longer_reads() -> None:
    may_end, has_begun = threading.Event(), threading.Event()

    def work() -> None:
        has_begun.set()
        may_end.wait()
        raise ValueError("nobody is told")

    async def test(waits: DeviceWaits) -> None:
        waiting = asyncio.ensure_future(waits.run(Side.TO_DEVICE, work))
        while not has_begun.is_set():
            await asyncio.sleep(0)
        for _ in range(3):
            waiting.cancel()
            await asyncio.sleep(0)
        assert not waiting.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run(test)


def test_an_error_in_the_thread_is_that_of_the_wait() -> None:
    async def test(waits: DeviceWaits) -> None:
        with pytest.raises(ZeroDivisionError):
            await waits.run(Side.TO_DEVICE, lambda: 1 // 0)

    run(test)


def test_a_trainer_gets_progress_until_the_device_has_computed_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_service, "PROGRESS_INTERVAL_S", 0.01)
    cuda = FakeCuda.installed(monkeypatch)

    async def steps() -> None:
        worker = Worker(CPU, 1 << 20, 10.0)
        servicer = SegmentServicer(worker, worker.engine, RpcMeter(), AuditLog(None))
        session = worker.open_session("trainer", "run", "version", worker.anyone)
        cuda.trainer.begin()  # what the executor has queued
        (tensor,) = result = [OutgoingTensor.of(torch.ones(1))]
        assert not tensor.made[0].has_come
        answer = asyncio.get_running_loop().create_future()
        answer.set_result(SimpleNamespace(bundle=SimpleNamespace(tensors=result)))
        progress = []
        async for message in servicer._wait(SimpleNamespace(session=session), answer):  # type: ignore[arg-type]
            progress.append(message.running)
            cuda.trainer.end()
        assert progress
        assert all(progress)
        await worker.close()

    asyncio.run(steps())

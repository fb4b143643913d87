"""The threads in which a worker waits for its device. The device is a fake one, or the CPU."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest
import torch

from backhaul_proto.v1 import tensor_pb2
from backhaul_runtime.tensors.layout import layout_of
from backhaul_runtime.tensors.staging import DeviceMoment, Side, present_moment, queued_aside
from backhaul_runtime.wire.splicing import TensorMessage
from backhaul_runtime.wire.tensor_batches import OutgoingTensor, batches
from backhaul_server.worker.engine.device_waits import DeviceWaits
from backhaul_server.worker.engine.worker import Worker
from backhaul_server.worker.rpc.uploads import TensorUpload
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


def test_a_cancelled_upload_stays_charged_while_a_thread_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda.installed(monkeypatch)
    may_end, has_begun = threading.Event(), threading.Event()

    def read_slowly() -> list[tuple[bytes, torch.Tensor]]:
        has_begun.set()
        may_end.wait()
        return []

    async def upload(worker: Worker) -> None:
        with TensorUpload(worker) as upload:
            upload.set_session(worker.open_session("trainer", "run", "version", worker.anyone))
            (batch,) = batches([OutgoingTensor(x, layout_of(x))])
            await upload.add(TensorMessage(tensor_pb2.PutTensorsRequest(), batch, 0))
            receiver = upload._receiver
            monkeypatch.setattr(type(receiver), "stored_waits", True)
            monkeypatch.setattr(receiver, "stored", read_slowly)
            await upload.stored()

    async def steps() -> None:
        worker = Worker(CPU, 1 << 20, 10.0)
        uploading = asyncio.ensure_future(upload(worker))
        while not has_begun.is_set() and not uploading.done():
            await asyncio.sleep(0)
        uploading.cancel()
        await asyncio.sleep(0)
        assert worker.store.usage().cached >= x.nbytes
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await uploading
        assert worker.store.usage().cached == 0
        await worker.close()

    x = torch.ones(1000)
    asyncio.run(steps())

"""Uploads to a device whose digests a thread reads. The device is a fake one."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest
import torch
from torch import Tensor

from backhaul_proto.v1 import tensor_pb2
from backhaul_runtime.errors import SessionUnknownError, TransferError
from backhaul_runtime.tensors.digest import address_of
from backhaul_runtime.tensors.layout import layout_of
from backhaul_runtime.tensors.staging import Side
from backhaul_runtime.wire import tensor_batches
from backhaul_runtime.wire.splicing import TensorMessage
from backhaul_runtime.wire.tensor_batches import OutgoingTensor, batches
from backhaul_runtime.wire.tensor_receiver import TensorReceiver
from backhaul_server.worker.engine import stored_values
from backhaul_server.worker.engine.segment import SessionState
from backhaul_server.worker.engine.stored_values import is_same_at_once
from backhaul_server.worker.engine.worker import Worker
from backhaul_server.worker.rpc import uploads
from backhaul_server.worker.rpc.uploads import TensorUpload
from support.streams import FakeCuda

ADDRESS = bytes(16)


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    monkeypatch.setattr(TensorReceiver, "stored_waits", True)
    monkeypatch.setattr(uploads, "use_here", lambda _: None)  # torch takes no fake stream
    return FakeCuda.installed(monkeypatch)


def run(test: Callable[[Worker], Awaitable[None]]) -> None:
    async def steps() -> None:
        worker = Worker(torch.device("cpu"), 1 << 20, 10.0)
        await test(worker)
        await worker.close()

    asyncio.run(steps())


def session_of(worker: Worker) -> SessionState:
    return worker.open_session("trainer", "run", "version", worker.anyone)


async def uploaded(worker: Worker, session: SessionState, tensor: Tensor) -> None:
    with TensorUpload(worker) as upload:
        upload.set_session(session)
        (batch,) = batches([OutgoingTensor(tensor, layout_of(tensor))])
        await upload.add(TensorMessage(tensor_pb2.PutTensorsRequest(), batch, 0))
        await upload.stored()


def test_a_cancelled_upload_stays_charged_while_a_thread_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, has_begun, tensor = threading.Event(), threading.Event(), torch.ones(1000)

    def read_slowly(_: TensorReceiver) -> list[tuple[bytes, Tensor]]:
        has_begun.set()
        may_end.wait()
        return []

    monkeypatch.setattr(TensorReceiver, "stored", read_slowly)

    async def test(worker: Worker) -> None:
        uploading = asyncio.ensure_future(uploaded(worker, session_of(worker), tensor))
        while not has_begun.is_set() and not uploading.done():
            await asyncio.sleep(0)
        uploading.cancel()
        await asyncio.sleep(0)
        assert worker.store.usage().cached >= tensor.nbytes
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await uploading
        assert worker.store.usage().cached == 0

    run(test)


def test_an_upload_is_read_no_faster_than_the_device_takes_it(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "MOST_COPYING", 2)
    tensor = torch.ones(1 << 16)
    monkeypatch.setattr(tensor_batches, "CHUNK_BYTES", tensor.nbytes // 4)
    first, second, third, last = batches([OutgoingTensor(tensor, layout_of(tensor))])

    async def test(worker: Worker) -> None:
        with worker.device_waits.queued(Side.TO_DEVICE):
            stream = cuda.current_stream(worker.device)
        stream.begin()  # with something that takes until `end`
        with TensorUpload(worker) as upload:
            upload.set_session(session_of(worker))
            for batch in (first, second):
                await upload.add(TensorMessage(tensor_pb2.PutTensorsRequest(), batch, 0))
            adding = asyncio.ensure_future(upload.add(TensorMessage(tensor_pb2.PutTensorsRequest(), third, 0)))
            while not any(thread.name.startswith("backhaul-wait-to_device") for thread in threading.enumerate()):
                await asyncio.sleep(0)
                assert not adding.done()
            stream.end()
            await adding
            await upload.add(TensorMessage(tensor_pb2.PutTensorsRequest(), last, 0))
            assert await upload.stored() == [address_of(tensor)]

    run(test)


def test_a_session_that_ends_meanwhile_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = TensorReceiver.stored
    may_end, has_begun = threading.Event(), threading.Event()

    def read_slowly(receiver: TensorReceiver) -> list[tuple[bytes, Tensor]]:
        has_begun.set()
        may_end.wait()
        return stored(receiver)

    monkeypatch.setattr(TensorReceiver, "stored", read_slowly)

    async def test(worker: Worker) -> None:
        session = session_of(worker)
        uploading = asyncio.ensure_future(uploaded(worker, session, torch.ones(1000)))
        while not has_begun.is_set() and not uploading.done():
            await asyncio.sleep(0)
        worker.close_session(session.id)
        may_end.set()
        with pytest.raises(SessionUnknownError):
            await uploading
        assert (worker.store.usage().cached, worker.store.usage().sessions) == (0, 0)

    run(test)


@pytest.mark.parametrize("is_equal", [True, False])
def test_equally_named_tensors_are_compared_in_a_thread(monkeypatch: pytest.MonkeyPatch, is_equal: bool) -> None:
    stored, threads = TensorReceiver.stored, list[str]()
    first, second = torch.ones(4), torch.ones(4) if is_equal else torch.zeros(4)

    def under_one_address(receiver: TensorReceiver) -> list[tuple[bytes, Tensor]]:
        return [(ADDRESS, tensor) for _, tensor in stored(receiver)]

    def noted(one: object, other: object) -> bool:
        threads.append(threading.current_thread().name)
        return compare(one, other)  # type: ignore[arg-type]

    compare = stored_values.is_same
    monkeypatch.setattr(TensorReceiver, "stored", under_one_address)
    monkeypatch.setattr(stored_values, "is_same", noted)

    async def test(worker: Worker) -> None:
        await uploaded(worker, session_of(worker), first)
        other = session_of(worker)
        if is_equal:
            await uploaded(worker, other, second)
        else:
            with pytest.raises(TransferError, match="another session"):
                await uploaded(worker, other, second)
        assert worker.store.missing(other, [ADDRESS]) == ([] if is_equal else [ADDRESS])
        assert [name.startswith("backhaul-wait-to_device") for name in threads] == [True]

    run(test)


def test_on_a_device_nothing_is_known_to_be_equal_at_once() -> None:
    assert not is_same_at_once(torch.ones(1), torch.ones(1))

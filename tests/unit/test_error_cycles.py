"""A worker keeps nothing of a failed request. While it is idle it collects no garbage, so a cycle would stay."""

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator, Iterator
from time import sleep
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from backhaul_proto.v1 import segment_pb2
from backhaul_runtime.errors import SegmentUnknownError, TransferError, from_bytes
from backhaul_runtime.wire.splicing import TensorMessage
from backhaul_server.worker.engine.segment import Segment, SessionState, result_of
from backhaul_server.worker.engine.worker import Worker
from backhaul_server.worker.rpc.calls import Servicer, exchange, unary
from backhaul_server.worker.rpc.exchange import OpenExchange
from unit.test_core import FIRST, saved, with_worker


class Large:
    """Stands for the tensors of a request."""


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_an_execution_that_a_release_ends() -> None:
    async def test(worker: Worker) -> None:
        session = worker.open_session("trainer")
        segment = await saved(worker, session)
        used: list[weakref.ref[Large]] = []

        def run(bounds: Any) -> NoReturn:
            large = Large()
            used.append(weakref.ref(large))
            while True:
                bounds.check()
                sleep(0.001)

        async def asked(segment: Segment) -> None:
            bounds = segment.bounds
            request = worker.engine.request(segment, FIRST, lambda: lambda *_: run(bounds), 0.1)
            await asyncio.wait([request.answer])
            result_of(request.answer)

        asking = asyncio.ensure_future(asked(segment))
        while not used:
            await asyncio.sleep(0.001)
        reference = weakref.ref(segment)
        worker.release(session, [segment.id])
        del segment
        await asyncio.wait([asking])
        assert isinstance(asking.exception(), SegmentUnknownError)
        del asking
        while len(worker.engine._executor):
            await asyncio.sleep(0.001)
        assert (used[0](), reference()) == (None, None)

    with_worker(test)


class Context:
    """Keeps the error that it raises, as gRPC does."""

    def set_trailing_metadata(self, _: object) -> None:
        pass

    async def abort(self, *_: object) -> NoReturn:
        self.raised = RuntimeError("aborted")
        raise self.raised


class Failing:
    """A servicer whose RPCs fail while they use something large."""

    def __init__(self) -> None:
        self.meter = SimpleNamespace(call=lambda *_, **__: None)
        self.used: list[weakref.ref[Large]] = []

    def failed(self, *_: object) -> None:
        pass

    def fail(self) -> NoReturn:
        large = Large()
        self.used.append(weakref.ref(large))
        try:
            raise TimeoutError
        except TimeoutError:
            raise TransferError("silent") from None

    async def answers(self, request: object, context: object) -> Any:
        self.fail()

    def session(self, session_id: str) -> str:
        return session_id


@pytest.mark.parametrize("decorate", [unary, exchange])
def test_a_request_that_is_refused(decorate: Any) -> None:
    servicer, context = Failing(), Context()

    async def call() -> None:
        with pytest.raises(RuntimeError, match="aborted"):
            await decorate(Failing.answers)(servicer, object(), context)

    asyncio.run(call())
    assert servicer.used[0]() is None


def test_a_request_of_an_exchange_that_is_refused() -> None:
    servicer, written = Failing(), list[segment_pb2.Answer]()

    async def write(answer: segment_pb2.Answer) -> None:
        written.append(answer)

    async def answers(*_: object) -> AsyncGenerator[segment_pb2.Answer]:
        servicer.fail()
        yield

    async def call() -> None:
        context: Any = SimpleNamespace(write=write)
        opened = OpenExchange(cast(Servicer, servicer), context, cast(Any, answers), cast(Any, answers))
        request = segment_pb2.Request(release=segment_pb2.ReleaseRequest())
        await opened._answer(7, TensorMessage(request, None, 0))
        await opened._push(cast(SessionState, SimpleNamespace(id="")))

    asyncio.run(call())
    assert [(answer.number, type(from_bytes(answer.error))) for answer in written] == [(7, TransferError)]
    assert [used() for used in servicer.used] == [None, None]

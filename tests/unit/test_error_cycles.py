"""A worker keeps nothing of a failed request. While it is idle it collects no garbage, so a cycle would stay."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Iterator
from time import sleep
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from backhaul_runtime.errors import SegmentUnknownError, TransferError
from backhaul_server.worker.engine.segment import Segment, result_of
from backhaul_server.worker.engine.worker import Worker
from backhaul_server.worker.rpc.calls import open_stream, stream, unary
from unit.test_core import FIRST, saved, with_worker


class Large:
    """Stands for the tensors of a request."""


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_a_run_that_a_release_ends() -> None:
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

    async def streams(self, request: object, context: object) -> AsyncIterator[Any]:
        self.fail()
        yield


@pytest.mark.parametrize("decorate", [unary, stream, open_stream])
def test_a_request_that_is_refused(decorate: Any) -> None:
    servicer, context = Failing(), Context()
    method = decorate(Failing.answers if decorate is unary else Failing.streams)

    async def call() -> None:
        with pytest.raises(RuntimeError, match="aborted"):
            if decorate is unary:
                await method(servicer, object(), context)
            else:
                async for _ in method(servicer, object(), context):
                    pass

    asyncio.run(call())
    assert servicer.used[0]() is None

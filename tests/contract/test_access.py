"""Every method of a worker's server says who may call it."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import grpc
import torch

from backhaul_server.worker.audit import AuditLog
from backhaul_server.worker.engine.worker import Worker
from backhaul_server.worker.rpc.access import POLICY, Needs
from backhaul_server.worker.rpc.health import Health
from backhaul_server.worker.rpc.service import add_services


class Recorder:
    """A server that only notes which methods it is given."""

    def __init__(self) -> None:
        self.methods: set[str] = set()

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.methods |= {f"/{service}/{method}" for method in handlers}

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        for handler in handlers:
            self.methods |= set(handler._method_handlers)


async def methods_of_a_worker() -> set[str]:
    """All that a worker's server answers to, reflection included."""
    recorder, worker = Recorder(), Worker(torch.device("cpu"), 1 << 20, 30.0)
    server = cast(grpc.aio.Server, recorder)
    add_services(server, worker, AuditLog())
    Health(server, reflects=True)
    await worker.close()
    return recorder.methods


def test_each_method_has_an_entry_and_there_are_no_others() -> None:
    methods = asyncio.run(methods_of_a_worker())
    newer = {"/grpc.health.v1.Health/List"}  # of later versions of its package
    assert len(methods) >= 10
    assert methods - set(POLICY) == set()
    assert set(POLICY) - methods <= newer


def test_only_probes_need_no_credential() -> None:
    open_to_all = {method for method, needs in POLICY.items() if needs is Needs.NOTHING}
    assert open_to_all == {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"}

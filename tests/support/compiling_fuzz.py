"""Programs that nobody would write, for a worker that compiles."""

import time
from collections.abc import Callable
from typing import Any

import grpc
import torch

from backhaul_proto.v1 import segment_pb2
from backhaul_runtime.program.program import Compilation, Node, Program, ResultRef, Source
from backhaul_runtime.tensors.layout import layout_of
from backhaul_runtime.torch_internals import ambient_state, inductor
from support.fuzz import SOURCES, Fuzzer
from support.hostile import Hostile

_STILL = "still compiles"
_PAUSE_S = 0.15
"""How long a fuzzer waits when the worker still compiles: otherwise it would have ended before anything is compiled."""

pending: list[Program] = []
"""What the worker compiles, for all fuzzers of a process: sessions end sooner than compilations."""


class _CompilingError(Exception):
    pass


class CompilingFuzzer(Fuzzer):
    """Also sends programs with a compilation, and runs them when they are compiled.

    Args:
        client: As for `Fuzzer`.
        seed: As for `Fuzzer`.
    """

    def __init__(self, client: Hostile, seed: int) -> None:
        super().__init__(client, seed)
        self._facts = tuple(sorted(inductor.facts(torch.device("cpu")).items()))

    def attempt(self) -> None:
        """As in `Fuzzer`."""
        if self._draw.random() < 0.65:
            super().attempt()
            return
        is_new = not pending or (len(pending) < 14 and self._draw.random() < 0.5)
        program = self._compiled() if is_new else self._draw.choice(pending)
        addresses: list[bytes] = []
        refused = self._check("put", lambda: addresses.append(self._client.program(program)))
        if is_new and refused is not None and _STILL in refused:
            pending.append(program)
        elif not is_new and (refused is None or _STILL not in refused):
            pending.remove(program)
        if refused is None:
            self._run_compiled(addresses[0])
        elif _STILL in refused:
            time.sleep(_PAUSE_S)

    def _check(self, what: str, call: Callable[[], object]) -> str | None:
        def called() -> None:
            try:
                call()
            except grpc.RpcError as error:
                if _STILL in (error.details() or ""):
                    raise _CompilingError(error.details()) from None
                raise

        try:
            return super()._check(what, called)
        except _CompilingError as error:
            return str(error)

    def _compiled(self) -> Program:
        """A program of ops that have run one by one, and of one that may be anything."""
        draw, nodes = self._draw, list(self._nodes)
        if not nodes or draw.random() < 0.3:
            nodes.append(Node(*self._node(), 0, (16,), draws=False))
        layouts, facts = [layout_of(tensor) for tensor in SOURCES], self._facts
        match draw.randrange(12):
            case 0:
                layouts.pop()
            case 1:
                strides = draw.choice((0, 1, 7, 1000)), draw.choice((0, 1, 2))
                layouts[draw.randrange(len(layouts))] = layout_of(torch.empty_strided((3, 5), strides))
            case 2:
                facts = facts[1:]
        with torch.autocast("cpu", torch.bfloat16, enabled=draw.random() < 0.1):
            state = ambient_state.capture()
        sources = tuple(
            Source(tensor.is_floating_point() and draw.random() < 0.8, is_leaf=False, is_written=False)
            for tensor in SOURCES
        )
        outputs = tuple(ResultRef(at, 0) for at, node in enumerate(nodes) if node.result_bytes)[-draw.choice((1, 2)) :]
        compilation = Compilation(tuple(layouts), facts)
        return Program(sources, tuple(nodes), (state,), outputs, draw.choice((0, 1, 3)), 64, compilation=compilation)

    def _run_compiled(self, address: bytes) -> None:
        client = self._client
        self._segment += 1
        number = self._segment
        asked = client.backward(number, self._draw.choice(self._addresses))
        release = segment_pb2.ReleaseRequest(keys=[client.key(number)])
        steps: tuple[Callable[[], Any], ...] = (
            lambda: client.save(number, address, self._addresses),
            lambda: list(client.recompute(number, positions=())),
            lambda: client.ask(backward=asked),
            lambda: client.ask(release=release),
        )
        for step in steps:
            self._check("a compiled program", step)

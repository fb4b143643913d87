"""What happens when an object dies: nothing that waits for a lock, and nothing that Ctrl-C can cut in half."""

import ast
import concurrent.futures._base
import concurrent.futures.thread
import gc
import mmap
import os
import queue
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CellType, FrameType, FunctionType, MethodType
from typing import Any

import pytest
import torch
from torch import nn

import backhaul
from backhaul import Session
from backhaul._backward.frame import Frame
from backhaul._backward.sole_consumers import SoleConsumers
from backhaul._worker_client.remote_segment import SavedSegment, SavedTensors
from backhaul._worker_client.upload.segment_upload import SegmentUpload
from backhaul._worker_client.upload.uploader import Uploader
from backhaul_runtime.process.death_queue import DeathNotice, DeathQueue
from backhaul_runtime.tensors.buffer_pool import BufferPool
from backhaul_runtime.tensors.layout import layout_of
from backhaul_runtime.wire.shared_memory import LEAST_BYTES, Outbox, Region, make_memory
from backhaul_runtime.wire.tensor_batches import OutgoingTensor
from conftest import QUIET, settle, wait_until
from support.bits import grad_of
from support.flips import on_every_channel
from support.parsed_files import parsed
from support.processes import WorkerProcess

ROOT = Path(__file__).parents[2]
PACKAGES = ("client", "runtime", "server")


def segment(session: Session) -> torch.Tensor:
    weights = [nn.Parameter(torch.randn(16, 16)) for _ in range(3)]

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(x @ weights[0]) @ weights[1]) @ weights[2]

    y: torch.Tensor = session.checkpoint(fn, torch.randn(16, 16, requires_grad=True) * 1, returns="activations")
    torch.autograd.grad(y.sum(), [weights[2]], retain_graph=True)  # begins a recomputation and leaves the rest of it
    return y


def of_kind(kind: type) -> Any:
    (instance,) = [o for o in gc.get_objects() if type(o) is kind]
    return instance


def a_frame(session: Session) -> tuple[list[Any], Any]:
    """Also the saved segment and the saved tensors that it holds."""
    y = segment(session)
    return [y], of_kind(Frame)


def a_watched_input(session: Session) -> tuple[list[Any], Any]:
    unshared, tensor = SoleConsumers(), torch.ones(2)
    unshared.watch([(0, tensor)])
    return [tensor], unshared


def a_buffer(session: Session) -> tuple[list[Any], Any]:
    buffers = BufferPool()
    return [buffers.take(mmap.PAGESIZE)], buffers


def a_tensor_in_shared_memory(session: Session) -> tuple[list[Any], Any]:
    descriptor = make_memory(8 * LEAST_BYTES)
    outbox, theirs = Outbox(), Region(1, descriptor)
    outbox.add(Region(1, descriptor))
    os.close(descriptor)
    tensor = torch.zeros(LEAST_BYTES, dtype=torch.uint8)
    slot = outbox.put(OutgoingTensor.of(tensor))
    assert slot is not None
    return [theirs.use(slot.location(layout_of(tensor)), layout_of(tensor))], theirs


DEATHS: dict[str, Callable[[Session], tuple[list[Any], Any]]] = {
    "runtime/backhaul_runtime/process/death_queue.py: DeathNotice(of, self._put)": a_frame,
    "client/backhaul/_backward/sole_consumers.py: weakref.ref(tensor, died)": a_watched_input,
    "runtime/backhaul_runtime/tensors/buffer_pool.py: weakref.finalize(array, self._give_back, buffer)": a_buffer,
    "runtime/backhaul_runtime/wire/shared_memory.py: "
    "weakref.finalize(raw, self.free_slot, location.slot, location.ticket)": a_tensor_in_shared_memory,
}
"""All that runs when an object dies, and what makes such an object: holders of it, to be emptied, and what it tells."""


def destructors() -> Iterator[str]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(parsed(path)):
                where = str(path.relative_to(ROOT))
                if isinstance(node, ast.FunctionDef) and node.name == "__del__":
                    yield f"{where}: __del__"
                elif isinstance(node, ast.Call):
                    name = ast.unparse(node.func).rsplit(".")[-1]
                    makes_weak = name in ("ref", "WeakMethod", "DeathNotice", "proxy") and len(node.args) > 1
                    if makes_weak or name == "finalize":
                        yield f"{where}: {ast.unparse(node)}"


@pytest.mark.slow
def test_all_that_runs_when_an_object_dies_is_known() -> None:
    assert sorted(destructors()) == sorted(DEATHS)


CONTAINERS = (dict, list, tuple, set, deque, MethodType, CellType)


def reachable(start: Any) -> Iterator[Any]:
    """All that our objects lead to from one of them, also by what their methods close over."""
    seen: dict[int, Any] = {}
    todo = [start]
    while todo:
        current = todo.pop()
        if id(current) in seen:
            continue
        seen[id(current)] = current
        yield current
        if isinstance(current, FunctionType):
            todo += current.__closure__ or ()
        elif type(current).__module__.startswith("backhaul") or isinstance(current, CONTAINERS):
            todo += gc.get_referents(current)


LOCKS = (type(threading.Lock()), type(threading.RLock()))


@contextmanager
def all_locks_taken(start: Any) -> Iterator[int]:
    """Another thread holds every lock that can be reached."""
    locks = [reached for reached in reachable(start) if isinstance(reached, LOCKS)]
    locks += [reached._lock for reached in reachable(start) if isinstance(reached, threading.Condition)]  # type: ignore[attr-defined]
    are_taken, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        taken = [lock for lock in locks if lock.acquire(timeout=5)]
        are_taken.set()
        is_over.wait()
        for lock in taken:
            lock.release()

    holder = threading.Thread(target=hold)
    holder.start()
    are_taken.wait()
    try:
        yield len(locks)
    finally:
        is_over.set()
        holder.join()


@pytest.mark.parametrize("make", DEATHS.values(), ids=DEATHS.keys())
def test_what_dies_waits_for_no_lock(make: Callable[[Session], tuple[list[Any], Any]], session: Session) -> None:
    holders, target = make(session)
    ended = threading.Event()

    def die() -> None:
        holders.clear()
        gc.collect()
        ended.set()

    with all_locks_taken(target) as count:
        del target
        dying = threading.Thread(target=die, daemon=True)
        dying.start()
        assert ended.wait(240)
    dying.join()
    assert count or make is not a_frame


def test_who_reads_the_saved_tensors_of_a_graft_keeps_no_segment(session: Session) -> None:
    y = session.checkpoint(torch.sin, torch.ones(4, requires_grad=True) * 1, returns="gradients")
    frame = weakref.ref(of_kind(Frame))
    assert len(y.grad_fn.saved_tensors) == 1
    del y
    gc.collect()
    assert frame() is None


@contextmanager
def interrupted() -> Iterator[None]:
    """Ctrl-C comes with the first code of ours that runs."""

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("backhaul"):
            raise KeyboardInterrupt
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_an_interrupt_loses_no_release(session: Session) -> None:
    y = segment(session)
    uploader = of_kind(SavedSegment)._uploader
    assert len(uploader.segments()) == 1
    assert of_kind(SavedTensors)
    with interrupted():
        del y
        gc.collect()
    queued: Callable[[], bool] = uploader._queue.empty
    session.close()
    assert queued()
    assert uploader._endings._notices == {}


def test_a_release_that_was_damaged_is_sent_again(worker: WorkerProcess) -> None:
    damaged = 0

    def damage(direction: str, method: str, data: bytes) -> bytes:
        nonlocal damaged
        if (direction, method) != ("up", "release") or damaged == 2:  # a damaged request is repeated once
            return data
        damaged += 1
        return data[:-1] + bytes([data[-1] ^ 1])

    with on_every_channel(damage), backhaul.connect(worker.address, settings=QUIET) as session:
        session.checkpoint(torch.sin, torch.ones(4, requires_grad=True), returns="gradients").sum().backward()
        assert session.report().remote == 1
        wait_until(lambda: segments_of(session, worker) == 0, "the segment is released")
    assert damaged == 2


def segments_of(session: Session, worker: WorkerProcess) -> int:
    return sum(other.segments for other in worker.telemetry().sessions if other.run == session.run)


def test_no_garbage_collection_is_needed_to_release_a_segment(session: Session, returns: str) -> None:
    uploader = session._workers[0].uploader
    gc.collect()
    gc.disable()
    try:
        session.checkpoint(lambda x: x.sin().sin(), torch.ones(4, requires_grad=True), returns=returns).sum().backward()
        assert session.report().remote == 1
        wait_until(lambda: uploader.segments() == [], "the segment's owner is gone")
    finally:
        gc.enable()


def test_an_interrupt_before_a_predicted_call_leaves_nothing(
    session: Session, worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear, x, save = nn.Linear(4, 4), torch.randn(2, 4), Uploader.save
    for _ in range(2):
        session.checkpoint(linear, x, returns="gradients").sum().backward()

    def interrupt(uploader: Uploader, item: SegmentUpload) -> None:
        save(uploader, item)
        assert item.is_predicted
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Uploader, "save", interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.checkpoint(linear, x, returns="gradients")
    settle(session)
    wait_until(lambda: segments_of(session, worker) == 0, "what was predicted is released")


def test_an_ending_that_was_called_off_does_not_come() -> None:
    come: deque[DeathNotice] = deque()
    endings, owner = DeathQueue(come.append), nn.Identity()
    endings.take(endings.watch(owner, 1))
    kept = endings.watch(owner, 2)
    assert endings.to_come() == [2]
    del owner
    assert list(come) == [kept]
    assert endings.to_come() == []
    assert endings.take(come.popleft()) == 2


def test_an_interrupt_while_a_segment_is_queued_leaves_its_room(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it comes before the segment was put or after."""
    y = segment(session)
    uploader = of_kind(SavedSegment)._uploader
    put = uploader._queue.put

    class Interrupted:
        get = uploader._queue.get
        empty = uploader._queue.empty
        is_put = False

        def put(self, item: object) -> None:
            if self.is_put:
                put(item)
            raise KeyboardInterrupt

    interrupted, queue = Interrupted(), uploader._queue
    x = torch.randn(16, 16, requires_grad=True)
    monkeypatch.setattr(uploader, "_queue", interrupted)
    for number in range(2 * uploader._limit_boundaries):
        interrupted.is_put = bool(number % 2)
        with pytest.raises(KeyboardInterrupt):
            session.checkpoint(lambda x: (x * 2).sin(), x * number)
    monkeypatch.setattr(uploader, "_queue", queue)
    session.checkpoint(lambda x: (x * 2).sin(), x * 1, strict=True).sum().backward()
    assert torch.equal(grad_of(x), (x.detach() * 2).cos() * 2)
    del y


OURS = tuple(str(ROOT / package) for package in PACKAGES)
STANDARD = (threading.__file__, queue.__file__, concurrent.futures._base.__file__, concurrent.futures.thread.__file__)


def test_training_takes_no_lock_that_an_interrupt_would_leave_locked(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither directly nor inside of an object of the standard library: NOTE [Interrupts]."""
    taken = set[str]()
    own_exit, this = threading.Condition.__exit__, threading.get_ident()

    def noted(self: threading.Condition, *error: Any) -> None:
        frame = sys._getframe(1) if threading.get_ident() == this else None
        is_start = False  # a thread that does not start hinders nobody else
        while frame is not None and frame.f_code.co_filename in STANDARD:
            is_start, frame = is_start or frame.f_code is threading.Thread.start.__code__, frame.f_back
        path = frame.f_code.co_filename if frame is not None and not is_start else ""
        if path.startswith(OURS):
            taken.add(path)
        own_exit(self, *error)

    monkeypatch.setattr(threading.Condition, "__exit__", noted)
    model, x = nn.Linear(16, 16), torch.randn(16, 16)
    for _ in range(3):
        session.checkpoint(model, session.checkpoint(model, x)).sum().backward()
        with session.accumulate() as block:
            for _ in range(2):
                block.backward(session.checkpoint(model, session.checkpoint(model, x)).sum())
    session.close()
    assert taken == set()

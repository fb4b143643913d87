"""What threads wait for together with a thread that Ctrl-C may interrupt: NOTE [Interrupts]."""

import gc
import queue
import threading
import weakref
from threading import Thread

import pytest

from backhaul._accumulate.serial_thread import SerialThread
from backhaul_runtime.process import latch
from backhaul_runtime.process.latch import Latch, Promise
from conftest import QUIET_S


def test_a_latch_wakes_all_that_wait() -> None:
    flag, woken = Latch(), queue.SimpleQueue[bool]()
    threads = [Thread(target=lambda: woken.put(flag.wait(QUIET_S))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert not flag.wait(0.01)
    flag.set()
    flag.set()
    for thread in threads:
        thread.join()
    assert [woken.get() for _ in threads] == [True] * 3
    assert flag.wait(0)


def test_an_interrupt_before_a_wake_up_delays_it_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latch, "_LOOK_S", 0.01)

    class Interrupted(queue.SimpleQueue[None]):
        def put(self, *_: object) -> None:
            raise KeyboardInterrupt

    flag = Latch()
    monkeypatch.setattr(flag, "_wakes", Interrupted())
    waiting = Thread(target=flag.wait)
    waiting.start()
    with pytest.raises(KeyboardInterrupt):
        flag.set()
    waiting.join(QUIET_S)
    assert not waiting.is_alive()


def test_a_promise_returns_its_result_or_raises_its_error() -> None:
    kept, broken, open_one = Promise[int](), Promise[int](), Promise[int]()
    kept.set_result(3)
    broken.set_error(ZeroDivisionError("broken"))
    assert (kept.is_done, broken.is_done, open_one.is_done) == (True, True, False)
    assert kept.result() == 3
    with pytest.raises(ZeroDivisionError, match="broken"):
        broken.result()
    with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
        open_one.result(0.01)


def test_a_promise_is_freed_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        broken = Promise[int]()
        broken.set_error(ValueError())
        freed = weakref.ref(broken)
        with pytest.raises(ValueError):
            broken.result()
        del broken
        assert freed() is None
    finally:
        gc.enable()


def test_a_serial_thread_calls_in_order_and_ends_after_the_call_that_runs() -> None:
    thread, gate, running, order = SerialThread(), Latch(), Latch(), list[int]()

    def first() -> None:
        running.set()
        gate.wait(QUIET_S)
        order.append(1)

    begun, failing = thread.submit(first), thread.submit(lambda: 1 / 0)
    gate.set()
    with pytest.raises(ZeroDivisionError):
        failing.result(QUIET_S)
    begun.result()
    gate, running = Latch(), Latch()
    second, never = thread.submit(first), thread.submit(lambda: order.append(2))
    assert running.wait(QUIET_S)
    ending = threading.Thread(target=thread.end)
    ending.start()
    while not thread._is_ending:
        running.wait(0.01)
    gate.set()
    ending.join()
    second.result()
    with pytest.raises(RuntimeError, match="was ended before this call began"):
        never.result(QUIET_S)
    assert order == [1, 1]

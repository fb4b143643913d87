"""What a worker tells of its load: the time that it computed, bytes that differences spared, and its GPU."""

import asyncio
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch

import backhaul
from backhaul_proto.v1 import telemetry_pb2
from backhaul_server.worker.rpc import accelerator
from backhaul_server.worker.rpc.accelerator import AcceleratorMeter
from conftest import wait_until
from support.processes import WorkerProcess


@pytest.mark.slow
def test_a_worker_counts_the_time_that_it_computes_and_what_differences_spare() -> None:
    with WorkerProcess() as worker:
        idle = worker.telemetry()
        assert (idle.busy_s, idle.spared_bytes, idle.HasField("accelerator")) == (0.0, 0, False)
        assert idle.clock_s > 1.7e9
        layer = torch.nn.Linear(512, 512)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-6)
        with backhaul.connect(
            worker.address, settings=backhaul.Settings(compression="on", shared_memory=False)
        ) as session:
            for _ in range(3):
                x = torch.randn(8, 512, requires_grad=True)
                session.checkpoint(layer, x, returns="gradients").sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            spared_bytes = session.report().spared_bytes
            assert spared_bytes > 0
            # The worker counts as it stores them, the trainer when the worker has answered.
            wait_until(lambda: worker.telemetry().spared_bytes >= spared_bytes, "the worker has counted as much")
        busy = worker.telemetry()
        assert 0 < busy.busy_s < busy.uptime_s


class NVMLError(Exception):
    """As that of pynvml."""


def fake_nvml(**changed: object) -> ModuleType:
    """A module like pynvml, for a machine without NVIDIA's driver."""
    module = ModuleType("pynvml")
    functions = {
        "NVMLError": NVMLError,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=600, total=800),
        "nvmlDeviceGetName": lambda handle: b"GPU of a test",
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=75),
        **changed,
    }
    vars(module).update(functions)
    return module


async def reading(meter: AcceleratorMeter) -> telemetry_pb2.Accelerator | None:
    """The second reading: the first answer never waits for one."""
    assert meter.latest() is None
    while meter._reading is not None:
        await asyncio.sleep(0)
    return meter.latest()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2-3"))
    return torch.device("cuda", 0)


def test_a_gpu_is_read_through_nvml(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    shown = asyncio.run(reading(AcceleratorMeter(cuda)))
    assert shown is not None
    assert (shown.name, shown.utilization, shown.used_bytes, shown.total_bytes) == ("GPU of a test", 0.75, 600, 800)


def test_a_gpu_whose_driver_tells_no_utilization_has_none(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: object) -> None:
        raise NVMLError("not supported")

    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(nvmlDeviceGetUtilizationRates=refuse))
    shown = asyncio.run(reading(AcceleratorMeter(cuda)))
    assert shown is not None
    assert (shown.HasField("utilization"), shown.total_bytes) == (False, 800)


def test_a_driver_that_fails_is_asked_again_and_not_all_the_time(
    cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, failures, inits = [100.0], [NVMLError("GPU is lost"), None], []

    def memory(handle: object) -> SimpleNamespace:
        if failures and (error := failures.pop(0)):
            raise error
        return SimpleNamespace(used=600, total=800)

    nvml = fake_nvml(nvmlDeviceGetMemoryInfo=memory, nvmlInit=lambda: inits.append(now_s[0]))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(accelerator, "monotonic", lambda: now_s[0])
    meter = AcceleratorMeter(cuda)

    async def asked() -> list[bool]:
        seen = [await reading(meter) is not None]
        now_s[0] += accelerator.RETRY_S - 1
        seen.append(await reading(meter) is not None)
        now_s[0] += 2
        seen.append(await reading(meter) is not None)
        return seen

    assert asyncio.run(asked()) == [False, False, True]
    assert inits == [100.0, 100.0 + accelerator.RETRY_S + 1]


def test_the_last_reading_is_not_shown_while_the_driver_hangs(
    cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, goes_on = [100.0], threading.Event()
    goes_on.set()

    def memory(handle: object) -> SimpleNamespace:
        goes_on.wait()
        return SimpleNamespace(used=600, total=800)

    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(nvmlDeviceGetMemoryInfo=memory))
    monkeypatch.setattr(accelerator, "monotonic", lambda: now_s[0])

    async def asked() -> list[bool]:
        meter = AcceleratorMeter(cuda)
        assert await reading(meter) is not None
        while meter._reading is not None:
            await asyncio.sleep(0)
        goes_on.clear()
        seen = [meter.latest() is not None]
        now_s[0] += accelerator.STALE_S + 1
        seen.append(meter.latest() is not None)
        goes_on.set()
        while meter._reading is not None:
            await asyncio.sleep(0)
        return [*seen, meter.latest() is not None]

    assert asyncio.run(asked()) == [True, False, True]


def test_without_nvml_or_without_a_gpu_there_is_none(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert asyncio.run(reading(AcceleratorMeter(cuda))) is None
    assert AcceleratorMeter(torch.device("cpu")).latest() is None

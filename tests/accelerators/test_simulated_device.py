"""The simulated device itself: what a GPU would do, and what the simulation shows of code that forgets to wait."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backhaul_runtime.tensors.digest import device_sums
from support.bits import differing, grad_of

pytestmark = pytest.mark.usefixtures("simulation")


def mlp(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 4))


def train(device: str, make: Callable[..., torch.optim.Optimizer], dropout: float = 0.0) -> list[Tensor | None]:
    model = mlp(dropout).to(device)
    optimizer, losses = make(model.parameters()), list[Tensor | None]()
    draws = torch.Generator().manual_seed(1)
    for _ in range(3):
        x, y = torch.randn(8, 16, generator=draws).to(device), torch.randint(4, (8,), generator=draws).to(device)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach().cpu())
    return losses + [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.AdamW, lr=0.01),
        partial(torch.optim.AdamW, lr=0.01, fused=True),
        partial(torch.optim.SGD, lr=0.01, momentum=0.9, foreach=False),
    ],
)
def test_training_has_the_bits_of_the_host(make: Callable[..., torch.optim.Optimizer]) -> None:
    assert differing(train("cuda", make), train("cpu", make)) == []


def test_dropout_repeats_and_is_not_the_hosts() -> None:
    make = partial(torch.optim.SGD, lr=0.1)
    first = train("cuda", make, dropout=0.5)
    assert differing(first, train("cuda", make, dropout=0.5)) == []
    assert differing(first, train("cpu", make, dropout=0.5)) != []


def test_checkpoint_restores_the_generator() -> None:
    def gradient(**options: Any) -> Tensor:
        model = mlp(0.5).cuda()
        torch.manual_seed(6)
        x = torch.ones(4, 16, device="cuda", requires_grad=True)
        (checkpoint(model, x, use_reentrant=False, **options) if options else model(x)).sum().backward()
        assert x.grad is not None
        return x.grad.cpu()

    plain = gradient()
    assert torch.equal(plain, gradient(preserve_rng_state=True))
    assert not torch.equal(plain, gradient(preserve_rng_state=False))


@pytest.mark.parametrize("waits", [True, False])
def test_a_missing_wait_shows(waits: bool) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.ones(1000, device="cuda") * 3
        done = torch.cuda.Event()
        done.record()
    if waits:
        torch.cuda.current_stream().wait_event(done)
    assert bool(((x + 1).cpu() == 4).all()) == waits


@pytest.mark.parametrize("records", [True, False])
def test_a_missing_record_stream_shows(records: bool) -> None:
    side = torch.cuda.Stream()
    x = torch.ones(1000, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    if records:
        x.record_stream(side)
    del x  # the next allocation of this stream may get its memory
    torch.full((1000,), 7.0, device="cuda")
    torch.cuda.current_stream().synchronize()
    torch.cuda.synchronize()
    assert bool((y.cpu() == 2).all()) == records


@pytest.mark.parametrize("waits", [True, False])
def test_freed_memory_keeps_its_contents_until_its_stream_allocates(waits: bool) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.ones(1000, device="cuda")
    torch.cuda.current_stream().wait_stream(side)
    y = x * 2
    del x
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.empty(3, device="cuda")
    side.synchronize()
    assert bool((y.cpu() == 2).all()) == waits


@pytest.mark.parametrize("waits", [True, False])
def test_reading_pinned_memory_too_early_shows(waits: bool) -> None:
    x, host = torch.ones(1000, device="cuda") * 5, torch.zeros(1000, pin_memory=True)
    host.copy_(x, non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    assert bool((host == 5).all()) == waits


@pytest.mark.parametrize(
    ("waiting", "count"),
    [
        (lambda x: x.sum().item(), 1),
        (lambda x: (x > 0).nonzero(), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: x.add_(1), 0),
        (lambda x: torch.empty(3, pin_memory=True).copy_(x, non_blocking=True), 0),
    ],
)
def test_synchronisations_are_counted_by_line(simulation: Any, waiting: Callable[[Tensor], object], count: int) -> None:
    x = torch.ones(3, device="cuda")
    simulation.reset_counters()
    waiting(x)
    assert simulation.counters()["syncs"] == count
    assert all("test_simulated_device.py" in call for call in simulation.counters()["sync_calls"])


def test_a_training_step_does_not_synchronise(simulation: Any) -> None:
    model = mlp(0.1).cuda()
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(8, 16, device="cuda")
    for _ in range(2):
        torch.cuda.synchronize()
        simulation.reset_counters()
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert simulation.counters()["sync_calls"] == {}


def test_backward_runs_in_a_thread_of_the_device_and_on_the_stream_of_forward() -> None:
    seen = {}

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(_: Any, gradient: Tensor) -> Tensor:
            seen[threading.get_native_id()] = torch.cuda.current_stream().stream_id
            return gradient

    side, x = torch.cuda.Stream(), torch.ones(3, device="cuda", requires_grad=True)
    with torch.cuda.stream(side):
        y = Spy.apply(x).sum()
    y.backward()
    assert threading.get_native_id() not in seen
    assert list(seen.values()) == [side.stream_id]


def test_events_measure_the_clock_of_their_stream(simulation: Any) -> None:
    began, ended, side = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    x = torch.ones(3, device="cuda")
    simulation.settings(kernel_us=10_000_000)
    began.record()
    x.add_(1).mul_(2)
    ended.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_event(ended)
        x.neg()
        side.record()
    torch.cuda.synchronize()
    assert 20_000 <= began.elapsed_time(ended) < 30_000
    assert 10_000 <= ended.elapsed_time(side) < 20_000


def test_a_host_that_has_waited_is_where_the_device_is(simulation: Any) -> None:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    side = torch.cuda.Stream()
    simulation.settings(kernel_us=10_000_000)
    began.record(side)
    torch.ones(3, device="cuda").sum().item()
    ended.record(side)
    torch.cuda.synchronize()
    assert 20_000 <= began.elapsed_time(ended) < 30_000


def test_undefined_memory_differs_each_time() -> None:
    first, second = (torch.empty(1000, device="cuda").view(torch.int32).cpu() for _ in range(2))
    assert not torch.equal(first, second)


def test_tensors_of_two_devices_do_not_meet() -> None:
    with torch.cuda.device(1):
        x = torch.ones(2, device="cuda")
    assert x.device.index == 1
    assert torch.equal(x.to("cuda:0").cpu(), torch.ones(2))
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(2, device="cuda:0")


def test_memory_has_a_limit(simulation: Any) -> None:
    torch.cuda.empty_cache()
    simulation.settings(limit=1 << 20)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 20, device="cuda")
    finally:
        simulation.settings(limit=16 << 30)
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_an_error_of_a_kernel_is_raised_later() -> None:
    torch.zeros(3, device="cuda").index_select(0, torch.tensor([5], device="cuda"))
    with pytest.raises(RuntimeError, match="a kernel failed"):
        torch.cuda.synchronize()


@pytest.mark.parametrize("module", [nn.LSTM, nn.GRU])
def test_recurrent_cells_have_the_gradients_of_the_host(module: Callable[..., nn.Module]) -> None:
    def gradients(device: str) -> list[Tensor | None]:
        torch.manual_seed(0)
        cell = module(4, 5, num_layers=2).to(device)
        cell(torch.randn(3, 2, 4).to(device))[0].square().sum().backward()
        return [None if parameter.grad is None else parameter.grad.cpu() for parameter in cell.parameters()]

    for ours, theirs in zip(gradients("cuda"), gradients("cpu"), strict=True):
        # CUDA's fused cells compute the same formulas in another order.
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_compiled_kernel_is_one_launch(simulation: Any) -> None:
    source = """extern "C" __global__ void count(const int* values, int size, int* total) {
      int sum = 0;
      for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += gridDim.x * blockDim.x) sum += values[i];
      for (int step = 16; step; step >>= 1) sum += __shfl_down_sync(0xffffffffu, sum, step);
      if ((threadIdx.x & 31) == 0) atomicAdd(total, sum);
    }"""
    kernel = torch.cuda._compile_kernel(source, "count")
    values, total = torch.arange(10, dtype=torch.int32, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    simulation.reset_counters()
    kernel((4, 1, 1), (256, 1, 1), (values, 10, total))
    assert simulation.counters()["ops"] == {"count": 1}
    assert total.item() == 45


def test_a_kernel_runs_in_two_streams_at_once() -> None:
    data = [torch.randint(0, 256, (8 << 20,), dtype=torch.uint8).cuda() for _ in range(2)]
    expected = [device_sums(part).cpu() for part in data]
    torch.cuda.synchronize()
    sums = []
    for part in data:
        with torch.cuda.stream(torch.cuda.Stream()):
            sums.append(device_sums(part))
    torch.cuda.synchronize()
    assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(sums, expected, strict=True))


def test_bits_do_not_depend_on_the_hosts_threads() -> None:
    torch.set_num_threads(2)
    norm, x = nn.LayerNorm(32).cuda(), torch.randn(64, 32)
    with torch.cuda.stream(torch.cuda.Stream()):
        norm(x.cuda()).square().sum().backward()
    torch.set_num_threads(1)
    host = nn.LayerNorm(32)
    host(x).square().sum().backward()
    torch.cuda.synchronize()
    ours = [grad_of(p).cpu() for p in norm.parameters()]
    assert differing(ours, [p.grad for p in host.parameters()]) == []


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import ctypes, torch; ctypes.string_at(torch.ones(3, device='cuda').data_ptr(), 4)", -11),
        ("import os, torch; os._exit(os.fork() and 0 or int(torch.ones(3, device='cuda').sum().item() != 3))", 0),
        (
            "import os, torch; x = torch.ones(3, device='cuda').cpu(); pid = os.fork()\n"
            "if pid: os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
            "try: torch.ones(3, device='cuda').sum().item()\nexcept RuntimeError: os._exit(3)\nos._exit(0)",
            3,
        ),
    ],
    ids=["the host cannot read its memory", "a fork before its first use", "a fork after its first use"],
)
@pytest.mark.slow
def test_processes(code: str, status: int) -> None:
    ended = subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL, check=False, env=os.environ)
    assert ended.returncode == status

"""Digests on an accelerator: one kernel for each, which waits for nothing and needs no memory."""

from typing import Any

import pytest
import torch

from backhaul_runtime.record.contents import Contents, FixedDigests
from backhaul_runtime.tensors import sums_kernel
from backhaul_runtime.tensors.deferred_digest import read
from backhaul_runtime.tensors.digest import device_sums, torch_sums
from backhaul_runtime.tensors.layout import layout_of


@pytest.mark.parametrize("size", [0, 1, 3, 4, 15, 16, 17, 4096, 1_000_003, 20_000_000])
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_the_sums_on_a_device_are_those_of_the_host(size: int, offset: int) -> None:
    data = torch.randint(0, 256, (size + offset,), dtype=torch.uint8)[offset:]
    on_device = torch.cat([torch.zeros(offset, dtype=torch.uint8), data]).cuda()[offset:]
    assert torch.equal(device_sums(on_device).cpu(), torch_sums(data))


def test_a_digest_is_two_launches_without_a_wait_and_without_memory(simulation: Any) -> None:
    data = torch.randint(0, 256, (64 << 20,), dtype=torch.uint8).cuda()
    device_sums(data[:16])  # compiles the kernel
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    simulation.reset_counters()
    sums = device_sums(data)
    counted = simulation.counters()
    assert sum(counted["ops"].values()) <= 2
    assert counted["ops"][sums_kernel.NAME] == 1
    assert counted["syncs"] == 0
    assert torch.cuda.max_memory_allocated() - before <= 1 << 20
    assert torch.equal(sums.cpu(), torch_sums(data.cpu()))


def test_a_device_that_can_not_compile_uses_torchs_ops(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("no NVRTC")

    monkeypatch.setattr(sums_kernel, "compile_kernel", failing)
    sums_kernel._kernel.cache_clear()
    try:
        data = torch.randint(0, 256, (1001,), dtype=torch.uint8)
        assert torch.equal(device_sums(data.cuda()).cpu(), torch_sums(data))
        assert "no NVRTC" in caplog.text
    finally:
        sums_kernel._kernel.cache_clear()


def test_the_second_device_has_a_kernel_of_its_own() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    data = torch.randint(0, 256, (1001,), dtype=torch.uint8)
    assert torch.equal(device_sums(data.to("cuda:1")).cpu(), torch_sums(data))
    assert torch.cuda.current_device() == 0


def test_the_weights_of_a_block_are_compared_with_one_wait(simulation: Any) -> None:
    fixed, weights = FixedDigests(), [torch.nn.Parameter(torch.randn(8, device="cuda")) for _ in range(4)]
    contents = Contents(fixed)
    digests = [contents.digest(weight, layout_of(weight)) for weight in weights]
    for weight, digest in zip(weights, digests, strict=True):
        contents.fix(weight, layout_of(weight), digest)
        read(digest)
    simulation.reset_counters()
    assert fixed.changed() is None
    assert simulation.counters()["syncs"] == 1
    weights[2].data.add_(1)
    assert fixed.changed() is weights[2]

"""Settings of CUDA: when they are read, and with which programs they travel."""

import pytest
import torch

import backhaul
from backhaul_runtime.torch_internals import ambient_state, attention_order
from backhaul_runtime.torch_internals.ambient_settings import settings_of_cuda
from conftest import QUIET
from support.loopback import Loopback
from support.processes import WorkerProcess


def test_the_order_of_attention_is_decided_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.zeros(1, device="cuda")  # initialises CUDA
    before = ambient_state.capture()
    monkeypatch.setattr(attention_order, "_is_decided", False)
    # As torch does on Hopper inside the first attention of a process.
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_: torch._C._set_sdp_priority_order([3, 1, 2, 0, 4]))
    try:
        state = ambient_state.to_mapping(ambient_state.capture())
        assert state["sdp_priority"] == "3,1,2,0,4"
    finally:
        ambient_state.apply(before, ambient_state.capture())


@pytest.mark.slow
def test_a_worker_without_cuda_recomputes_programs_of_the_cpu(returns: str) -> None:
    x = torch.randn(4, requires_grad=True)
    without = {"SIMULATED_CUDA": "", "CUDA_VISIBLE_DEVICES": ""}
    worker = WorkerProcess("--memory", "1GiB", "--device", "cpu", environment=without)
    with worker, backhaul.connect(worker.address, settings=QUIET) as session:
        session.checkpoint(torch.sin, x, returns=returns, strict=True).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().cos())


def test_a_trainer_with_cuda_recomputes_programs_of_the_cpu(loopback: Loopback, returns: str) -> None:
    x = torch.randn(4, requires_grad=True)
    torch._C._set_cudnn_enabled(False)
    try:
        y = loopback.checkpoint(torch.sin, x, returns=returns)
        loopback.is_lost = True
        y.sum().backward()
        assert not torch.backends.cudnn.enabled  # the replay has left it alone
    finally:
        torch._C._set_cudnn_enabled(True)
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().cos())


@pytest.mark.slow
def test_a_worker_recomputes_with_the_settings_of_cuda(returns: str) -> None:
    x = torch.randn(4, device="cuda", requires_grad=True)
    before = ambient_state.capture()
    worker = WorkerProcess("--memory", "1GiB", "--device", "cuda")
    with worker, backhaul.connect(worker.address, settings=QUIET) as session:
        try:
            for name in settings_of_cuda().keys() & {"cudnn_enabled", "sm_carveout", "cublas_fp16_reduction"}:
                value = {"sm_carveout": "4", "cublas_fp16_reduction": "0,1"}.get(name, False)
                settings_of_cuda()[name].write(value)
            session.checkpoint(torch.sin, x, returns=returns, strict=True).sum().backward()
        finally:
            ambient_state.apply(before, ambient_state.capture())
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().cos())

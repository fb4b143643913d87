"""The fingerprint of a CUDA device, and of segments that also compute on the CPU beside it."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import backhaul
from backhaul import Session
from backhaul_runtime.process.fingerprint import differences, fingerprint
from conftest import QUIET
from support.processes import WorkerProcess


@pytest.fixture(scope="module")
def gpu_worker() -> Iterator[WorkerProcess]:
    with WorkerProcess("--memory", "1GiB", "--device", "cuda") as process:
        yield process


@pytest.fixture
def beside_another_cpu(gpu_worker: WorkerProcess) -> Iterator[Session]:
    """A session on a worker with an equal GPU and another CPU."""
    with backhaul.connect(gpu_worker.address, settings=QUIET) as session:
        connection = session._workers[0].connection
        assert connection.up is not None
        facts = {**connection.up.fingerprint, "host_cpu": "another"}
        connection._worker_session = replace(connection.up, fingerprint=facts)
        yield session


def on_gpu(x: Tensor) -> Tensor:
    return x.sin()


def scheduled(x: Tensor) -> Tensor:
    return x.sin() * torch.arange(1.0, 5.0).exp().to(x.device)


def remote(session: Session, function: Callable[[Tensor], Tensor]) -> int:
    x = torch.randn(4, device="cuda", requires_grad=True)
    session.checkpoint(function, x, returns="gradients").sum().backward()
    return session.report().remote


def test_an_equal_gpu_beside_another_cpu_computes_equal_bits(beside_another_cpu: Session) -> None:
    assert remote(beside_another_cpu, on_gpu) == 1
    assert beside_another_cpu.report().fallbacks == 0


def test_what_computes_on_the_cpu_stays_if_the_cpus_differ(beside_another_cpu: Session) -> None:
    assert remote(beside_another_cpu, scheduled) == 0
    (segment,) = beside_another_cpu.report().segments
    assert "host_cpu is" in " ".join(segment.reasons)


def test_the_fingerprint_of_a_gpu_has_no_facts_about_the_cpu() -> None:
    facts = fingerprint(torch.device("cuda"))
    assert {"gpu", "capability", "multiprocessors", "cuda"} <= facts.keys()
    assert ("cudnn" in facts) == torch._C._has_cudnn
    assert not {"cpu", "machine", "cpu_capability", "host_cpu"} & facts.keys()


@pytest.mark.parametrize("name", ["NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "DISABLE_ADDMM_CUDA_LT"])
def test_variables_that_choose_kernels_of_a_gpu_count(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.delenv(name, raising=False)
    without = fingerprint.__wrapped__(device)
    monkeypatch.setenv(name, "1")
    assert differences(without, fingerprint.__wrapped__(device)) == {name: ("-", "1")}

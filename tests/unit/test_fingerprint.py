"""Which differences between a trainer and a worker count."""

from pathlib import Path

import pytest
import torch

from backhaul_runtime.process.fingerprint import differences, fingerprint, fingerprint_with_host
from backhaul_runtime.torch_internals.cuda_libraries import (
    cublas_version,
    cublaslt_version,
    driver_version,
    loaded_library,
)

GPU = {"device": "cuda", "gpu": "H100", "host_cpu": "Xeon"}
MAPS = """7f0000000000-7f0000001000 r-xp 00000000 08:01 1 /opt/site packages/nvidia/lib/libcublasLt.so.12
7f0000002000-7f0000003000 r-xp 00000000 08:01 2 /opt/site packages/nvidia/lib/libcublas.so.12
7f0000004000-7f0000005000 rw-p 00000000 00:00 0
"""
DRIVERS = {
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n": "535.104.05",
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n": "570.86.15",
    "": "",
}


def test_the_cpu_beside_a_gpu_does_not_count() -> None:
    assert differences(GPU, {**GPU, "host_cpu": "EPYC"}) == {}


def test_it_counts_for_segments_that_compute_there() -> None:
    different = differences(GPU, {**GPU, "host_cpu": "EPYC"}, computes_on_host=True)
    assert different == {"host_cpu": ("Xeon", "EPYC")}


def test_another_gpu_counts() -> None:
    assert differences(GPU, {**GPU, "gpu": "A100"}) == {"gpu": ("H100", "A100")}


def test_a_device_of_another_type_is_the_only_difference() -> None:
    assert differences({"device": "cpu", "cpu": "Xeon"}, GPU) == {"device": ("cpu", "cuda")}


def test_the_cpu_counts_where_it_is_the_device() -> None:
    facts = fingerprint(torch.device("cpu"))
    assert {"torch", "build", "device", "machine", "cpu", "cpu_capability"} <= facts.keys()
    assert fingerprint_with_host(torch.device("cpu")) == facts


@pytest.mark.parametrize(("report", "version"), DRIVERS.items(), ids=["closed", "open", "no driver"])
def test_the_version_of_the_driver(report: str, version: str) -> None:
    assert driver_version(report) == version


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("libcublas.so", "/opt/site packages/nvidia/lib/libcublas.so.12"),
        ("libcublasLt.so", "/opt/site packages/nvidia/lib/libcublasLt.so.12"),
        ("libcudnn.so", ""),
    ],
)
def test_a_library_is_found_where_it_was_loaded(name: str, path: str) -> None:
    assert loaded_library(name, MAPS) == path


@pytest.mark.parametrize("path", [Path(torch.__path__[0], "lib/libc10.so"), Path("/no/such/library (deleted)")])
def test_a_library_that_tells_no_version_is_left_out(path: Path) -> None:
    assert cublas_version(str(path)) == ""
    assert cublaslt_version(str(path)) == ""

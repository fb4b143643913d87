"""The fingerprint: what the numbers of a process depend on. Equal fingerprints give equal bits.

NOTE [Equal hardware]
1. Numbers depend on the device that computes them, on its libraries, and on the build of torch. The fingerprint of CUDA
   therefore says nothing about the CPU beside the GPU.
2. A program for CUDA may compute on the CPU too, for example a schedule in a tensor without a device. So the worker
   also sends the facts about its CPU, with `HOST` before their names. They count for segments in which an op has
   returned a tensor on the CPU. Where those facts differ, such a segment stays on the trainer.
3. Variables of the environment count if a library reads them once per process. What can be changed while the process
   runs belongs to the ambient state instead, which travels with each program.
"""

import os
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

from backhaul_runtime.torch_internals.cuda_libraries import library_versions

# Variables that oneDNN and MKL read when they choose kernels, once per process.
_CPU_VARIABLES = (
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE",
)

# Variables that cuBLAS, torch or the driver read when they choose kernels, mostly once per process.
_CUDA_VARIABLES = (
    "NVIDIA_TF32_OVERRIDE",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_EMULATE_SINGLE_PRECISION",
    "CUBLAS_EMULATE_DOUBLE_PRECISION",
    "CUBLAS_EMULATION_STRATEGY",
    "CUBLAS_FIXEDPOINT_EMULATION_MANTISSA_BIT_COUNT",
    "CUDA_FORCE_PTX_JIT",
    "DISABLE_ADDMM_CUDA_LT",
    "TORCH_CUDNN_USE_HEURISTIC_MODE_B",
    "TORCH_CUDNN_V8_API_DISABLED",
)

DECISIVE = frozenset({"torch", "device"})
"""The keys that must be equal: another version of torch has other formulas, and another type of device cannot use our
tensors. All other differences change only roundings."""

HOST = "host_"
"""Stands before the names of the facts about the CPU beside a GPU."""


@cache
def fingerprint(device: torch.device) -> Mapping[str, str]:
    """Returns what the numbers of ops on a device depend on."""
    facts = {
        "torch": f"{torch.__version__.partition('+')[0]} {torch.version.git_version}",
        "build": torch.__version__,
        "device": device.type,
    }
    return facts | (_cpu() if device.type == "cpu" else _gpu(device))


@cache
def fingerprint_with_host(device: torch.device) -> Mapping[str, str]:
    """Returns the fingerprint of programs on a device, whose ops may also compute on the CPU (Rule 2)."""
    host = {} if device.type == "cpu" else {HOST + name: fact for name, fact in _cpu().items()}
    return {**fingerprint(device), **host}


def differences(
    ours: Mapping[str, str], theirs: Mapping[str, str], *, computes_on_host: bool = False
) -> dict[str, tuple[str, str]]:
    """Returns the keys that differ, each with our value and theirs; "-" stands for a missing value.

    Between devices of two types only DECISIVE keys are compared: all others differ anyway.

    Args:
        ours: The fingerprint of this process.
        theirs: The fingerprint of the other process.
        computes_on_host: Whether the facts about the CPU beside a GPU count (Rule 2).
    """
    keys = sorted(key for key in {*ours, *theirs} if computes_on_host or not key.startswith(HOST))
    if ours.get("device") != theirs.get("device"):
        keys = sorted(DECISIVE)
    return {key: (ours.get(key, "-"), theirs.get(key, "-")) for key in keys if ours.get(key) != theirs.get(key)}


def _variables(names: tuple[str, ...]) -> dict[str, str]:
    return {name: os.environ[name] for name in names if name in os.environ}


def _cpu() -> dict[str, str]:
    return {
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        **_variables(_CPU_VARIABLES),
    }


def _gpu(device: torch.device) -> dict[str, str]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": torch.cuda.get_device_name(device),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "multiprocessors": str(properties.multi_processor_count),
        "cuda": str(torch.version.cuda),
        **library_versions(),
        **_variables(_CUDA_VARIABLES),
    }


def _cpu_model() -> str:
    """Returns vendor, family, model, stepping and name of the CPU, because kernels are chosen by them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    first = lines[: lines.index("")] if "" in lines else lines
    fields = dict(part.split(":", 1) for part in (line.replace("\t", "") for line in first) if ":" in part)
    return " ".join(
        fields.get(key, "?").strip() for key in ("vendor_id", "cpu family", "model", "stepping", "model name")
    )

"""The fingerprint: what the numbers of a process depend on. Equal fingerprints give equal bits."""

import os
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

from backhaul_runtime.torch_internals.private import cudnn_version

# Variables that oneDNN and MKL read when they choose kernels, once per process.
_KERNEL_VARIABLES = (
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE",
)


DECISIVE = frozenset({"torch", "device"})
"""The keys that must be equal: another version of torch has other formulas, and another type of device cannot use our
tensors. All other differences change only roundings."""


@cache
def fingerprint(device: torch.device) -> Mapping[str, str]:
    """Returns the fingerprint of this process for programs on a device."""
    facts = {
        "torch": f"{torch.__version__.partition('+')[0]} {torch.version.git_version}",
        "build": torch.__version__,
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": device.type,
    }
    facts |= {name: os.environ[name] for name in _KERNEL_VARIABLES if name in os.environ}
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cudnn"] = cudnn_version()
        facts["cuda"] = str(torch.version.cuda)
    return facts


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Returns the keys that differ, each with our value and theirs; "-" stands for a missing value."""
    keys = sorted({*ours, *theirs})
    return {key: (ours.get(key, "-"), theirs.get(key, "-")) for key in keys if ours.get(key) != theirs.get(key)}


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

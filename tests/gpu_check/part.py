"""A part: `python -m gpu_check.part NAME`."""

import importlib
import platform
import sys

OPTIONAL = frozenset({"pynvml", "triton"})
NEEDED = (
    *("torch", "numpy", "grpc", "google.protobuf", "xxhash", "zstandard", "fastapi", "uvicorn", "prometheus_client"),
    *("rich", "grpc_health.v1.health", "grpc_reflection.v1alpha.reflection", "pytest", "pynvml", "triton"),
    *("backhaul", "backhaul_server.worker.main", "backhaul_server.dashboard.http.app", "backhaul_lab.bench.child"),
)


def imports() -> None:
    """What Python can import, with versions."""
    from gpu_check.results import note

    note("python", True, version=platform.python_version())
    for name in NEEDED:
        try:
            module = importlib.import_module(name)
        except Exception as error:
            note(f"import {name}", None if name in OPTIONAL else False, error=f"{type(error).__name__}: {error}")
        else:
            note(f"import {name}", True, version=getattr(module, "__version__", ""))


def main(part: str) -> None:
    """Runs the functions of a part."""
    if part == "imports":
        imports()
        return
    from gpu_check import attention, blocks, compiled, devices, gradients, layer, probes, rates, waits

    {
        "settings": probes.settings,
        "undefined": attention.undefined,
        "digest": probes.digest,
        "staging": probes.staging,
        "durations": probes.durations,
        "gradients": gradients.plain,
        "attention": attention.gradients,
        "recurrent": gradients.recurrent,
        "blocks": blocks.run,
        "waits": waits.run,
        "devices": devices.run,
        "compiled": compiled.run,
        "layer": layer.run,
        "rates": rates.rates,
        "depth": rates.depth,
    }[part]()


main(sys.argv[1])

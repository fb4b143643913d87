"""The groups of figures: what measures each, how long it takes, and in which environment. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

# glibc's thresholds for a process whose resident memory is measured. With the defaults, fragmentation would count too.
_PEAK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
# The allocator keeps freed memory. Otherwise page faults, which any small allocation changes, would count as checks.
_CHECKS = {"MALLOC_MMAP_THRESHOLD_": "8589934592", "MALLOC_TRIM_THRESHOLD_": "8589934592"}


@dataclass(frozen=True, slots=True)
class Group:
    """Figures that one measurement yields.

    Attributes:
        function: Module of the bench and function that measure the figures, as "module:function". The module is
            imported in the process of the group, because it imports torch.
        nominal_s: Seconds that the measurement takes on a slow machine if it is not hurried.
        on_cuda: Whether the figures are measured on an accelerator too. Others do not compute on one.
        environment: Variables of the process of the group.
    """

    function: str
    nominal_s: float = 25.0
    on_cuda: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


GROUPS: Mapping[str, Group] = {
    "steps": Group("steps:measure", 180, on_cuda=True),
    "graphs": Group("graphs:measure", 40),
    "small_frozen": Group("small:measure_frozen", 50, on_cuda=True),
    "small": Group("small:measure_trainable", 60, on_cuda=True),
    "deferred": Group("deferred:measure", 230, on_cuda=True),
    "deferred_third": Group("deferred:measure_third", 300),
    "deferred_lost": Group("deferred:measure_lost", 130, on_cuda=True),
    "deferred_wire": Group("deferred:measure_wire", 50, on_cuda=True),
    "deferred_lora": Group("deferred:measure_adapted", 150, on_cuda=True),
    "whole": Group("whole:measure", 120, on_cuda=True),
    "whole_third": Group("whole:measure_third", 200),
    "whole_lora": Group("whole:measure_adapted", 100, on_cuda=True),
    "whole_lost": Group("whole:measure_lost", 130, on_cuda=True),
    "whole_wire": Group("whole:measure_wire", 20),
    "peak_flat": Group("peaks:measure_flat", 140, on_cuda=True, environment=_PEAK),
    "peaks": Group("peaks:measure_beside_others", 40, on_cuda=True, environment=_PEAK),
    "wire": Group("wire:measure", on_cuda=True),
    "transfers": Group("transfers:measure"),
    "shared_memory": Group("shared_memory:measure"),
    "roundtrip": Group("roundtrip:measure"),
    "growth": Group("growth:measure", on_cuda=True),
    "tenants": Group("tenants:measure"),
    "credentials": Group("tenants:measure_credentials"),
    "hivemind": Group("beside_hivemind:measure"),
    "torch_rpc": Group("beside_torch_rpc:measure"),
    "compression_thin": Group("thin_link:measure", 35),
    "cores": Group("cores:measure"),
    "checks_large": Group("checks:measure_large", environment=_CHECKS),
    "checks_small": Group("checks:measure_small", environment=_CHECKS),
    "telemetry": Group("telemetry:measure", on_cuda=True),
    "recheck": Group("recheck:measure", 100, on_cuda=True),
}
"""All groups by name, in the order of the figures."""

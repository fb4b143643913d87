"""Lets torchtitan's Trainer run on a CPU, which it was not made for. Import it before the rest of torchtitan.

What torchtitan asks of its device is replaced: its name, its memory, and the choice among several devices. Gloo cannot
scale while it reduces, so gradients are summed without a factor, which is 1. Torch 2.13 has no function for changing
the timeouts of collectives, so they stay as they are.
"""

from types import SimpleNamespace

import torch
import torch.distributed
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils


class CpuModule:
    """What torchtitan calls of a device's module, such as torch.cuda."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch.cpu, name)

    def set_device(self, device: object) -> None:
        pass

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def get_device_name(self, device: object = None) -> str:
        return "CPU"

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=1 << 30)

    def memory_stats(self, device: object = None) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass


utils.device_type, utils.device_module = "cpu", CpuModule()
from torchtitan.distributed import fsdp  # noqa: E402 # asks for the device


def sum_without_a_factor(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


fsdp.disable_fsdp_gradient_division = sum_without_a_factor
if not hasattr(torch.distributed, "set_timeout"):
    vars(torch.distributed)["set_timeout"] = lambda timeout, group: None

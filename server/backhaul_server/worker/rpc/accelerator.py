"""The load and memory of the worker's GPU, as NVIDIA's driver counts them. Needs the extra "nvml"."""

import asyncio
import logging
from time import monotonic
from typing import Any

import torch

from backhaul_proto.v1 import telemetry_pb2

logger = logging.getLogger("backhaul.worker")

RETRY_S = 30.0
"""Seconds after an error until NVML is asked again."""
STALE_S = 10.0
"""Seconds after which a reading that does not end makes the last one too old to be shown."""


class AcceleratorMeter:
    """Reads a device through NVML, in a thread, because a driver in trouble may take seconds. Event loop only.

    Args:
        device: The device that the worker computes on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._nvml: Any = None
        self._handle: Any = None
        self._is_unusable = device.type != "cuda"
        self._reading: asyncio.Future[telemetry_pb2.Accelerator] | None = None
        self._latest: telemetry_pb2.Accelerator | None = None
        self._began_s = 0.0
        self._again_s = 0.0

    def latest(self) -> telemetry_pb2.Accelerator | None:
        """Returns the last reading and starts the next one. None if there is no recent one, at first for a moment."""
        if self._is_unusable:
            return None
        now_s = monotonic()
        if self._reading is None and now_s >= self._again_s:
            self._began_s = now_s
            self._reading = asyncio.ensure_future(asyncio.to_thread(self._read))
            self._reading.add_done_callback(self._was_read)
        elif self._reading is not None and now_s - self._began_s > STALE_S:
            self._latest = None  # the driver hangs, and old numbers would look like those of an idle device
        return self._latest

    def _was_read(self, reading: "asyncio.Future[telemetry_pb2.Accelerator]") -> None:
        self._reading = None
        if reading.cancelled():
            return
        error = reading.exception()
        if error is None:
            self._latest = reading.result()
            return
        logger.debug("NVML tells nothing of %s: %r", self._device, error)
        self._latest = self._nvml = None
        self._again_s = monotonic() + RETRY_S  # the driver may be reset, updated or only busy
        self._is_unusable = isinstance(error, ImportError)  # which does not change while the process runs

    def _read(self) -> telemetry_pb2.Accelerator:
        """Reads the device. Raises ImportError without the package, and NVMLError for what the driver does not tell."""
        if self._nvml is None:
            import pynvml  # the package nvidia-ml-py, an optional extra

            pynvml.nvmlInit()
            # torch and NVML may number devices differently, but agree on their UUIDs.
            uuid = torch.cuda.get_device_properties(self._device).uuid
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self._nvml = pynvml
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        name = self._nvml.nvmlDeviceGetName(self._handle)
        reading = telemetry_pb2.Accelerator(
            name=name.decode() if isinstance(name, bytes) else name,
            used_bytes=memory.used,
            total_bytes=memory.total,
        )
        try:
            reading.utilization = self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100
        except self._nvml.NVMLError as error:  # a device that is split (MIG) has none
            logger.debug("NVML tells no utilization of %s: %r", self._device, error)
        return reading

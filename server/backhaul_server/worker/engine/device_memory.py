"""What a worker on CUDA takes of its device beside the tensors that the store charges.

NOTE [Reserve]
1. torch's allocator rounds tensors up to blocks of 512 bytes, and large ones to 2 MiB. cuBLAS and cuDNN take workspaces
   from it for each stream. Nobody is charged for these, so the store counts them as its reserve: what is allocated
   beyond the charges.
2. The CUDA context, loaded kernels, libraries and other processes, among them a trainer that shares the device, take
   memory outside of the allocator. Only what they leave free can be measured. If that is less than the store may still
   give away, the difference belongs to the reserve too.
3. The reserve is measured before an execution begins, while nothing runs. Until the next measurement the store gives
   away that much less. It does not delay a segment that was accepted before: its execution may fail for lack of memory,
   and the trainer then recomputes the segment.
4. The allocator keeps freed blocks, for each stream of its own, so it may hold more than the budget although less is
   allocated. The kept blocks are then given back to the device, which waits for the device's work. That is no part of
   the reserve.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch


class DeviceMemory:
    """The memory of a CUDA device that a worker takes. It takes the place of `ExecutionMemory` there.

    Args:
        device: The CUDA device that programs run on, with its index.
        budget_bytes: The worker's whole memory budget, in bytes.
    """

    def __init__(self, device: torch.device, budget_bytes: int) -> None:
        self._device = device
        self._budget_bytes = budget_bytes
        self._reserve_bytes = 0  # as it was measured last

    def reserve_bytes(self, charged_bytes: int) -> int:
        """Returns the bytes that the store must not give away (Rules 1 and 2). Waits for no work of the device.

        Args:
            charged_bytes: What the store has charged in all, while no run is in progress.
        """
        with suppress(RuntimeError):  # of a device that a kernel has broken. The execution fails with it, and says so
            free_bytes, _ = torch.cuda.mem_get_info(self._device)
            allocated_bytes = torch.cuda.memory_allocated(self._device)
            available_bytes = free_bytes + torch.cuda.memory_reserved(self._device) - allocated_bytes
            left_bytes = self._budget_bytes - charged_bytes
            self._reserve_bytes = max(0, allocated_bytes - charged_bytes, left_bytes - available_bytes)
        return self._reserve_bytes

    def begin(self, charged_bytes: int) -> int:
        """Prepares an execution (Rule 4). Executor's thread only. Returns no limit for `limited`."""
        if torch.cuda.memory_reserved(self._device) > self._budget_bytes:
            with suppress(RuntimeError):  # as above
                torch.cuda.empty_cache()
        return 0

    @contextmanager
    def limited(self, most_bytes: int, threads: int) -> Iterator[None]:
        """Does nothing: torch's allocator has a limit for the whole process."""
        yield

"""Notices what the backward of custom functions has written to sources and outputs, which others use too.

Such a write may be of any kind: by an op, by NumPy, or by a kernel outside torch, which no mode sees. So the contents
before and after the backward are compared, of those sources and outputs in whose memory a function has got, returned or
kept a tensor.
"""

from collections.abc import Collection, Mapping

from torch import Tensor

from backhaul_runtime.tensors.deferred_digest import ContentDigests, Digest, read
from backhaul_runtime.tensors.layout import layout_of, unsupported_reason
from backhaul_runtime.torch_internals.private import DisableTorchDispatch, DisableTorchFunction
from backhaul_runtime.torch_internals.storages import storage_key


class OutsideWrites:
    """Compares the contents of tensors between its construction and `changed`.

    Args:
        tensors: Sources and outputs by number, see `Contribution.source`. They must not be freed meanwhile.
        reach: By the name of each custom function, the keys of the storages in which it has got or kept tensors.
    """

    def __init__(self, tensors: Mapping[int, Tensor], reach: Mapping[str, Collection[int]]) -> None:
        self._contents = ContentDigests()
        self._writers: dict[int, list[str]] = {}
        self._tensors: dict[int, Tensor] = {}
        for number, tensor in tensors.items() if reach else ():
            if unsupported_reason(tensor) is None:
                writers = [name for name, keys in reach.items() if storage_key(tensor) in keys]
                if writers:
                    self._writers[number], self._tensors[number] = writers, tensor
        self._before = self._digests()

    def _digests(self) -> dict[int, Digest]:
        with DisableTorchDispatch(), DisableTorchFunction():
            return {number: self._contents.take(tensor, layout_of(tensor)) for number, tensor in self._tensors.items()}

    def changed(self) -> dict[int, list[str]]:
        """Returns what has changed, by number, with the functions that may have done it. Waits for an accelerator."""
        after = self._digests()
        return {number: self._writers[number] for number in after if read(after[number]) != read(self._before[number])}

"""Which storages a run has seen. Storages are known by address; a weak reference keeps an address from being reused."""

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


def storage_key(tensor: Tensor) -> int:
    """Identifies a tensor's storage for as long as the storage is referenced, weakly or not."""
    key: int = tensor.untyped_storage()._cdata
    return key


class StorageLedger:
    """The storages met so far, without keeping their memory."""

    def __init__(self) -> None:
        self._seen: dict[int, StorageWeakRef] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        return storage_key(tensor) in self._seen

    def add(self, tensor: Tensor) -> int:
        """Notes a tensor's storage and returns its bytes, or 0 where it was there before."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._seen:
            return 0
        self._seen[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return storage.nbytes()

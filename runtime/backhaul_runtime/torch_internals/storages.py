"""Remembers which storages a call or a replay has met, by their addresses; a weak reference prevents their reuse."""

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


def storage_key(tensor: Tensor) -> int:
    """Returns a number that identifies a tensor's storage as long as a strong or weak reference to it exists."""
    key: int = tensor.untyped_storage()._cdata
    return key


def is_only_user(tensor: Tensor) -> bool:
    """Whether no other tensor or array lies in a tensor's storage."""
    storage = tensor.untyped_storage()
    users: int = torch._C._storage_Use_Count(storage._cdata)
    return users <= len((tensor, storage))


class StorageLedger:
    """The storages that a call or a replay has met so far. It does not keep their memory alive."""

    def __init__(self) -> None:
        self._seen: dict[int, StorageWeakRef] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        return storage_key(tensor) in self._seen

    def add(self, tensor: Tensor) -> int:
        """Adds a tensor's storage. Returns its size in bytes, or 0 if the ledger already held it."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._seen:
            return 0
        self._seen[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return storage.nbytes()

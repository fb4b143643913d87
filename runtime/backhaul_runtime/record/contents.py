"""Digests of the contents of tensors, each computed once for as long as the contents can't have changed."""

import weakref
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from backhaul_runtime.errors import UnsupportedTensorError
from backhaul_runtime.tensors.deferred_digest import ContentDigests, Digest, read
from backhaul_runtime.tensors.layout import Layout, layout_of
from backhaul_runtime.torch_internals.private import DisableTorchDispatch, version_of
from backhaul_runtime.torch_internals.storages import storage_key


class FixedDigests:
    """Digests of parameters that must not change for some time. One thread uses it.

    Attributes:
        has_ended: Whether that time is over, so that no more digests may be noted.
    """

    def __init__(self) -> None:
        self.has_ended = False
        # With each a reference to its storage, which prevents that torch uses the storage's address again.
        self._digests: dict[tuple[Any, ...], tuple[Digest, weakref.ref[Tensor], StorageWeakRef]] = {}
        self._keys: dict[int, tuple[Any, ...]] = {}  # of each parameter, by its id

    def get(self, key: tuple[Any, ...]) -> Digest | None:
        """Returns the digest of the contents with this key; None if it is unknown, or if its parameter is gone."""
        known = self._digests.get(key)
        return None if known is None or known[1]() is None else known[0]

    def add(self, parameter: Tensor, key: tuple[Any, ...], digest: Digest) -> None:
        """Notes the digest of a parameter, unless another one with the same memory still lives.

        If the parameter had other memory before, whoever has that now may write to it.
        """
        before = self._keys.get(id(parameter), key)
        if before != key:
            self._digests.pop(before, None)
        self._keys[id(parameter)] = key
        if key not in self._digests or self._digests[key][1]() is None:
            storage = StorageWeakRef(parameter.untyped_storage())  # type: ignore[no-untyped-call]
            self._digests[key] = digest, weakref.ref(parameter), storage

    def changed(self) -> Tensor | None:
        """Returns a parameter that was written to without a new version; None if there is none. Waits for devices.

        Contents that are the same again, and parameters that have other memory now, or none, are not noticed.
        """
        contents, taken = ContentDigests(), list[tuple[Tensor, Digest, Digest]]()
        with DisableTorchDispatch():  # dispatch modes of the user must not see the ops that compute digests
            for key, (digest, reference, _) in self._digests.items():
                parameter = reference()
                if parameter is not None and (present := _present(parameter, key, contents)) is not None:
                    taken.append((parameter, digest, present))
        # All are queued before the first is read, so a device is waited for once.
        return next((parameter for parameter, digest, present in taken if read(digest) != read(present)), None)

    def forget(self) -> None:
        """Forgets all digests, because parameters may change from here on."""
        self._digests.clear()
        self._keys.clear()

    def end(self) -> None:
        """Forgets all digests for good."""
        self.has_ended = True
        self.forget()


def _present(parameter: Tensor, key: tuple[Any, ...], contents: ContentDigests) -> Digest | None:
    """Returns the digest of a parameter's contents now; None if it has other memory than this key, or none."""
    try:
        layout = layout_of(parameter)
    except UnsupportedTensorError:
        return None
    return contents.take(parameter, layout) if contents_key(parameter, layout) == key else None


class Contents:
    """Takes the digests of what tensors contain. Within an op each is computed once for equal memory and version.

    Args:
        fixed: Digests of parameters that do not change during the call; None to compute all digests.
    """

    def __init__(self, fixed: FixedDigests | None) -> None:
        self._fixed = fixed
        self._digests = ContentDigests()
        self._of_this_op: dict[tuple[Any, ...], Digest] = {}

    def digest(self, tensor: Tensor, layout: Layout) -> Digest:
        """Returns the digest of a tensor's contents, as `content_digest` does."""
        key = contents_key(tensor, layout)
        digest = self._of_this_op.get(key)
        if digest is None and self._fixed is not None:
            digest = self._fixed.get(key)
        if digest is None:
            digest = self._of_this_op[key] = self._digests.take(tensor, layout)
        return digest

    def forget(self) -> None:
        """Forgets the digests taken so far, because memory may change from here on without a new version."""
        self._of_this_op.clear()

    def fix(self, tensor: Tensor, layout: Layout, digest: Digest) -> None:
        """Notes the digest of a captured tensor for later calls, if it is a parameter that does not change."""
        if self._fixed is not None and isinstance(tensor, nn.Parameter):
            self._fixed.add(tensor, contents_key(tensor, layout), digest)


def contents_key(tensor: Tensor, layout: Layout) -> tuple[Any, ...]:
    """Returns a key for the bytes of a tensor, not for the view: a weight and its transpose have one digest."""
    start = int(tensor.storage_offset()) * layout.dtype.itemsize
    return storage_key(tensor), start, layout.span_bytes, layout.memory_order, version_of(tensor)

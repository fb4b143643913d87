"""The saved-tensor hooks of a replay: one notes what autograd saves, the other returns it to backward."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from backhaul_runtime.errors import SavedTensorModifiedError
from backhaul_runtime.program.op_rules import (
    hides_write,
)
from backhaul_runtime.program.program import is_function_name
from backhaul_runtime.program.undefined_saves import UNDEFINED_CONTENT, UNDEFINED_PROJECTION
from backhaul_runtime.replay.footprint import FootprintMeter
from backhaul_runtime.tensors.deferred_digest import ContentDigests, Digest, digest_of
from backhaul_runtime.tensors.digest import saved_digest
from backhaul_runtime.tensors.layout import Layout, copy_exact, layout_of
from backhaul_runtime.tensors.random_projection import unread_projections
from backhaul_runtime.torch_internals.private import DisableTorchDispatch, version_of
from backhaul_runtime.torch_internals.storages import storage_key


class VersionedTensor:
    """A saved tensor and its version when it was saved. Torch does not check versions under hooks."""

    __slots__ = ("index", "tensor", "version")

    def __init__(self, index: int, tensor: Tensor) -> None:
        self.index = index
        self.tensor = tensor.detach()  # an output would refer to the node that saves it: a cycle that is never freed
        self.version = version_of(tensor)

    def unpack(self) -> Tensor:
        """Returns the tensor. Raises SavedTensorModifiedError if an op has written to it since it was saved."""
        version = version_of(self.tensor)
        if version != self.version:
            raise SavedTensorModifiedError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"saved tensor {self.index} of shape {list(self.tensor.shape)} is at version {version}, it was "
                f"saved at version {self.version}. Without checkpointing this fails too: use the out-of-place op",
                index=self.index,
            )
        return self.tensor


class SavedTensorPacker:
    """The pack hook of a replay. The graph keeps the hook alive, so the hook must not refer to the graph's owner.

    Args:
        keep_saved: Whether to keep the saved tensors in `tensors`.
        contents: Computes the digests of tensors' contents.
        fixed: Keys of the storages of sources that are not written to; None if no random projections are needed.
        meter: Measures the replay's footprint; None if it is not measured.
        compares_saved: Whether to compute the digests of saved tensors.

    Attributes:
        digests: The digest of each saved tensor, in order, if they are compared; possibly still on an accelerator.
        tensors: The saved tensors, in order; empty unless `keep_saved` is set.
        op: Name of the op that runs. The replay sets it before each op.
        reads: Digest of all tensors that the op reads, for an op of UNDEFINED_SAVES; else None.
        is_undefined: Says which of the tensors that the op saves have undefined bytes; None if none has.
        reads_projection: Measurements of all tensors that the op reads, as for `reads`; else empty.
        of_functions: Keys of the storages of what each custom function has got, returned or kept, by its name.
        wants_projections: Whether random projections of saved tensors are computed.
        projections: The measurements for the random projection of each saved tensor, in order, possibly still on an
            accelerator; empty for a tensor in a `fixed` storage.
    """

    def __init__(
        self,
        keep_saved: bool,
        contents: ContentDigests,
        fixed: Collection[int] | None,
        meter: FootprintMeter | None,
        *,
        compares_saved: bool,
    ) -> None:
        self._keep_saved = keep_saved
        self._compares_saved = compares_saved
        self._count = 0
        self._meter = meter
        self._fixed = fixed or ()
        self.wants_projections = fixed is not None
        self.reads_projection: list[Tensor] = []
        self.projections: list[list[Tensor]] = []
        self.digests: list[Digest] = []
        self._contents = contents
        self.tensors: list[VersionedTensor] = []
        self.op = ""
        self.reads: bytes | None = None
        self.is_undefined: Callable[[Tensor], bool] | None = None
        self.of_functions: defaultdict[str, set[int]] = defaultdict(set)

    def __call__(self, tensor: Tensor) -> VersionedTensor:
        """Notes a tensor that autograd saves while an op runs. Autograd passes the result to the unpack hook."""
        with DisableTorchDispatch():  # modes around the ops must not see the ops that compute digests
            if self._compares_saved:
                layout = layout_of(tensor)
                content, projection = self._content_of(tensor, layout)
                self._note(digest_of(saved_digest, layout, content), projection)
            if hides_write(self.op, tensor):  # the op will change it without a new version
                tensor = copy_exact(tensor)
        if self._meter is not None:
            self._meter.saved(tensor)
        if is_function_name(self.op):
            self.of_functions[self.op].add(storage_key(tensor))
        return self._kept(tensor)

    def begin_op(self, op: str) -> None:
        """Notes which op is about to run; an empty name after the last one."""
        self.op, self.is_undefined, self.reads, self.reads_projection = op, None, None, []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Holds nothing of an op after the ops have run, also if one failed.

        `is_undefined` refers to the op's arguments, which lead to the graph, whose nodes hold this object. The garbage
        collector can't free such a cycle.
        """
        try:
            yield
        finally:
            self.begin_op("")

    def _content_of(self, tensor: Tensor, layout: Layout) -> tuple[Digest, list[Tensor]]:
        """Returns what is compared of a saved tensor's content: its digest, and its measurements if wanted."""
        if self.reads is not None:
            return self.reads, self.reads_projection
        if self.is_undefined is not None and self.is_undefined(tensor):
            return UNDEFINED_CONTENT, [_UNDEFINED_PROJECTION]
        needs_projection = self.wants_projections and storage_key(tensor) not in self._fixed
        return self._contents.take(tensor, layout), unread_projections([tensor]) if needs_projection else []

    def take(self, tensor: Tensor, layout: Layout) -> Digest:
        """Returns the digest of a tensor's contents."""
        return self._contents.take(tensor, layout)

    def forget(self) -> None:
        """Makes later replays compute the digests of all sources again."""
        self._contents.forget()

    def note(self, digest: Digest) -> None:
        """Notes a digest that is compared like that of a saved tensor."""
        if self._compares_saved:
            self._note(digest, [])
        self._kept(_NOTHING)

    def _note(self, digest: Digest, projection: list[Tensor]) -> None:
        self.digests.append(digest)
        if self.wants_projections:
            self.projections.append(projection)

    def _kept(self, tensor: Tensor) -> VersionedTensor:
        saved = VersionedTensor(self._count, tensor)
        self._count += 1
        if self._keep_saved:
            self.tensors.append(saved)
        return saved


_NOTHING = torch.empty(0)
_UNDEFINED_PROJECTION = torch.tensor(UNDEFINED_PROJECTION, dtype=torch.float64)


def unpacking(check: Callable[[], None] | None) -> Callable[[VersionedTensor], Tensor]:
    """Returns the unpack hook, which calls `check` first unless that is None. The graph keeps the hook alive, too."""
    if check is None:
        return VersionedTensor.unpack

    def checked(saved: VersionedTensor) -> Tensor:
        check()
        return saved.unpack()

    return checked

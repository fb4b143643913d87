"""What autograd saves in a replay: the hooks that take it, and give it back to backward."""

from collections.abc import Callable, Collection

from torch import Tensor

from backhaul_runtime.errors import SavedTensorModifiedError
from backhaul_runtime.program.op_rules import (
    hides_write,
)
from backhaul_runtime.replay.footprint import FootprintMeter
from backhaul_runtime.tensors.deferred_digest import ContentDigests, Digest, digest_of
from backhaul_runtime.tensors.digest import saved_digest
from backhaul_runtime.tensors.layout import copy_exact, layout_of
from backhaul_runtime.tensors.random_projection import projections
from backhaul_runtime.torch_internals.private import DisableTorchDispatch, version_of
from backhaul_runtime.torch_internals.storages import storage_key


class VersionedTensor:
    """A tensor that autograd saved, and the version it had then: hooks turn torch's own check off."""

    __slots__ = ("index", "tensor", "version")

    def __init__(self, index: int, tensor: Tensor) -> None:
        self.index = index
        self.tensor = tensor.detach()  # an output would hold the node that saves it, and neither would ever go
        self.version = version_of(tensor)

    def unpack(self) -> Tensor:
        """Gives the tensor. Raises SavedTensorModifiedError if an op wrote to it since."""
        version = version_of(self.tensor)
        if version != self.version:
            raise SavedTensorModifiedError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"saved tensor {self.index} of shape {list(self.tensor.shape)} is at version {version}, "
                f"it was saved at {self.version}. Without checkpointing this fails too: use the out-of-place op",
                index=self.index,
            )
        return self.tensor


class SavedTensorPacker:
    """The hook for what autograd saves. The graph keeps the hook, so it must not refer to the owner of the graph.

    Args:
        keep_saved: Whether to keep the saved tensors.
        contents: Takes the digests of tensors.
        fixed: Storages of sources that are not written to, if random projections are to be taken.
        meter: Told of each tensor.

    Attributes:
        digests: The digest of each tensor saved so far.
        kept: The tensors, if they are to be kept.
        op: The op that runs.
        reads: Digest of all that the op reads, if what it saves may be undefined; else None.
        reads_sketch: Sketch of all that the op reads, if what it saves may be undefined; else empty.
        wants_sketches: Take sketches of what is saved.
        sketches: The random projection of each tensor saved so far; empty for parts of sources that nobody writes to.
    """

    def __init__(
        self, keep_saved: bool, contents: ContentDigests, fixed: Collection[int] | None, meter: FootprintMeter | None
    ) -> None:
        self._keep_saved = keep_saved
        self._meter = meter
        self._fixed = fixed or ()
        self.wants_sketches = fixed is not None
        self.reads_sketch: tuple[float, ...] = ()
        self.sketches: list[tuple[float, ...]] = []
        self.digests: list[Digest] = []
        self._contents = contents
        self.kept: list[VersionedTensor] = []
        self.op = ""
        self.reads: bytes | None = None

    def __call__(self, tensor: Tensor) -> VersionedTensor:
        """Takes a tensor that autograd saves while an op runs."""
        layout = layout_of(tensor)
        with DisableTorchDispatch():  # what we ask of tensors is not the business of modes around the ops
            content = self.reads if self.reads is not None else self._contents.take(tensor, layout)
            self.digests.append(digest_of(saved_digest, layout, content))
            if self.wants_sketches:
                own = () if storage_key(tensor) in self._fixed else projections([tensor])
                self.sketches.append(own if self.reads is None else self.reads_sketch)
            if hides_write(self.op, tensor):
                tensor = copy_exact(tensor, layout)
        if self._meter is not None:
            self._meter.saved(tensor)
        saved = VersionedTensor(len(self.digests) - 1, tensor)
        if self._keep_saved:
            self.kept.append(saved)
        return saved


def unpacking(check: Callable[[], None] | None) -> Callable[[VersionedTensor], Tensor]:
    """The hook that gives backward a saved tensor, after a call of `check`. Like the packer, the graph keeps it."""
    if check is None:
        return VersionedTensor.unpack

    def checked(saved: VersionedTensor) -> Tensor:
        check()
        return saved.unpack()

    return checked

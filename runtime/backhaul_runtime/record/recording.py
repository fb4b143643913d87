"""What a recorded call leaves behind: the tensors it started from, and what is known of those autograd saved."""

from dataclasses import dataclass, field

from torch import Tensor

from backhaul_runtime.tensors.deferred_digest import Digest, read
from backhaul_runtime.tensors.layout import Layout


@dataclass(slots=True, eq=False)
class RecordedSource:
    """A tensor from outside the call, as it was at first use.

    Attributes:
        layout: The layout of the tensor.
        offset: Elements from the start of its storage.
        named: Its `address`, which may still be on an accelerator.
        kept_value: A tensor with these contents: a copy if they may change before backward, else the caller's memory.
            None once the call has ended and the trainer does not keep them.
        is_copy: Whether `kept_value` is a copy, which does not change.
        is_argument: Passed to the call rather than captured by it.
        requires_grad: Whether it took gradients.
        is_leaf: Whether it was a leaf of autograd's graph.
        is_written: An op of the call writes into it.
        written: The caller's own object, kept only if it is captured and written to.
        is_given: No tensor of the caller's but a draw or decision of the call.
    """

    layout: Layout
    offset: int
    named: Digest
    kept_value: Tensor | None
    is_copy: bool
    is_argument: bool
    requires_grad: bool
    is_leaf: bool
    is_written: bool = False
    written: Tensor | None = None
    is_given: bool = False

    @property
    def address(self) -> bytes:
        """Of its contents. Waits for an accelerator, so it is not asked for in forward."""
        return read(self.named)

    @property
    def is_transient(self) -> bool:
        """Whether no later segment will name it: activations are made anew each step, weights and masks may stay."""
        return self.is_given or (self.requires_grad and not self.is_leaf)

    @property
    def value(self) -> Tensor:
        """What is held, where something is."""
        assert self.kept_value is not None
        return self.kept_value


@dataclass(slots=True)
class SavedTensor:
    """What is kept of a tensor that autograd saved. Nobody changes it once it is noted.

    Attributes:
        noted: Its `digest`, which may still be on an accelerator.
        op: Name of the op that saved it.
        layout: When it was saved.
        source: Index of the source whose storage it lies in, -1 for any other.
        offset: Elements from the start of that storage.
        is_undefined: Its bytes may be undefined by design: the digest is of its layout and of all its op read.
        sketch: The random projection of its values, or of what its op read, where a replay may give other values; else
            empty.
    """

    noted: Digest
    op: str
    layout: Layout
    source: int
    offset: int
    is_undefined: bool = False
    sketch: tuple[float, ...] = ()

    @property
    def digest(self) -> bytes:
        """Of its layout and values, or see `is_undefined`; empty for a kind of tensor that has no bytes.

        Waits for an accelerator, so it is not asked for in forward.
        """
        return read(self.noted)


@dataclass(slots=True)
class Recording:
    """What one call left behind.

    Attributes:
        refusal: Why the call can't be a program, or None.
        sources: Everything from outside that ops read or wrote.
        saved: What autograd saved, in order.
        generator_states: One per node that draws.
        has_recorded_choices: Draws and decisions are sources, and saved tensors have sketches.
        unrecorded_choices: Why they cannot all be given to a worker of other hardware; empty where they can.
    """

    refusal: str | None = None
    sources: list[RecordedSource] = field(default_factory=list)
    saved: list[SavedTensor] = field(default_factory=list)
    generator_states: list[bytes] = field(default_factory=list)
    has_recorded_choices: bool = False
    unrecorded_choices: str = ""

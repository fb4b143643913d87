"""The result of recording a call: its sources, and the digests of the tensors that autograd saved."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from backhaul_runtime.errors import Refusal
from backhaul_runtime.program.program import Program
from backhaul_runtime.tensors.deferred_digest import Digest, read
from backhaul_runtime.tensors.layout import Layout

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class RecordedSource:
    """A source of a recorded call, as it was at its first use.

    Attributes:
        layout: The layout of the tensor.
        offset: The tensor's offset in its storage, in elements.
        named: The `address` of its contents, possibly still on an accelerator.
        retained: A detached tensor with the contents: a copy if they may change before backward, else one that shares
            the caller's memory. None once the call has ended and the trainer need not keep it.
        is_copy: Whether `retained` is a copy, which does not change.
        is_argument: Whether the source was passed to the call. Otherwise the function captured it.
        requires_grad: Whether the source required gradients.
        is_leaf: Whether the source was a leaf of autograd's graph, and no view that takes gradients.
        is_written: Whether an op of the call writes to the source.
        written: The caller's own tensor if it is captured and written to, else None.
        is_given: Whether the source is not a tensor of the caller but a recorded choice of the call.
        released: Returns the copy that `release` dropped, as long as an upload or another segment keeps it; else None.
    """

    layout: Layout
    offset: int
    named: Digest
    retained: Tensor | None
    is_copy: bool
    is_argument: bool
    requires_grad: bool
    is_leaf: bool
    is_written: bool = False
    written: Tensor | None = None
    is_given: bool = False
    released: Callable[[], Tensor | None] = lambda: None

    def release(self) -> None:
        """Drops the copy. It can be had again from `released`, whose contents are those of forward."""
        if self.retained is not None:
            self.retained, self.released = None, weakref.ref(self.retained)

    @property
    def address(self) -> bytes:
        """The address of the source. Waits for an accelerator, so forward must not read it."""
        return read(self.named)

    @property
    def is_transient(self) -> bool:
        """Whether no later segment will name the same contents. Activations change in each step, weights may not."""
        return self.is_given or (self.requires_grad and not self.is_leaf)

    @property
    def value(self) -> Tensor:
        """`retained`, for a source that still has one."""
        assert self.retained is not None
        return self.retained


@dataclass(slots=True)
class SavedTensor:
    """The properties of a saved or returned tensor that the trainer keeps. They do not change once the op has run.

    Attributes:
        noted: The `digest`, possibly still on an accelerator.
        op: Name of the op that saved the tensor; for a tensor that the call has returned, empty.
        layout: The layout of the tensor when it was saved.
        source: Index of the source whose storage the tensor lies in, -1 if it lies in no source.
        offset: The tensor's offset in its storage, in elements.
        is_undefined: Whether its bytes may be undefined by design. The digest then covers its layout, and all tensors
            that the op read if the op is one of UNDEFINED_SAVES.
        projection: The random projection of its values; if `is_undefined`, that of the tensors that the op read, or
            zeros. Empty if a replay must give equal bits.
        is_returned: Whether the call has returned the tensor, and autograd has not saved it.
    """

    noted: Digest
    op: str
    layout: Layout
    source: int
    offset: int
    is_undefined: bool = False
    projection: tuple[float, ...] = ()
    is_returned: bool = False

    @property
    def digest(self) -> bytes:
        """The digest of the tensor's layout and values, but see `is_undefined`. Empty for a tensor without bytes.

        It is also empty for a saved tensor if only what the call returns is compared, unless it lies in a source.

        Waits for an accelerator, so forward must not read it.
        """
        return read(self.noted)


@dataclass(slots=True)
class Recording:
    """The result of recording one call.

    Attributes:
        refusal: Why the whole call can't be a program; None if it can.
        failure: The unexpected exception behind the refusal, without its traceback; None if there was none.
        sources: The tensors from outside that ops read or wrote, and recorded choices, in the order of first use.
        saved: The tensors that autograd saved, in order. Whoever makes the recording adds them.
        returned: The outputs of the program, once the call has ended, if only these are compared with a recomputation.
            None if the saved tensors are.
        is_unseen: Whether the call has not run on the trainer, so that there is nothing to compare.
        generator_states: The generator state before each node that draws.
        continuing: Positions of those states that are the state which the draw before has left.
        has_recorded_choices: Whether draws and decisions are sources, and saved tensors have random projections.
        identities: The identity of each custom autograd function of the call, by name, as it was in forward.
        computes_on_host: Whether an op has returned a tensor on the CPU.
        accelerators: The CUDA devices of the sources and of what ops returned, in the order of first use.
        unrecorded_choices: Why a draw or decision can't be sent to a worker with other hardware; empty if all can.
    """

    refusal: str | None = None
    failure: Exception | None = None
    sources: list[RecordedSource] = field(default_factory=list)
    saved: Sequence[SavedTensor] = ()
    returned: list[SavedTensor] | None = None
    is_unseen: bool = False
    generator_states: list[bytes] = field(default_factory=list)
    continuing: set[int] = field(default_factory=set)
    has_recorded_choices: bool = False
    unrecorded_choices: str = ""
    computes_on_host: bool = False
    accelerators: dict[torch.device, None] = field(default_factory=dict)
    identities: dict[str, str] = field(default_factory=dict)

    def compared(self, program: Program) -> Sequence[SavedTensor]:
        """Returns the tensors that a run of the call's program, or of its beginning, must compute with equal bits."""
        if self.returned is not None:
            return self.returned[: len(program.outputs)]
        return self.saved[: program.saved_count]

    def refuse(self, reason: str) -> None:
        """Sets the reason why the call can't be a program. If one is set already, it stays."""
        if self.refusal is None:
            self.refusal = reason

    def guarded(self, step: Callable[..., T], *args: Any) -> T | None:
        """Returns the result of a step of recording, or None if it failed, after setting the refusal.

        No exception of recording reaches the call: NOTE [What the recorder relies on], Rule 2.
        """
        try:
            return step(*args)
        except Exception as error:  # no variable may refer to it: its traceback refers to the variables
            self._fail(Refusal.of(error))
            return None

    def _fail(self, refusal: Refusal) -> None:
        if self.refusal is None:
            self.refusal, self.failure = refusal.reason, refusal.cause

    @property
    def retained_bytes(self) -> int:
        """The bytes of sources that the trainer keeps for backward, without leaves, which it has anyway."""
        layouts = [source.layout for source in self.sources if not source.is_leaf and source.retained is not None]
        return sum([layout.span_bytes for layout in layouts])

    @property
    def states_to_send(self) -> list[bytes]:
        """The `generator_states`, with empty bytes for those that a replay reaches by itself."""
        return [b"" if number in self.continuing else state for number, state in enumerate(self.generator_states)]

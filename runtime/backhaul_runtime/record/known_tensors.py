"""The tensors that a program can refer to: its sources, and the results of its nodes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backhaul_runtime.errors import Refusal, UnsupportedTensorError
from backhaul_runtime.program.program import Ref, ResultRef, SourceRef
from backhaul_runtime.record.ambient_states import AmbientStates
from backhaul_runtime.record.call_memory import CallMemory
from backhaul_runtime.record.program_builder import ProgramBuilder
from backhaul_runtime.record.recording import Recording
from backhaul_runtime.tensors.deferred_digest import digest_of
from backhaul_runtime.tensors.digest import tensor_address
from backhaul_runtime.tensors.layout import layout_of
from backhaul_runtime.torch_internals.autocast_cache import CASTS, STALE_CAST, has_cast_of_other_dtype
from backhaul_runtime.torch_internals.graph_uses import is_custom, is_module_hook, name_of
from backhaul_runtime.torch_internals.private import (
    WeakTensorRef,
    base_of,
    identity_of,
    next_sequence_number,
    sequence_number,
)


@dataclass(slots=True)
class _Known:
    """A tensor that an op took or returned, with its properties then. A change that no op made is refused."""

    ref: Ref
    impl: WeakTensorRef  # NOTE [What the recorder relies on], Rule 1
    data_ptr: int
    requires_grad: bool
    has_no_history: bool  # a view made under no_grad: it requires a gradient but has no node


class KnownTensors:
    """The tensors that the ops of a call have taken or returned. It keeps none of them alive but the sources.

    Args:
        recording: Says whether ops have returned tensors on the CPU.
        memory: Gets tensors from outside as sources at their first use, and takes their digests at that time.
        states: The ambient states that nodes run under.
        builder: The nodes that were recorded so far.

    Attributes:
        first_sequence: The number of the first autograd node that the call makes.
        function_nodes: The classes of the autograd nodes that recorded custom functions have made.
        refused_nodes: Why other custom functions are not recorded, by the class of their nodes.
    """

    def __init__(
        self,
        recording: Recording,
        memory: CallMemory,
        states: AmbientStates,
        builder: ProgramBuilder,
    ) -> None:
        self.first_sequence = next_sequence_number()
        self.function_nodes: set[type] = set()
        self.refused_nodes: dict[type, str] = {}
        self._recording = recording
        self._memory = memory
        self._states = states
        self._builder = builder
        self._known: dict[int, _Known] = {}

    def ref_of(self, tensor: Tensor) -> Ref | None:
        """Returns the reference to a tensor, or None for a tensor that no recorded op took or returned."""
        known = self._known.get(identity_of(tensor))
        return None if known is None else known.ref

    def refs_of(self, tensors: Iterable[Tensor]) -> tuple[Ref, ...]:
        """Returns the references to those of these tensors that a recorded op took or returned."""
        return tuple([ref for tensor in tensors if (ref := self.ref_of(tensor)) is not None])

    def use(self, tensor: Tensor, *, is_part: bool = False) -> Ref:
        """Returns the reference to a tensor that an op is about to use. An unknown one becomes a source.

        Args:
            tensor: The argument of the op.
            is_part: Whether the tensor is a part of an object, see `SourceLedger.add`.

        Raises:
            Refusal: The tensor has changed in a way that no recorded op explains, or can't be a source.
        """
        known = self._known.get(identity_of(tensor))
        if known is None:
            return self.add_source(tensor, is_part=is_part)
        # The reference leads a replay to the result of the op that made the tensor, which is no longer its memory.
        if known.data_ptr != tensor.data_ptr():
            raise Refusal("the memory of a tensor was replaced inside the function (.data =, resize_, set_)")
        if known.requires_grad != tensor.requires_grad or known.has_no_history:
            self._check_history(tensor, known)
        if isinstance(known.ref, SourceRef) and has_cast_of_other_dtype(tensor, self.first_sequence):
            raise Refusal(STALE_CAST)
        return known.ref

    def _check_history(self, tensor: Tensor, known: _Known) -> None:
        node = tensor.grad_fn
        # Only a write by an op gives a tensor a history. Otherwise the function has changed the flag itself, which no
        # op shows to a replay.
        if known.requires_grad != tensor.requires_grad and (known.requires_grad or node is None):
            if known.requires_grad or not isinstance(known.ref, ResultRef):
                raise Refusal("requires_grad of a tensor from outside was changed, or turned off, inside the function")
            # The function made a leaf, and no op before this one can have seen it as one.
            self._builder.add_leaf(known.ref)
            known.requires_grad, known.has_no_history = True, False
        if node is None:
            return
        made = self._builder.nodes[known.ref.node] if isinstance(known.ref, ResultRef) else None
        if is_module_hook(node) and made is not None and made.op == "aten.view_as.default":
            # The function passes on what it gets, by a `view_as` that was recorded without gradients. Its hooks run on
            # the trainer, as `decide` keeps the graph of a custom function.
            made.ambient = self._states.with_grad(made.ambient)
        elif is_custom(node) and type(node) not in self.function_nodes:
            what = f"the custom autograd function {name_of(node).removesuffix('Backward')}"
            raise Refusal(self.refused_nodes.get(type(node), what))
        # An op wrote a differentiable value to a view of the tensor, which gave the tensor a history.
        known.requires_grad, known.has_no_history = True, False

    def add_source(self, tensor: Tensor, *, is_part: bool = False) -> SourceRef:
        """Makes a tensor from outside a source, before an op uses or overwrites it. The arguments are those of `use`.

        Raises:
            Refusal: No replay can be given the tensor.
        """
        try:
            layout = layout_of(tensor)
        except UnsupportedTensorError as error:
            raise Refusal(error.fields["reason"]) from None
        # A replay would give such a tensor the contents that it has now, and lose its connection to the op's result.
        if tensor in self._memory.interior:
            raise Refusal("an alias of an interior tensor that no op made (.data, NumPy)")
        is_argument = self._memory.sources.is_argument(tensor)
        # Each thread numbers its nodes itself, so an argument made by another thread may have a larger number.
        made = None if tensor.is_leaf or is_argument else tensor.grad_fn
        if made is not None and sequence_number(made) >= self.first_sequence:
            raise Refusal(f"a differentiable tensor that no recorded op made ({name_of(made)})")
        content = self._memory.contents.digest(tensor, layout)
        if not is_argument:
            self._memory.contents.fix(tensor, layout, content)
        address = digest_of(tensor_address, layout, content)
        if CASTS.has_stale_cast(tensor, address):
            raise Refusal(STALE_CAST)
        index = self._memory.sources.alias_of(tensor, layout, address)
        if index is None:
            index = self._memory.sources.add(tensor, layout, address, is_part=is_part)
        ref = SourceRef(index)
        self._add(tensor, ref)
        return ref

    def add_results(self, results: Sequence[Tensor], written: Iterable[Tensor] = ()) -> None:
        """Notes what an op has returned, and the tensors that it wrote to, before its node is added."""
        for output, result in enumerate(results):
            if result.is_cpu:
                self._recording.computes_on_host = True
            known = self._known.get(identity_of(result))
            self._add(result, ResultRef(len(self._builder.nodes), output) if known is None else known.ref)
        for tensor in written:
            self._add(tensor, self._known[identity_of(tensor)].ref)

    def _add(self, tensor: Tensor, ref: Ref) -> None:
        requires_grad = tensor.requires_grad
        if tensor.is_cuda:
            self._states.uses_cuda = True
            self._recording.accelerators[tensor.device] = None
        has_no_history = requires_grad and not torch.is_grad_enabled() and isinstance(ref, ResultRef)
        self._known[identity_of(tensor)] = _Known(
            ref, WeakTensorRef(tensor), tensor.data_ptr(), requires_grad, has_no_history
        )

    def passes_through(self, tensor: Tensor) -> bool:
        """Whether a tensor that the call returned is an argument or a captured tensor with an unchanged history."""
        ref = self.ref_of(tensor)
        if ref is None:
            return self._memory.sources.is_argument(tensor)
        return isinstance(ref, SourceRef) and not self._memory.sources.is_rewritten(ref.index)

    def outlived(self, outputs: Sequence[Tensor], is_expected: Callable[[int], bool]) -> bool:
        """Whether a differentiable result that is no output is still referenced, see `CustomFunctions.outlived`.

        Args:
            outputs: The outputs of the call.
            is_expected: Whether all references to a tensor, given by its identity, are such that do not count.
        """
        expected = {identity_of(t) for output in outputs for t in (output, base_of(output)) if t is not None}
        return any(
            isinstance(known.ref, ResultRef)
            and known.requires_grad
            and not known.impl.expired()
            and not is_expected(cdata)
            for cdata, known in self._known.items()
            if cdata not in expected
        )

"""Records random draws and decisions of forward, and makes a replay on other hardware use them.

NOTE [Recorded choices]
1. A generator state gives other numbers on other hardware. So the drawn numbers themselves are sent; zeros and ones are
   sent as bits. Draws are recorded below autograd, where each draw is an op of its own, even inside dropout or an LSTM.
2. A decision is an integer or boolean result that an op computes from floating-point values: a chosen expert, an order,
   a mask, a count of hits. Rounding could change it. Decisions are recorded whether the op returns them or only saves
   them for backward.
3. A replay overwrites draws and decisions below autograd, before autograd saves them, so that its backward uses the
   recorded ones. Values that an op returns with its decision (`topk`, `max`, pooling) are gathered again by it.
"""

from collections import deque
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor

from backhaul_runtime.errors import ProgramError, Refusal, ReplayError
from backhaul_runtime.program.op_rules import DECIDE_IN_BACKWARD, GEOMETRY, OpRules, argument, rules, tensors_in
from backhaul_runtime.program.undefined_saves import UNDEFINED_PROJECTION, UNDEFINED_SAVES
from backhaul_runtime.tensors.layout import copy_exact
from backhaul_runtime.tensors.random_projection import projections
from backhaul_runtime.torch_internals.dispatch_mode import DispatchMode
from backhaul_runtime.torch_internals.private import OpOverload, op_name
from backhaul_runtime.torch_internals.storages import storage_key

DRAWN_RESULTS = frozenset(
    {
        *("bernoulli", "bernoulli_", "binomial", "cauchy_", "exponential_", "geometric_", "log_normal_"),
        *("multinomial", "normal", "normal_", "poisson", "rand", "rand_like", "randint", "randint_like", "randn"),
        *("randn_like", "random", "random_", "randperm", "uniform", "uniform_", "_standard_gamma"),
        "_sample_dirichlet",
    }
)
"""Ops below autograd whose results are the drawn numbers."""

_BY_DIM = frozenset({"topk", "sort", "max", "min", "kthvalue", "mode", "median", "nanmedian", "cummax", "cummin"})
_POOLS = {
    "max_pool2d_with_indices": 2,
    "max_pool3d_with_indices": 3,
    "adaptive_max_pool2d": 2,
    "adaptive_max_pool3d": 3,
}
GATHERED = _BY_DIM | _POOLS.keys()
"""Ops below autograd that return values and the indices that the values were taken from."""


def decides(tensor: Tensor) -> bool:
    """Whether a tensor's dtype is that of a decision, integer or boolean, rather than floating-point or complex."""
    return not tensor.is_floating_point() and not tensor.is_complex()


def pack_bits(tensor: Tensor) -> Tensor:
    """Packs n zeros and ones of any dtype to uint8 [ceil(n / 8)], in logical order, on the same device."""
    flat = (tensor != 0).flatten().to(torch.uint8)
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=tensor.device)).sum(1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, elements: int, like: Tensor) -> Tensor:
    """Unpacks what `pack_bits` packed, on the same device.

    Args:
        bits: The packed bits, uint8 [ceil(elements / 8)].
        elements: The number of zeros and ones.
        like: A tensor with the shape and the dtype of the result.

    Raises:
        ReplayError: The bits, `elements` and `like` do not fit each other.
    """
    if elements != like.numel() or bits.dtype is not torch.uint8 or bits.numel() != -(-elements // 8):
        raise ReplayError(
            f"a recorded choice has {elements} elements in {bits.numel()} bytes, the op has {like.numel()} elements"
        )
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    flat = (bits.flatten().unsqueeze(1) >> shifts) & 1
    return flat.flatten()[: like.numel()].view(like.shape).to(like.dtype)


def is_binary(tensor: Tensor) -> bool:
    """Whether a tensor holds only zeros and ones. False for integers, whose shape may be the decision, and if empty."""
    if not tensor.numel() or (decides(tensor) and tensor.dtype is not torch.bool):
        return False
    return tensor.dtype is torch.bool or bool(((tensor == 0) | (tensor == 1)).all())


def _drawn(op: OpOverload, args: Any, kwargs: Any, returned: Any) -> list[Tensor]:
    """Returns the draws of an op below autograd. Raises Refusal if its results do not contain them."""
    base = _base(op)
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return []
    if base == "native_dropout":
        return [returned[1]]
    if base in DRAWN_RESULTS:
        return tensors_in(returned)
    if argument(op, "dropout_p", args, kwargs) == 0:  # fused attention
        return []
    raise Refusal(f"the draws of {op} can't be sent to a worker with other hardware")


def _base(op: OpOverload) -> str:
    return op_name(op).partition("::")[2]


class DrawRecorder(DispatchMode):
    """Records what an op draws. Enter it around one op.

    Attributes:
        drawn: Copies of the drawn tensors, in order.
        refusal: The refusal of an op whose draws cannot be derived from its results; None if there was no such op.
    """

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []
        self.refusal: Refusal | None = None

    def __torch_dispatch__(self, op: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an op and copies the tensors that it drew."""
        kwargs = kwargs or {}
        returned = op(*args, **kwargs)
        try:
            self.drawn += [tensor.clone() for tensor in _drawn(op, args, kwargs, returned)]
        except Exception as error:  # raising here would break the user's forward; the caller reads `refusal`
            self.refusal = Refusal.of(error)
        return returned


class ChoiceRecorder:
    """Records the decisions of ops for a replay on other hardware. The recorder calls it before and after each op."""

    def __init__(self) -> None:
        self._hidden: list[Tensor] = []  # decisions that autograd saves and the op may not return
        self._undefined = UNDEFINED_PROJECTION

    def begin(self, op_rules: OpRules, read: Sequence[Tensor]) -> None:
        """Prepares for an op. Called before the op runs.

        Args:
            op_rules: The rules of the op.
            read: The tensors among the op's arguments.

        Raises:
            Refusal: The op's backward makes a decision that cannot be recorded.
        """
        self._hidden.clear()
        self._undefined = projections(read) if op_rules.name in UNDEFINED_SAVES else UNDEFINED_PROJECTION
        if op_rules.name in DECIDE_IN_BACKWARD and any(tensor.requires_grad for tensor in read):
            raise Refusal(f"the backward of {op_rules.name} compares numbers that other hardware rounds differently")

    def saved(self, tensor: Tensor, *, is_hidden: bool, is_undefined: bool, is_fixed: bool) -> tuple[float, ...]:
        """Returns the random projection of a tensor that autograd saves; empty if a replay must give equal bits.

        Args:
            tensor: The tensor, saved by the op that runs at present.
            is_hidden: Whether its storage belongs to no source and to no result of an op.
            is_undefined: Whether its bytes are undefined. For an op of UNDEFINED_SAVES its arguments are projected
                instead.
            is_fixed: Whether it is part of a source that is not written to, so that its bits are equal everywhere.
        """
        if is_undefined:
            return self._undefined
        if is_hidden and decides(tensor):
            self._hidden.append(tensor.detach())
        return () if is_fixed else projections([tensor])

    def noted(
        self, op: OpOverload, read: Sequence[Tensor], results: Sequence[Tensor], draws: DrawRecorder | None
    ) -> list[Tensor]:
        """Returns the draws and decisions of an op that has just run, in the order in which a replay needs them.

        Args:
            op: The op that has just run.
            read: The tensors among its arguments.
            results: The tensors that it returned.
            draws: The recorder of its draws, None for an op that does not draw.

        Raises:
            Refusal: The draws or decisions cannot be derived from the op's results.
        """
        if draws is not None:
            if draws.refusal is not None:
                raise draws.refusal
            return draws.drawn
        if not rules(op).reads_values or all(map(decides, read)):  # it does not depend on floating-point values
            return []
        if rules(op).name in GEOMETRY:  # its integers follow from those that the recorder sends
            return []
        inputs = {storage_key(tensor) for tensor in read if not tensor.is_sparse}
        decided = [result for result in results if decides(result) and storage_key(result) not in inputs]
        visible = {storage_key(result) for result in decided}
        decided += [tensor for tensor in self._hidden if storage_key(tensor) not in visible]
        # The op also returns values that follow from its decision, and only those of GATHERED can be computed again.
        if visible and len(decided) < len(results) and _base(op) not in GATHERED:
            raise Refusal(f"the decisions of {op} can't be sent to a worker with other hardware")
        return decided


class ChoiceReplay(DispatchMode):
    """Makes one op of a replay use recorded draws and decisions (Rule 3). Enter it around the op, then call `decided`.

    Args:
        given: The recorded choices in order, each with its number of elements if it is packed, else 0.
        lent: Keys of storages that must not be written to: see NOTE [Lent memory] in `replay`.

    Raises:
        ReplayError: The op draws or decides more often than recorded, or with another shape or dtype.
        ProgramError: The tensor that a choice would overwrite lies in lent memory.
    """

    def __init__(self, given: Sequence[tuple[Tensor, int]], lent: Container[int]) -> None:
        super().__init__()
        self._left = deque(given)
        self._lent = lent

    def __torch_dispatch__(self, op: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an op and overwrites its draws, or its decision with the values that depend on it."""
        kwargs = kwargs or {}
        returned = op(*args, **kwargs)
        base = _base(op)
        for tensor in _drawn(op, args, kwargs, returned):
            self._overwrite(tensor)
        if base == "native_dropout":
            scale = 1 / (1 - args[1]) if args[1] < 1 else 0.0
            self._write(returned[0], args[0] * returned[1] * scale)
        elif base in GATHERED and isinstance(returned, tuple) and self._left:
            values, places = returned[0], returned[1]
            self._overwrite(places)
            self._write(values, _gathered(op, args, kwargs, values, places))
        return returned

    def _overwrite(self, tensor: Tensor) -> None:
        if not self._left:
            raise ReplayError("an op draws or decides more often on replay than it did when it was recorded")
        given, elements = self._left.popleft()
        value = unpack_bits(given, elements, tensor) if elements else given
        if value.shape != tensor.shape or value.dtype is not tensor.dtype:
            raise ReplayError(
                f"{value.dtype} {list(value.shape)} was drawn or decided by an op when it was recorded, "
                f"{tensor.dtype} {list(tensor.shape)} on replay"
            )
        self._write(tensor, value)

    def _write(self, tensor: Tensor, value: Tensor) -> None:
        if storage_key(tensor) in self._lent:
            raise ProgramError("a recorded draw or decision would overwrite a view of a source, which must not change")
        tensor.copy_(value)

    def decided(self, results: list[Tensor]) -> list[Tensor]:
        """Returns the results of the op, which has run. If all results are decisions, they are overwritten or replaced.

        Raises:
            ReplayError: The op did not use all recorded choices.
        """
        if self._left and all(map(decides, results)):
            results = [self._in_place_of(result) for result in results]
        if self._left:
            raise ReplayError(f"{len(self._left)} recorded draws or decisions of an op were not used on replay")
        return results

    def _in_place_of(self, result: Tensor) -> Tensor:
        if self._left and self._left[0][0].shape != result.shape and not self._left[0][1]:
            # The shape itself is the decision, as in `nonzero`: the result can't be overwritten.
            return copy_exact(self._left.popleft()[0])
        self._overwrite(result.data)  # without a new version: no other op has seen the result yet
        return result


def _gathered(op: OpOverload, args: Any, kwargs: Any, values: Tensor, places: Tensor) -> Tensor:
    """Returns the values of an op's input at given indices. Raises RuntimeError, as `gather` does, for invalid ones."""
    operand: Tensor = args[0]
    if (spatial := _POOLS.get(_base(op))) is not None:
        return operand.flatten(-spatial).gather(-1, places.flatten(-spatial)).view_as(values)
    if operand.dim() == 0:
        return operand
    dim = argument(op, "dim", args, kwargs)
    if places.dim() < operand.dim():
        return operand.gather(dim, places.unsqueeze(dim)).squeeze(dim)
    return operand.gather(dim, places)

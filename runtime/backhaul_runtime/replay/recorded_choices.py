"""What a replay on other hardware is given instead of computing it: random draws and decisions.

NOTE [Recorded choices]
1. One generator state gives other numbers on other hardware, so the numbers themselves travel; zeros and ones as bits.
   Draws are noted below autograd, where each is an op of its own also inside dropout or an LSTM.
2. A decision is an integer or boolean result that an op takes from floating-point values: a chosen expert, an order,
   a mask, a count of hits. Rounding could turn it. Noted are those that ops return, and those that only autograd saves.
3. A replay overwrites both below autograd, before autograd saves them, so that a backward follows the same choices.
   Values that come with a choice (`topk`, `max`, pooling) are gathered by it again.
"""

from collections import deque
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor

from backhaul_runtime.errors import ProgramError, Refusal, ReplayError
from backhaul_runtime.program.op_rules import DECIDE_IN_BACKWARD, UNDEFINED_SAVES, OpRules, rules, tensors_in
from backhaul_runtime.tensors.layout import copy_exact
from backhaul_runtime.tensors.random_projection import projections
from backhaul_runtime.torch_internals.dispatch_mode import DispatchMode
from backhaul_runtime.torch_internals.private import OpOverload, arguments_of, op_name
from backhaul_runtime.torch_internals.storages import storage_key

DRAWN_RESULTS = frozenset(
    {
        *("bernoulli", "bernoulli_", "binomial", "cauchy_", "exponential_", "geometric_", "log_normal_"),
        *("multinomial", "normal", "normal_", "poisson", "rand", "rand_like", "randint", "randint_like", "randn"),
        *("randn_like", "random", "random_", "randperm", "uniform", "uniform_", "_standard_gamma"),
        "_sample_dirichlet",
    }
)
"""Ops below autograd whose results are their draws."""

_BY_DIM = frozenset({"topk", "sort", "max", "min", "kthvalue", "mode", "median", "nanmedian", "cummax", "cummin"})
_POOLS = {
    "max_pool2d_with_indices": 2,
    "max_pool3d_with_indices": 3,
    "adaptive_max_pool2d": 2,
    "adaptive_max_pool3d": 3,
}
GATHERED = _BY_DIM | _POOLS.keys()
"""Ops below autograd that return values and the places they were taken from."""


def decides(tensor: Tensor) -> bool:
    """Whether a tensor's dtype is one of choices rather than of numbers."""
    return not tensor.is_floating_point() and not tensor.is_complex()


def pack_bits(tensor: Tensor) -> Tensor:
    """Zeros and ones of any dtype as uint8 [ceil(n / 8)], in logical order, on the same device."""
    flat = (tensor != 0).flatten().to(torch.uint8)
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=tensor.device)).sum(1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, elements: int, like: Tensor) -> Tensor:
    """What `pack_bits` packed, in the shape and dtype of another tensor. Raises ReplayError where it doesn't fit."""
    if elements != like.numel() or bits.dtype is not torch.uint8 or bits.numel() != -(-elements // 8):
        raise ReplayError(f"{elements} elements in {bits.numel()} bytes of bits are given for {like.numel()}")
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    flat = (bits.flatten().unsqueeze(1) >> shifts) & 1
    return flat.flatten()[: like.numel()].view(like.shape).to(like.dtype)


def is_binary(tensor: Tensor) -> bool:
    """Whether a tensor is one of many zeros and ones. Not of integers: how many there are may be the decision."""
    if not tensor.numel() or (decides(tensor) and tensor.dtype is not torch.bool):
        return False
    return tensor.dtype is torch.bool or bool(((tensor == 0) | (tensor == 1)).all())


def _drawn(op: OpOverload, args: Any, kwargs: Any, returned: Any) -> list[Tensor]:
    """The draws of an op below autograd. Raises Refusal where they can't be told from its results."""
    base = _base(op)
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return []
    if base == "native_dropout":
        return [returned[1]]
    if base in DRAWN_RESULTS:
        return tensors_in(returned)
    if _argument(op, "dropout_p", args, kwargs) == 0:  # fused attention
        return []
    raise Refusal(f"the draws of {op} can't be told to a worker of other hardware")


def _base(op: OpOverload) -> str:
    return op_name(op).partition("::")[2]


class DrawRecorder(DispatchMode):
    """Enter it around one op to learn what it draws.

    Attributes:
        drawn: Copies of the drawn tensors, in order.
        refusal: The refusal of an op whose draws cannot be derived from its results; None if there was no such op.
    """

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []
        self.refusal: Refusal | None = None

    def __torch_dispatch__(self, op: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an op and copies what it drew."""
        kwargs = kwargs or {}
        returned = op(*args, **kwargs)
        try:
            self.drawn += [tensor.clone() for tensor in _drawn(op, args, kwargs, returned)]
        except Exception as error:  # it runs in the user's own forward
            self.refusal = Refusal.of(error)
        return returned


class ChoiceRecorder:
    """What a recorder notes of each op for a replay on other hardware. Called around ops, in order."""

    def __init__(self) -> None:
        self._hidden: list[Tensor] = []  # decisions that autograd saves and the op may not return
        self._reads: tuple[float, ...] = ()

    def begin(self, op_rules: OpRules, read: Sequence[Tensor]) -> None:
        """Before an op that reads these tensors.

        Raises:
            Refusal: Its backward decides something that can't be given to a replay.
        """
        self._hidden.clear()
        self._reads = projections(read) if op_rules.name in UNDEFINED_SAVES else ()
        if op_rules.name in DECIDE_IN_BACKWARD and any(tensor.requires_grad for tensor in read):
            raise Refusal(f"the backward of {op_rules.name} compares numbers that other hardware rounds otherwise")

    def saved(self, tensor: Tensor, *, is_hidden: bool, is_undefined: bool, is_fixed: bool) -> tuple[float, ...]:
        """The sketch of a tensor that autograd saves, empty where it has to be equal to the bit.

        Args:
            tensor: Saved by the op that runs.
            is_hidden: In memory of its own.
            is_undefined: Whether its bytes are undefined, so that the op's arguments are compared instead.
            is_fixed: Whether it is part of a source that is not written to.
        """
        if is_undefined:
            return self._reads
        if is_hidden and decides(tensor):
            self._hidden.append(tensor.detach())
        return () if is_fixed else projections([tensor])

    def noted(
        self, op: OpOverload, read: Sequence[Tensor], results: Sequence[Tensor], draws: DrawRecorder | None
    ) -> list[Tensor]:
        """Draws and decisions of an op that has run, in order.

        Raises:
            Refusal: They can't be told from what is known of it.
        """
        if draws is not None:
            if draws.refusal is not None:
                raise draws.refusal
            return draws.drawn
        if not rules(op).reads_values or all(map(decides, read)):
            return []
        inputs = {storage_key(tensor) for tensor in read if not tensor.is_sparse}
        decided = [result for result in results if decides(result) and storage_key(result) not in inputs]
        visible = {storage_key(result) for result in decided}
        decided += [tensor for tensor in self._hidden if storage_key(tensor) not in visible]
        if visible and len(decided) < len(results) and _base(op) not in GATHERED:
            raise Refusal(f"what {op} decides can't be told to a worker of other hardware")
        return decided


class ChoiceReplay(DispatchMode):
    """Enter it around one op of a replay to give it draws and decisions (Rule 3).

    Args:
        given: In the order they were noted, with the number of elements where they are packed, else 0.
        lent: Keys of storages that must not be written to: see NOTE [Lent memory] in `replay`.

    Raises:
        ReplayError: When it is left while some were not asked for, or by an op that asks for more.
        ProgramError: What would be overwritten is lent.
    """

    def __init__(self, given: Sequence[tuple[Tensor, int]], lent: Container[int]) -> None:
        super().__init__()
        self._left = deque(given)
        self._lent = lent

    def __torch_dispatch__(self, op: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an op and overwrites what it drew or decided."""
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
            raise ReplayError("an op draws or decides more often on replay than when it was recorded")
        given, elements = self._left.popleft()
        value = unpack_bits(given, elements, tensor) if elements else given
        if value.shape != tensor.shape or value.dtype is not tensor.dtype:
            raise ReplayError(
                f"{value.dtype} {list(value.shape)} was drawn or decided when an op was recorded, on replay "
                f"{tensor.dtype} {list(tensor.shape)}"
            )
        self._write(tensor, value)

    def _write(self, tensor: Tensor, value: Tensor) -> None:
        if storage_key(tensor) in self._lent:
            raise ProgramError("a draw or a decision is given for a view of a source")
        tensor.copy_(value)

    def decided(self, results: list[Tensor]) -> list[Tensor]:
        """The op's results, overwritten or replaced where the op only decides. Raises ReplayError if any is left."""
        if self._left and all(map(decides, results)):
            results = [self._in_place_of(result) for result in results]
        if self._left:
            raise ReplayError(f"{len(self._left)} draws or decisions of an op were not asked for on replay")
        return results

    def _in_place_of(self, result: Tensor) -> Tensor:
        if self._left and self._left[0][0].shape != result.shape and not self._left[0][1]:
            return copy_exact(self._left.popleft()[0])  # a count of hits, which decides a shape
        self._overwrite(result.data)  # past the version counter: no other op has seen the result yet
        return result


def _gathered(op: OpOverload, args: Any, kwargs: Any, values: Tensor, places: Tensor) -> Tensor:
    """The values at given places of an op's input. Raises as `gather` does for places outside."""
    source: Tensor = args[0]
    if (spatial := _POOLS.get(_base(op))) is not None:
        return source.flatten(-spatial).gather(-1, places.flatten(-spatial)).view_as(values)
    if source.dim() == 0:
        return source
    dim = _argument(op, "dim", args, kwargs)
    if places.dim() < source.dim():
        return source.gather(dim, places.unsqueeze(dim)).squeeze(dim)
    return source.gather(dim, places)


def _argument(op: OpOverload, name: str, args: Any, kwargs: Any) -> Any:
    for position, argument in enumerate(arguments_of(op)):
        if argument.name == name:
            return args[position] if position < len(args) else kwargs.get(name, argument.default_value)
    return None

"""The tensors that an op saves for backward without writing all of their bytes.

Two runs of such an op save other bytes, so a comparison of them would say that the recomputation went wrong. In most of
these ops the tensor can be told from the others by its dtype and size. The digest of that tensor then covers its layout
only, and all other tensors are compared as usual. This hides no wrong gradient: backward either does not read these
bytes, or reads only those that the kernel has written, which follow from tensors that are compared.

The conditions come from torch's sources for CUDA and the CPU. `make gpu-check` looks for other ops.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from backhaul_runtime.program.op_rules import argument, rules
from backhaul_runtime.tensors.random_projection import SIZE
from backhaul_runtime.torch_internals.private import OpOverload
from backhaul_runtime.torch_internals.storages import storage_key

UNDEFINED_SAVES = frozenset(
    {
        "aten.ctc_loss.IntList",
        "aten.ctc_loss.Tensor",
        "aten.rrelu.default",
        "aten.rrelu_.default",
        "aten.rrelu_with_noise.default",
    }
)
"""Ops that write only parts of floating tensors which they save: CTC loss the table of its paths up to each length, and
RReLU the noise where the input is negative. The value check compares what such an op reads, not what it saves."""

RECURRENT = frozenset(
    f"aten.{layer}.{form}" for layer in ("lstm", "gru", "rnn_tanh", "rnn_relu") for form in ("input", "data")
)
"""Recurrent networks of several layers."""

UNDEFINED_CONTENT = bytes(16)
"""Stands for the digest of a tensor's content where the content is undefined."""

UNDEFINED_PROJECTION = (0.0,) * SIZE
"""Stands for the random projection of a tensor whose content is undefined."""


_PHILOX_NUMBERS = 2


def _is_philox(tensor: Tensor) -> bool:
    """Whether it is a seed, an offset, or both, which are the only integers that attention saves."""
    return tensor.numel() <= _PHILOX_NUMBERS and tensor.dtype in (torch.int64, torch.uint64)


def _unused_philox(tensor: Tensor, given: Callable[[str], Any]) -> bool:
    """Attention saves seed and offset of its dropout, and writes them only if there is dropout.

    Flash attention: `rng_state`, uint64 [2], which the kernel writes, and `unused`, uint64 [], which nothing writes.
    Memory-efficient attention and cuDNN's: seed and offset, int64 [], on the CPU, or on the device in graph capture.
    """
    if not given("dropout_p"):
        return _is_philox(tensor)
    return tensor.dtype is torch.uint64 and not tensor.dim()


def _is_workspace(tensor: Tensor, given: Callable[[str], Any]) -> bool:
    """Libraries save workspaces as uint8 [n], and leave gaps between the parts that they use.

    cuDNN: the reserve of recurrent layers, and of batch norm in channels_last. oneDNN: the workspace of an LSTM.
    """
    return tensor.dtype is torch.uint8


def _is_bag_size(tensor: Tensor, given: Callable[[str], Any]) -> bool:
    """On CUDA the sizes of bags have an element for the last offset too, which is no bag, and nothing writes it.

    The sizes follow from the indices and offsets, which are compared.
    """
    offsets = given("offsets")
    return (
        bool(given("include_last_offset"))
        and not tensor.is_floating_point()
        and tensor.shape == offsets.shape
        and storage_key(tensor) != storage_key(offsets)
    )


PARTLY_UNDEFINED: Mapping[str, Callable[[Tensor, Callable[[str], Any]], bool]] = {
    "aten.scaled_dot_product_attention.default": _unused_philox,
    "aten.batch_norm.default": _is_workspace,
    "aten.embedding_bag.padding_idx": _is_bag_size,
    **dict.fromkeys(RECURRENT, _is_workspace),
}
"""By op: whether a tensor that it saves has undefined bytes, given a function that returns an argument by its name."""


def undefined_saves(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[Tensor], bool]:
    """Returns which of the tensors that a call of an op saves have undefined bytes.

    Args:
        op: The op that is about to run, one of PARTLY_UNDEFINED.
        args: The positional arguments of the op.
        kwargs: The keyword arguments of the op.
    """
    is_part = PARTLY_UNDEFINED[rules(op).name]

    def given(name: str) -> Any:
        return argument(op, name, args, kwargs)

    return lambda tensor: is_part(tensor, given)


def draws_beside_generators(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op of RECURRENT draws its dropout from a state that the process keeps beside torch's generators.

    cuDNN does so between the layers of a recurrent network. torch seeds that state at its first use, and again after
    the generator's state was set, so a replay would draw another mask.
    """
    return bool(
        args[0].is_cuda
        and torch.backends.cudnn.enabled
        and argument(op, "train", args, kwargs)
        and argument(op, "dropout", args, kwargs) > 0
        and argument(op, "num_layers", args, kwargs) > 1
    )

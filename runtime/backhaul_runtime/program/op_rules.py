"""Facts about single ops that their schemas do not declare, and rules that the recorder derives from both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from backhaul_runtime.program.program import FLEX_ATTENTION
from backhaul_runtime.torch_internals.private import HigherOrderOperator, OpOverload, arguments_of, returns_of

HIDDEN_WRITES = {
    "aten.batch_norm.default": ("running_mean", "running_var"),
    "aten.instance_norm.default": ("running_mean", "running_var"),
    "aten.native_batch_norm.default": ("running_mean", "running_var"),
    "aten.cudnn_batch_norm.default": ("running_mean", "running_var"),
    "aten.miopen_batch_norm.default": ("running_mean", "running_var"),
    "aten._batch_norm_impl_index.default": ("running_mean", "running_var"),
}
"""Arguments that an op writes to although neither its schema nor a version counter shows that."""

COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
"""The namespaces of ops that communicate with other ranks. A replay must not run them: the other ranks would not."""

_READING_COLLECTIVES = frozenset({"barrier", "monitored_barrier_", "send", "check_for_nan"})
"""Collectives that write to no argument. The schemas of most others do not show to which arguments they write."""

UNWRITTEN_RESULTS = frozenset(
    {
        "aten.empty.memory_format",
        "aten.empty_like.default",
        "aten.empty_permuted.default",
        "aten.empty_strided.default",
        "aten.new_empty.default",
        "aten.new_empty_strided.default",
    }
)
"""Ops whose results have undefined contents. A replay fills them with zeros."""

ABSOLUTE = frozenset(
    f"aten.{op}.default" for op in ("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter")
)
"""Ops that take an offset from the start of a storage, and so reach all of it. In a replay, a source lies in another
storage, at another offset."""

MAKES_LEAF = "aten.requires_grad_.default"
"""The op that stands in programs for `requires_grad = True`, which torch sets without calling an op."""

GEOMETRY = {
    "aten._pack_padded_sequence.default": 1,
    "aten._pad_packed_sequence.default": 1,
    "aten.narrow.Tensor": 2,
    "aten.tensor_split.tensor_indices_or_sections": 1,
}
"""The position of an argument whose values become sizes and offsets. Autograd does not save it, so no value check would
see a difference. The recorder makes its values a source, even if the function has computed them."""

CHECKED_WHEN_RECORDED = frozenset(
    {
        *(f"aten.{op}.out" for op in ("add", "sub", "mul", "div")),
        "aten.fused_moving_avg_obs_fake_quant.default",
    }
)
"""Ops that users call with arguments which a worker refuses. So the recorder checks the arguments too."""

READS_ONLY_SHAPES = frozenset({"aten.bernoulli.p"})
"""Ops that read only the shapes and dtypes of their arguments, beside those that say so in their names."""

DECIDE_IN_BACKWARD = frozenset(
    f"aten.{op}"
    for op in [
        "amax.default",
        "amin.default",
        "aminmax.default",
        "max.default",
        "min.default",
        "max.other",
        "min.other",
        "maximum.default",
        "minimum.default",
        "fmax.default",
        "fmin.default",
        "clamp.default",
        "clamp.Tensor",
        "clamp_.default",
        "clamp_.Tensor",
        "clip.default",
        "clip.Tensor",
        "clip_.default",
        "clip_.Tensor",
        "clamp_min.default",
        "clamp_min.Tensor",
        "clamp_min_.default",
        "clamp_min_.Tensor",
        "clamp_max.default",
        "clamp_max.Tensor",
        "clamp_max_.default",
        "clamp_max_.Tensor",
        "hardtanh.default",
        "hardtanh_.default",
        "relu6.default",
        "relu6_.default",
        "hardswish.default",
        "hardswish_.default",
        "hardsigmoid.default",
        "hardsigmoid_.default",
        "threshold.default",
        "threshold_.default",
        "l1_loss.default",
        "cdist.default",
        "margin_ranking_loss.default",
        "multi_margin_loss.default",
        "scatter_reduce.two",
        "scatter_reduce_.two",
        "index_reduce.default",
        "index_reduce_.default",
        "renorm.default",
        "renorm_.default",
        "linalg_vector_norm.default",
        "linalg_norm.default",
        "norm.Scalar",
        "norm.ScalarOpt_dim",
        "fake_quantize_per_tensor_affine.default",
        "fake_quantize_per_tensor_affine.tensor_qparams",
        "fake_quantize_per_channel_affine.default",
        "_fake_quantize_learnable_per_tensor_affine.default",
        "_fake_quantize_learnable_per_channel_affine.default",
        "fused_moving_avg_obs_fake_quant.default",
        "_foreach_max.default",
        "_foreach_norm.Scalar",
        *(
            f"_foreach_{op}.{kind}"
            for extreme in ("maximum", "minimum", "clamp_max", "clamp_min")
            for op in (extreme, f"{extreme}_")
            for kind in ("List", "Scalar")
        ),
        "grid_sampler.default",
    ]
)
"""Ops whose backward compares numbers that are often equal: extremes that tie, values that lie on a bound. On other
hardware, rounding could change the outcome, and no result of forward shows the outcome."""


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors in an argument or a result of an op, in order, from nested lists and tuples too."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


@dataclass(frozen=True, slots=True)
class OpRules:
    """The properties of an op that the recorder and a replay need.

    Attributes:
        name: The op's name, in the form "namespace.name.overload".
        draws: Whether the op may draw from a generator.
        written: Positions and names of the arguments that the op writes to.
        views: Positions of the arguments that the op's results are views of.
        reads_values: Whether the op reads the values of its tensor arguments, not only their shapes and dtypes.
        leaves_traces: Whether the op returns tensors, writes or draws. Any other op only gives Python a value, so no
            node is recorded for it.
        is_collective: Whether the op communicates with other ranks.
    """

    name: str
    draws: bool
    written: tuple[tuple[int, str], ...]
    views: frozenset[int]
    reads_values: bool
    leaves_traces: bool
    is_collective: bool


_OF_ATTENTION = OpRules(
    FLEX_ATTENTION,
    draws=False,
    written=(),
    views=frozenset(),
    reads_values=True,
    leaves_traces=True,
    is_collective=False,
)


@cache
def rules(op: OpOverload | HigherOrderOperator) -> OpRules:
    """Returns the rules of an op, derived from its schema, its tags and the lists above.

    The only higher-order op is flex_attention.
    """
    if isinstance(op, HigherOrderOperator):
        return _OF_ATTENTION
    name = str(op)
    namespace, base = name.split(".")[:2]
    is_collective = namespace in COLLECTIVES
    hidden = HIDDEN_WRITES.get(name, ())
    hides_writes = is_collective and base not in _READING_COLLECTIVES
    written, views = [], set()
    for position, argument in enumerate(arguments_of(op)):
        alias = argument.alias_info
        is_hidden = argument.name in hidden or (hides_writes and "Tensor" in str(argument.type))
        if is_hidden or (alias is not None and alias.is_write and name != MAKES_LEAF):  # it writes to no memory
            written.append((position, argument.name))
        elif alias is not None:
            views.add(position)
    draws = torch.Tag.nondeterministic_seeded in op.tags
    returns_tensors = any("Tensor" in str(returned.type) for returned in returns_of(op))
    return OpRules(
        name=name,
        draws=draws,
        written=tuple(written),
        views=frozenset(views),
        reads_values=not (base.endswith("_like") or base.startswith("new_")),
        leaves_traces=returns_tensors or bool(written) or draws,
        is_collective=is_collective,
    )


def written_tensors(op_rules: OpRules, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the tensors among these arguments that the op will write to."""
    written: list[Tensor] = []
    for position, name in op_rules.written:
        written += tensors_in(args[position] if position < len(args) else kwargs.get(name))
    return written


def hides_write(name: str, tensor: Tensor) -> bool:
    """Whether a tensor that autograd saves in this op may be a statistic that the op then overwrites, unversioned."""
    return name in HIDDEN_WRITES and tensor.dim() == 1


def argument(op: OpOverload, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the argument of an op with this name, or its default; None if the op has no such argument."""
    position, default = _parameters(op).get(name, (len(args), None))
    return args[position] if position < len(args) else kwargs.get(name, default)


@cache
def _parameters(op: OpOverload) -> Mapping[str, tuple[int, Any]]:
    return {parameter.name: (index, parameter.default_value) for index, parameter in enumerate(arguments_of(op))}

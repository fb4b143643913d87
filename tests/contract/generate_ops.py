"""Writes the positive list: `make ops`.

Runs torch's module database, torch's op database and one tiny model of each family of `transformers` under the recorder
with an open list, and keeps what they called that the rules below admit.
"""

import random
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it
from torch.utils import _pytree as pytree

from backhaul_runtime.program.op_rules import MAKES_LEAF
from backhaul_runtime.record.recorder import Recorder
from backhaul_runtime.tensors.layout import copy_exact

OPS_FILE = Path(__file__).parents[2] / "runtime/backhaul_runtime/program/ops.txt"

# Nothing that builds a graph's backward, makes tensors of memory or files it is told of, or belongs to other backends.
DENIED = re.compile(
    r"^(?!aten\.)"
    r"|backward|^aten\.(set_|from_file|record_stream|resize|_resize|_cudnn|cudnn|_thnn|miopen|mkldnn|_mkldnn|mps)"
    r"|(?<!fake_)quantiz|quantile_q|^aten\.q_|fbgemm|sparse|_csr|_coo|ccol|crow|_fused|nested|_nnpack|_jvp|_vmap"
    r"|fused_(?!moving_avg_obs_fake_quant)"
    r"|^aten\.(_local_scalar_dense|item|equal|is_nonzero|allclose|_unsafe(?!_view)|_assert|_print|retain_grad)"
    r"|^(?!aten\.(add|sub|mul|div)\.out$).*\.(out|names.*|.*dimname.*|.*_out|.*Dimname.*)$"
    r"|_aa\."  # read past their inputs on hostile values
    r"|native_batch_norm|_batch_norm_with_update|segment_reduce"  # likewise, on sizes
    r"|^aten\.(_fft|_linalg|_cdist_forward|upsample_\w+\.default)"  # beneath the ops that check arguments for them
    r"|^aten\.(repeat_interleave\.Tensor|_foreach_mm)"
    r"|^aten\.(rename|align|refine)|storage|pin_memory|has_recorded_choices|^aten\.(data|_version|_backward|output_nr|is_leaf)\."
)


class _Everything(frozenset[str]):
    def __contains__(self, name: object) -> bool:
        return True


def ops_of(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> set[str]:
    """The ops that a call makes, seen from where the recorder stands."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    recorder = Recorder(tensors, _Everything(), lambda tensor, layout, _: copy_exact(tensor, layout))
    with recorder:
        fn(*args, **kwargs)
    return {node.op for node in recorder.call.builder.program().nodes}


def _quietly(calls: Iterator[Callable[[], set[str]]], label: str) -> set[str]:
    ops: set[str] = set()
    ran = failed = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in calls:
            try:
                ops |= call()
                ran += 1
            except Exception:
                failed += 1
    print(f"{label}: {len(ops)} ops from {ran} samples, {failed} could not run", file=sys.stderr)
    return ops


def from_modules() -> set[str]:
    """What the modules of torch.nn call."""
    from torch.testing._internal.common_modules import module_db

    def calls() -> Iterator[Callable[[], set[str]]]:
        for info in module_db:
            for training in (True, False):
                samples = info.module_inputs_func(
                    info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
                )
                for sample in samples:

                    def call(info: Any = info, sample: Any = sample, training: bool = training) -> set[str]:
                        built = sample.constructor_input
                        module: nn.Module = info.module_cls(*built.args, **built.kwargs)
                        module.train(training)
                        forward = sample.forward_input
                        return ops_of(module, *forward.args, **forward.kwargs)

                    yield call

    return _quietly(calls(), "modules")


def from_op_db(most_samples: int = 12) -> set[str]:
    """What the functions of torch call, in each of their variants."""
    from torch.testing._internal.common_methods_invocations import op_db

    def calls() -> Iterator[Callable[[], set[str]]]:
        for info in op_db:
            dtypes = [d for d in (torch.float32, torch.int64, torch.bool, torch.complex64) if d in info.dtypes]
            for dtype in dtypes:
                grad = dtype.is_floating_point and info.supports_autograd
                try:
                    samples = list(islice(info.sample_inputs("cpu", dtype, requires_grad=grad), most_samples))
                except Exception:
                    continue
                aliases = [form for alias in info.aliases for form in (alias.op, alias.inplace_variant)]
                for sample in samples:
                    forms = (info.op, info.method_variant, info.inplace_variant, info.operator_variant, *aliases)
                    for variant in forms:
                        if variant is not None:

                            def call(variant: Any = variant, sample: Any = sample) -> set[str]:
                                return ops_of(variant, _unused(sample.input), *sample.args, **sample.kwargs)

                            yield call

    return _quietly(calls(), "functions")


def from_foreach_db(most_samples: int = 4) -> set[str]:
    """What the functions on lists of tensors call."""
    from torch.testing._internal import common_methods_invocations as database

    def calls() -> Iterator[Callable[[], set[str]]]:
        for kind in ("unary", "binary", "pointwise", "reduce", "other"):
            for info in getattr(database, f"foreach_{kind}_op_db"):
                for sample in islice(info.sample_inputs("cpu", torch.float32, noncontiguous=False), most_samples):
                    for variant in (info.method_variant, info.inplace_variant):
                        if variant is not None:

                            def call(variant: Any = variant, sample: Any = sample) -> set[str]:
                                return ops_of(variant, sample.input, *sample.args, **sample.kwargs)

                            yield call

    return _quietly(calls(), "functions on lists")


def from_vmap(most_samples: int = 3) -> set[str]:
    """What vmap translates the functions of torch to."""
    from torch.testing._internal.common_methods_invocations import op_db

    def calls() -> Iterator[Callable[[], set[str]]]:
        for info in op_db:
            if torch.float32 in info.dtypes:
                with suppress(Exception):
                    samples = islice(info.sample_inputs("cpu", torch.float32), most_samples)
                    for sample in filter(lambda sample: _is_float(sample.input), samples):

                        def call(info: Any = info, sample: Any = sample) -> set[str]:
                            def batched(batch: Tensor) -> Any:
                                fn = lambda x: info.op(x, *sample.args, **sample.kwargs)  # noqa: E731
                                return torch.vmap(fn, randomness="different")(batch)

                            return ops_of(batched, torch.stack([sample.input] * 2))

                        yield call

    return _quietly(calls(), "functions under vmap")


def _unused(value: Any) -> Any:
    """A copy that in-place variants may write to: no leaf that requires grad."""
    return value.detach().clone().requires_grad_(value.requires_grad) * 1 if _is_float(value) else value


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and value.dtype.is_floating_point


# What makes a configuration tiny, by the names that families use. Every value fits the others: 32 = 4 heads of 8.
_TINY = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "encoder_embed_dim", "word_embed_proj_dim"), 32
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "block_size"), 2),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "qk_rope_head_dim", "v_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("vocab_size",), 99),
    **dict.fromkeys(("image_size",), 32),
    **dict.fromkeys(("patch_size",), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "state_size", "time_step_rank"), 8),
}
_FAMILY_S = 20


def from_transformers() -> set[str]:
    """What the base model of each family of `transformers` calls, from random weights."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    transformers.logging.set_verbosity_error()

    def calls() -> Iterator[Callable[[], set[str]]]:
        for family in CONFIG_MAPPING:

            def call(family: str = family) -> set[str]:
                with _time_limit(_FAMILY_S):
                    return _family_ops(transformers.AutoModel.from_config(_tiny(CONFIG_MAPPING[family]())))

            yield call

    return _quietly(calls(), "families of transformers")


def _tiny(config: Any) -> Any:
    for part in (config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))):
        for name, value in _TINY.items():
            with suppress(Exception):  # some families compute some of them
                if isinstance(getattr(part, name, None), int):
                    setattr(part, name, value)
        for name in ("layer_types", "mlp_layer_types", "block_types"):
            with suppress(Exception):
                setattr(part, name, getattr(part, name)[:2])
        for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
            with suppress(Exception):
                if isinstance(getattr(part, name, None), int):
                    setattr(part, name, 1)
    return config


def _family_ops(model: nn.Module) -> set[str]:
    if sum(parameter.numel() for parameter in model.parameters()) > _FAMILY_PARAMETERS:
        raise ValueError("not tiny")
    text = torch.randint(2, 90, (2, 16))
    images = torch.randn(2, getattr(model.config, "num_channels", 3), 32, 32)
    sound = torch.randn(2, getattr(model.config, "num_mel_bins", 80), 128)
    ops: set[str] = set()
    for inputs in (
        {"input_ids": text},
        {"input_ids": text, "decoder_input_ids": text},
        {"pixel_values": images},
        {"input_ids": text, "pixel_values": images},
        {"input_features": sound, "decoder_input_ids": text},
        {"input_values": torch.randn(2, 2000)},
    ):
        for training in (True, False):
            model.train(training)
            try:
                ops |= ops_of(model, **inputs)
            except Exception:
                continue
    if not ops:
        raise ValueError("no inputs fit")
    return ops


_FAMILY_PARAMETERS = 50_000_000


@contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def from_idioms() -> set[str]:
    """What Python's own syntax calls on tensors."""

    def write(x: Tensor, y: Tensor) -> Tensor:
        out = torch.zeros(4, 4)
        out[0] = y[0]
        out[1:, ::2] = 3.0
        out[x > 0] = 0.5
        out[torch.tensor([0, 1]), 2] = y[0, :2]
        out[None, ..., -1].add_(1).mul_(y[:, 0])
        out += y
        out -= y * 2
        out *= 0.5
        out /= 3
        out **= 2
        out //= 2
        out %= 2
        mask = x > 0
        mask &= y > 0
        mask |= y < 0
        mask ^= x < 0
        mask = ~mask & (x == y) | (x != y) ^ (x >= y) & (x <= y)
        out = (-out + abs(x) @ y.T - 1 / (y + 9)) ** 2 % 3 // 2
        out = out.to(y).to("cpu").to(torch.float64).to(out.dtype, copy=True).to(memory_format=torch.contiguous_format)
        out = out * torch.from_numpy(y.detach().numpy()).to("cpu", torch.float32)
        shifted = (torch.arange(4) << 1) >> 1
        shifted <<= 1
        shifted >>= 1
        shifted = (shifted & 3 | 4) ^ 1
        shifted &= 7
        shifted |= 8
        shifted ^= 2
        return (
            torch.where(mask, out, 2 ** x[..., None, :, :].squeeze(0)) * len(shifted)
            + float(x.sum())
            + x.tolist()[0][0]
        )

    def make(x: Tensor) -> Tensor:
        generator = torch.Generator()
        parts = [
            torch.tensor([1.0, 2.0]),
            torch.as_tensor(3.0),
            torch.full((2,), 1.0),
            torch.linspace(0, 1, 2),
            torch.logspace(0, 1, 2),
            torch.eye(2)[0],
            torch.rand(2, generator=generator),
            torch.randn(2),
            torch.randint(3, (2,)),
            torch.randperm(2),
            torch.empty(2).uniform_(),
            torch.empty(2).normal_(),
            torch.empty(2).bernoulli_(0.5),
            torch.empty(2).exponential_(),
            torch.empty(2).random_(3),
            torch.empty(2).fill_(1),
            torch.empty(2).zero_(),
            torch.empty(2).copy_(x[0, :2]),
            torch.ones(2),
        ]
        return sum((part.to(x.dtype).type_as(x).float() for part in parts), x[0, :2].clone().detach())

    x, y = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    return _quietly(iter([lambda: ops_of(write, x, y), lambda: ops_of(make, x)]), "idioms")


def from_further() -> set[str]:
    """What is common in models and in no database: packed sequences, windows, normalization in place, distributions."""
    x, y = torch.rand(4, 4) * 0.5 + 0.25, torch.rand(4, 4, requires_grad=True)
    scale, zero = torch.full((4,), 0.1), torch.zeros(4, dtype=torch.int32)
    lengths = torch.tensor([4, 2, 1])

    def packed(kind: Callable[..., nn.RNNBase], **options: Any) -> Callable[[], Any]:
        module = kind(4, 4, **options)

        def run() -> Any:
            pack = nn.utils.rnn.pack_padded_sequence(torch.rand(4, 3, 4), lengths)
            return nn.utils.rnn.pad_packed_sequence(module(pack)[0])

        return run

    calls: list[Callable[[], Any]] = [
        packed(nn.LSTM),
        packed(nn.GRU),
        packed(nn.RNN),
        packed(nn.RNN, nonlinearity="relu"),
        lambda: nn.utils.rnn.pad_sequence([x, x[:2]]),
        lambda: torch.ctc_loss(x.log_softmax(-1).unsqueeze(1), torch.ones(1, 2), (4,), (2,)),
        lambda: F.ctc_loss(x.log_softmax(-1).unsqueeze(1), torch.ones(1, 2), torch.tensor([4]), torch.tensor([2])),
        *(
            lambda op=op, other=other: op(x, other, out=torch.empty(4, 4))
            for op in (torch.add, torch.sub, torch.mul, torch.div)
            for other in (x, 2)
        ),
        lambda: F.embedding(torch.tensor([1]), x.clone(), max_norm=1.0),
        # Of these only a tensor that the call has made can be recorded, see `ABSOLUTE`.
        lambda: torch.as_strided_copy(x.clone(), (2, 2), (4, 1)),
        lambda: torch.as_strided_scatter(x.clone(), x[:2, :2], (2, 2), (4, 1)),
        lambda: torch.fake_quantize_per_tensor_affine(y, 0.1, 0, -128, 127),
        lambda: torch.fake_quantize_per_tensor_affine(y, scale[0], zero[0], -128, 127),
        lambda: torch.fake_quantize_per_channel_affine(y, scale, zero, 0, -128, 127),
        lambda: torch._fake_quantize_learnable_per_tensor_affine(y, scale[:1], zero[:1].float(), -128, 127, 1.0),
        lambda: torch._fake_quantize_learnable_per_channel_affine(y, scale, zero.float(), 0, -128, 127, 1.0),
        lambda: torch.ao.quantization.FusedMovingAvgObsFakeQuantize()(y),
        lambda: torch._standard_gamma(y),
        lambda: torch._sample_dirichlet(x),
        lambda: torch.poisson(x),
        lambda: torch.binomial(torch.full((4, 4), 3.0), x),
        lambda: torch.bernoulli(x, 0.5),
        *(
            lambda make=make, periodic=periodic: make(4, periodic)
            for make in (
                torch.hann_window,
                torch.hamming_window,
                torch.blackman_window,
                torch.bartlett_window,
                torch.kaiser_window,
            )
            for periodic in (True, False)
        ),
        *(lambda make=make: make(4) for make in (torch.hann_window, torch.hamming_window, torch.blackman_window)),
        *(lambda make=make: make(4) for make in (torch.bartlett_window, torch.kaiser_window)),
        lambda: torch.kaiser_window(4, True, 5.0),
        lambda: torch._int_mm(torch.ones(32, 8, dtype=torch.int8), torch.ones(8, 8, dtype=torch.int8)),
        lambda: torch.narrow(y, 0, torch.tensor(1), 2),
        lambda: torch.tensor_split(y, torch.tensor([1, 3])),
    ]
    return _quietly(iter([partial(ops_of, call) for call in calls]), "further calls") | {MAKES_LEAF}


def siblings(names: set[str]) -> set[str]:
    """The in-place forms that ops of these names have, and those that take a generator."""
    forms = set()
    for name in names:
        namespace, base, overload = name.split(".")
        for form, wanted in ((f"{base}_", overload), (base, "generator"), (base, f"{overload}_generator")):
            packet = getattr(getattr(torch.ops, namespace), form, None)
            if packet is not None and wanted in packet.overloads():
                forms.add(f"{namespace}.{form}.{wanted}")
    return forms


def admitted(names: set[str]) -> list[str]:
    """Those that the rules let in, sorted."""
    return sorted(name for name in names | siblings(names) if not DENIED.search(name))


def main() -> None:
    torch.manual_seed(0)
    random.seed(0)
    names = from_modules() | from_op_db() | from_foreach_db() | from_vmap() | from_idioms() | from_further()
    names |= from_transformers()
    admitted_ops = admitted(names)
    print(f"admitted {len(admitted_ops)}, denied: {sorted(names - set(admitted_ops))}", file=sys.stderr)
    OPS_FILE.write_text("# Generated by `make ops`.\n" + "\n".join(admitted_ops) + "\n")


if __name__ == "__main__":
    main()

"""The positive list is what its generator makes, and holds nothing its rules forbid. Its ops write to nothing else than
the rules say.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import pytest
import torch
from torch._ops import OpOverload

from backhaul import ProgramError
from backhaul_runtime.program.op_list import allowed_ops, resolve
from backhaul_runtime.program.op_rules import (
    CHECKED_WHEN_RECORDED,
    DECIDE_IN_BACKWARD,
    GEOMETRY,
    HIDDEN_WRITES,
    MAKES_LEAF,
    READS_ONLY_SHAPES,
    UNWRITTEN_RESULTS,
    rules,
)
from backhaul_runtime.program.undefined_saves import PARTLY_UNDEFINED, UNDEFINED_SAVES
from contract import generate_ops
from contract.generate_ops import (
    DENIED,
    OPS_FILE,
    admitted,
    from_foreach_db,
    from_further,
    from_idioms,
    from_modules,
    from_op_db,
    from_vmap,
)
from support.writes import Memory, sample_of

# The list is made with the torch that CI runs.
GONE = {"aten.cholesky.default", "aten.qr.default"}
"""Listed, and no longer in torch 2.15."""

LATER = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten.linalg_matrix_sqrth.default",
    "aten.linalg_polar.default",
}
"""Called by torch 2.15's databases and not by earlier ones: on the trainer until the list is made with it."""


BY_HAND: Mapping[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "aten._grouped_mm.default": lambda: ((torch.rand(2, 16, 16, dtype=torch.bfloat16),) * 2, {}),
    "aten._is_all_true.default": lambda: ((torch.tensor([True, False]),), {}),
    "aten.clamp.default": lambda: ((torch.rand(2, 2), 0.2, 0.5), {}),
    "aten.repeat_interleave.self_Tensor": lambda: ((torch.rand(2), torch.tensor([1, 2])), {}),
    "aten._weight_norm.default": lambda: ((torch.rand(2, 2), torch.rand(2, 1)), {}),
    "aten._upsample_nearest_exact2d.vec": lambda: ((torch.rand(1, 1, 2, 2), None, [2.0, 2.0]), {}),
    "aten.upsample_nearest2d.vec": lambda: ((torch.rand(1, 1, 2, 2), None, [2.0, 2.0]), {}),
    "aten.upsample_nearest3d.vec": lambda: ((torch.rand(1, 1, 2, 2, 2), None, [2.0, 2.0, 2.0]), {}),
}
"""Arguments of ops that torch's databases do not call, where those made up from the schema do not fit."""


def listed() -> Iterator[tuple[str, OpOverload]]:
    """Names and ops of the list, without those that this torch no longer has."""
    for name in sorted(allowed_ops()):
        if name not in GONE or hasattr(torch.ops.aten, name.split(".")[1]):
            yield name, resolve(name)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
def test_ops_that_torchs_databases_call_are_listed_and_write_where_their_rules_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = Memory()
    monkeypatch.setattr(generate_ops, "Recorder", memory.recorder)
    # In a thread, whose stack is short: torch's database looks through all of pytest's for each sample.
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(
            lambda: (
                from_modules()
                | from_op_db(most_samples=3)
                | from_foreach_db(most_samples=2)
                | from_vmap(most_samples=2)
                | from_idioms()
                | from_further()
            )
        ).result()
    admitted_ops = set(admitted(called))
    assert len(admitted_ops) > 700
    assert admitted_ops - allowed_ops() - LATER == set()
    for name, op in listed():  # the rest
        if name not in memory.seen:
            args, kwargs = BY_HAND[name]() if name in BY_HAND else sample_of(op)
            memory.called(op, args, kwargs, lambda op, args, kwargs: op(*args, **kwargs))
    assert allowed_ops() - memory.seen - GONE == set()
    assert HIDDEN_WRITES.keys() & allowed_ops() <= memory.hidden_writes <= HIDDEN_WRITES.keys()
    assert "aten.dropout.default" in memory.hidden_aliases  # so a schema is not asked where a tensor lies


def test_the_file_is_sorted_and_admitted_by_the_rules() -> None:
    lines = [line for line in OPS_FILE.read_text().splitlines() if not line.startswith("#")]
    assert lines == sorted(set(lines))
    assert [name for name in lines if DENIED.search(name)] == []
    assert admitted(set(lines)) == lines


@pytest.mark.parametrize(
    "name",
    [
        "aten.set_.source_Tensor",
        "aten.from_file.default",
        "aten.convolution_backward.default",
        "aten.resize_.default",
        "aten._foreach_mm.default",
        "aten.to_sparse.default",
        "aten.quantize_per_tensor.default",
        "aten._upsample_bilinear2d_aa.vec",
        "aten._sparse_mm.default",
        "aten.segment_reduce.default",
        "aten.exp.out",
        "aten._fft_c2r.default",
        "aten._fused_adamw_.default",
        "prim.device.default",
        "mkldnn._linear_pointwise.default",
    ],
)
def test_what_must_not_run_does_not(name: str) -> None:
    with pytest.raises(ProgramError):
        resolve(name)


def test_every_listed_op_has_a_schema_that_can_be_checked() -> None:
    from backhaul_runtime.program.schema import _ACCEPTED

    for name, op in listed():
        for argument in op._schema.arguments:
            kind = argument.real_type
            while kind.kind() in {"OptionalType", "ListType"}:
                kind = kind.getElementType()
            assert kind.kind() in _ACCEPTED, (name, argument)


def test_no_op_takes_a_path_or_returns_what_is_no_tensor() -> None:
    for _, op in listed():
        assert not any("file" in argument.name for argument in op._schema.arguments)
        assert rules(op).leaves_traces or op._schema.returns == []


def test_exceptions_name_ops_that_exist() -> None:
    lists = (HIDDEN_WRITES, UNWRITTEN_RESULTS, UNDEFINED_SAVES, DECIDE_IN_BACKWARD, GEOMETRY, READS_ONLY_SHAPES)
    for name in (*chain(*lists), *CHECKED_WHEN_RECORDED, *PARTLY_UNDEFINED, MAKES_LEAF):
        namespace, packet, overload = name.split(".")
        op = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
        if name in HIDDEN_WRITES:
            names = {argument.name for argument in op._schema.arguments}
            assert set(HIDDEN_WRITES[name]) <= names

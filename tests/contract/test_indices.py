"""A worker with several trainers compiles no op that takes indices. Which ops do, torch's databases tell."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from backhaul_runtime.program.op_list import allowed_ops
from backhaul_runtime.program.op_rules import rules
from backhaul_runtime.program.unsafe_arguments import checks_values
from backhaul_runtime.record.recorder import Recorder
from backhaul_runtime.replay.compiled_programs import takes_indices
from contract import generate_ops
from contract.generate_ops import from_modules, from_op_db

FAR = 100_003
"""An index out of range in every sample of torch's databases."""


class _Probe:
    """Runs each op that is called once more for each integer tensor that it takes, with numbers far out of range."""

    def __init__(self) -> None:
        self.tried, self.refusing = set[str](), set[str]()

    def called(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = str(op)
        if name not in allowed_ops() or rules(op).written or checks_values(name) or name in self.refusing:
            return
        leaves, spec = pytree.tree_flatten((args, kwargs))
        leaves = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.dtype in (torch.int32, torch.int64) and leaf.numel():
                self.tried.add(name)
                for value in (FAR, -FAR):
                    given = [*leaves[:number], torch.full_like(leaf, value), *leaves[number + 1 :]]
                    if _runs(op, leaves, spec) and not _runs(op, given, spec):
                        self.refusing.add(name)

    def recorder(self, *args: Any) -> Recorder:
        """A recorder whose ops are tried."""
        probe = self

        class Probing(Recorder):
            def around(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                probe.called(op, args, kwargs)
                return super().around(op, args, kwargs)

        return Probing(*args)


def _runs(op: Any, leaves: list[Any], spec: Any) -> bool:
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    with suppress(IndexError, RuntimeError), torch.no_grad():
        op(*args, **kwargs)
        return True
    return False


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_every_op_that_refuses_integers_counts_as_indexing(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = _Probe()
    monkeypatch.setattr(generate_ops, "Recorder", probe.recorder)
    with ThreadPoolExecutor(1) as pool:  # torch's database looks through the whole stack for each sample
        pool.submit(lambda: from_modules() | from_op_db(most_samples=3)).result()
    assert {op for op in probe.refusing if not takes_indices(op)} == set()
    assert {"aten.embedding.default", "aten.gather.default", "aten.lu_solve.default"} <= probe.refusing
    assert len(probe.tried) > 200

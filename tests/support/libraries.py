"""Runs the examples of integrations, with and without Backhaul, and compares what they trained."""

import importlib.util
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import backhaul
from backhaul import Report
from support.torchrun import run_ranks

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/integrations"


def example(name: str) -> Any:
    """The module of an example. It is named with_NAME, because a script's folder comes first where it imports NAME."""
    spec = importlib.util.spec_from_file_location(f"with_{name}", EXAMPLES / f"with_{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def patient_sessions() -> Iterator[None]:
    """Sessions that examples open wait longer: a machine shared by many can starve a worker for seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BACKHAUL_SILENCE_S", "60")
        yield


def assert_trains_equally(name: str, worker: str) -> Report:
    """Trains an example twice: the parameters must end bitwise equal, and at least 90 % of the segments travel."""
    module = example(name)
    with patient_sessions():
        without, _ = module.train(None, remote=False)
        model, report = module.train(worker)
        backhaul.current_session().close()  # examples leave it open until their process ends
    assert_equal_states(without, model)
    assert report.travels >= 0.9, report
    assert report.remote, report
    return report


def assert_equal_states(expected: torch.nn.Module, actual: torch.nn.Module) -> None:
    """Compares all parameters and buffers, which must have changed by training alike."""
    left, right = expected.state_dict(), actual.state_dict()
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def assert_ranks_train_equally(
    name: str, worker: str, folder: Path, environment: Mapping[str, str] | None = None
) -> float:
    """Does what `assert_trains_equally` does on each of two ranks, and compares the last gradients as well.

    Returns:
        The smaller of the ranks' shares of segments that travel.
    """
    rank = str(Path(__file__).parents[1] / "libraries/rank.py")
    without, ours = folder / "without", folder / "with"
    without.mkdir()
    ours.mkdir()
    # In processes of their own, because a process group cannot be created twice in the same ones.
    run_ranks(2, [rank, name, str(without)], timeout_s=150, environment=environment)
    run_ranks(2, [rank, name, str(ours), worker], timeout_s=150, environment=environment)
    shares = []
    for number in range(2):
        left, right = (torch.load(of / f"{number}.pt") for of in (without, ours))
        assert left.keys() == right.keys()
        assert [key for key in left if not torch.equal(left[key], right[key])] == []
        outcome = json.loads((ours / f"{number}.json").read_text())
        assert outcome["travels"] >= 0.9, outcome
        assert outcome["remote"], outcome
        shares.append(outcome["travels"])
    return min(shares)


def documented_share(row: str) -> float:
    """The share of segments that travels by the table of docs/integrations/index.md, from 0 to 1."""
    page = (ROOT / "docs/integrations/index.md").read_text()
    cells = re.search(rf"^\| {re.escape(row)} \|.*\| (\d+) % \|$", page, re.MULTILINE)
    assert cells is not None, f"docs/integrations/index.md has no row {row!r}"
    return int(cells[1]) / 100

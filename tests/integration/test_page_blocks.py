"""The blocks of Python in the README and in docs/ run. Those that cannot run here say why, in a comment above them.

docs/tutorial.md and docs/two-machines.md have tests of their own. Pages of one library each are held by its example.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from support.processes import WorkerProcess

ROOT = Path(__file__).parents[2]
OWN_TEST = {"tutorial.md", "two-machines.md"}
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in OWN_TEST),
    ROOT / "docs/integrations/any-library.md",
]
BLOCK = re.compile(r"^(<!-- not run: [^\n]+ -->\n)?```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCKS = [
    pytest.param(text, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, (mark, text) in enumerate(BLOCK.findall(page.read_text()), 1)
    if not mark
]


class Model(nn.Module):
    """A model whose layers call torch's checkpoint, and which returns an object with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def forward(self, batch: Tensor) -> Any:
        return SimpleNamespace(loss=checkpoint.checkpoint(self.layer, batch, use_reentrant=False).square().mean())


@pytest.fixture
def names(worker: WorkerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names that blocks of a training loop use without defining them."""
    monkeypatch.chdir(tmp_path)
    import backhaul

    monkeypatch.setenv("BACKHAUL_WORKER", worker.address)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))
    model = Model()
    with backhaul.connect() as session:
        yield {
            "torch": torch,
            "backhaul": backhaul,
            "session": session,
            "blocks": blocks,
            "embed": nn.Linear(8, 8),
            "head": lambda x: x.square().mean(),
            "loss": lambda x: session.checkpoint(blocks[0], x).square().mean(),
            "model": model,
            "optimizer": torch.optim.SGD([*blocks.parameters(), *model.parameters()], lr=0.1),
            "batch": torch.randn(8, 8),
            "loader": [torch.randn(8, 8)],
        }


# torch.compile looks whether inputs have gradients, and hides the warning by a way that pytest's filter does not know.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("text", BLOCKS)
def test_a_block_runs(text: str, names: dict[str, Any]) -> None:
    ours = names["session"]
    if "accumulate" in text:  # else nothing but `patched` or the block itself makes segments of the model's layer
        ours.wrap(names["model"], layers=nn.Sequential)
    exec(compile(text, "block", "exec"), names)
    with names["session"] as session:
        assert session.report().remote or "session" not in text
    ours.close()


def test_most_blocks_run() -> None:
    assert len(BLOCKS) >= 5

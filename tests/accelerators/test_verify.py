"""Steps of a GPU are verified on a GPU, by this process and by a worker. Elsewhere the verdict says what is missing."""

from pathlib import Path

import pytest
import torch
from torch import nn

import backhaul
from conftest import quiet
from support.evidence import verify
from support.processes import WorkerProcess

pytestmark = pytest.mark.slow


def test_a_step_of_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    block = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8)).cuda()
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    directory = tmp_path / "evidence"
    with WorkerProcess("--memory", "1GiB", "--device", "cuda") as worker:
        recording = quiet(evidence=str(directory), evidence_share=1.0)
        with backhaul.connect(worker.address, settings=recording) as session:
            for _ in range(2):
                x = torch.randn(4, 8, device="cuda", requires_grad=True)
                session.checkpoint(block, x).square().sum().backward()
                optimizer.step()

        def printed() -> str:
            return "".join(capsys.readouterr())

        for options in ((), ("--worker", worker.address)):
            result = verify(directory, tmp_path, printed, *options)
            assert (result.code, len(result.verdicts), result.outcomes) == (0, 2, {"equal"}), result.shown
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = verify(directory, tmp_path, printed)
    assert (result.code, result.outcomes) == (2, {"unknown"})
    assert "it ran on cuda, and this machine has no such device" in result.shown

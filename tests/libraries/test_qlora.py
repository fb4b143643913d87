"""examples/integrations/with_qlora.py, with a worker that allows bitsandbytes, and with one that does not."""

import pytest

import backhaul
from support.libraries import assert_trains_equally, documented_share, example
from support.processes import WorkerProcess

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")


def test_the_example_trains_as_without_backhaul() -> None:
    with WorkerProcess("--memory", "2GiB", "--allow", "bitsandbytes") as worker:
        report = assert_trains_equally("qlora", worker.address)
    assert round(report.travels, 2) == documented_share("PEFT QLoRA, `prepare_model_for_kbit_training`")


def test_an_error_at_the_start_without_permission(worker: WorkerProcess) -> None:
    with pytest.raises(backhaul.NotRemoteError, match="--allow bitsandbytes"):
        example("qlora").train(worker.address)

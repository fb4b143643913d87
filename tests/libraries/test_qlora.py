"""examples/integrations/with_qlora.py: what a worker without permission for bitsandbytes does."""

import pytest

import backhaul
from support.libraries import example
from support.processes import WorkerProcess

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")


def test_an_error_at_the_start_without_permission(worker: WorkerProcess) -> None:
    with pytest.raises(backhaul.NotRemoteError, match="no part of PeftModelForCausalLM will be recomputed by a worker"):
        example("qlora").train(worker.address)

"""How often training waits for the device because of Backhaul, by `support.count_waits`.

Of two steps of its MLP in six segments, counted on 27 November 2026: the trainer's threads never wait in forward. In
backward they wait 14 times with returns="gradients" and 36 times with "activations". Without checkpointing they never
wait. With Backhaul's own threads, for which forward does not wait, these are 206 and 213 waits. Before a piece of a
tensor was copied with one wait instead of two, they were 268 and 247.
"""

from typing import Any

import pytest

import backhaul
from conftest import QUIET_S
from support.count_waits import SEGMENTS, STEPS, count, of_trainer
from support.processes import WorkerProcess

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gpu_worker() -> Any:
    with WorkerProcess("--memory", "1GiB", "--device", "cuda") as process:
        yield process


def test_training_alone_waits_for_nothing(simulation: Any) -> None:
    waits = count(lambda segment, x: segment(x))
    assert (waits.forward.total(), waits.backward.total()) == (0, 0)


def test_forward_waits_for_nothing_and_backward_once_for_each_segment_and_download(
    simulation: Any, gpu_worker: WorkerProcess, returns: str
) -> None:
    with backhaul.connect(gpu_worker.address, silence_s=QUIET_S) as session:
        waits = count(lambda segment, x: session.checkpoint(segment, x, returns=returns, strict=True))
    downloads = 1 if returns == "gradients" else 3  # a gradient; what LayerNorm and GELU save
    assert of_trainer(waits.forward) == 0
    assert of_trainer(waits.backward) <= STEPS * SEGMENTS * (1 + downloads)

"""How often training waits for the device because of Backhaul, by `support.count_waits`.

Of two steps of its MLP in six segments, counted on 27 November 2026: the trainer's threads never wait in forward. In
backward they wait 14 times with returns="gradients" and 12 times with "activations", of which 36 were counted while
each weight was compared by itself. Without checkpointing they never wait. With Backhaul's own threads, for which
forward does not wait, these are 98 and 95 waits. They were 206 and 213 while the end of each use of a side stream was
waited for, and 268 and 247 before a piece of a tensor was copied with one wait instead of two.
"""

from collections import Counter
from typing import Any

import pytest
import torch

import backhaul
from conftest import QUIET
from gpu_check.models import ATTENTION, PLAIN, RECURRENT, Case
from support.bits import Checkpoint, plainly
from support.count_waits import SEGMENTS, STEPS, count, of_trainer
from support.processes import WorkerProcess

pytestmark = pytest.mark.slow


ORDINARY = {**PLAIN, **{name: ATTENTION[name] for name in ("math", "default bf16", "default autocast, dropout")}}
ORDINARY |= {name: RECURRENT[name] for name in ("conv", "conv, channels_last", "lstm", "gru")}


@pytest.fixture(scope="module")
def gpu_worker() -> Any:
    with WorkerProcess("--memory", "1GiB", "--device", "cuda") as process:
        yield process


def test_training_alone_waits_for_nothing(simulation: Any) -> None:
    waits = count(lambda segment, x: segment(x))
    assert (waits.forward.total(), waits.backward.total()) == (0, 0)


def test_forward_waits_for_nothing_and_backward_once_for_each_segment_and_sent_gradient(
    simulation: Any, gpu_worker: WorkerProcess, returns: str
) -> None:
    with backhaul.connect(gpu_worker.address, settings=QUIET) as session:
        waits = count(lambda segment, x: session.checkpoint(segment, x, returns=returns, strict=True))
    sent = 1 if returns == "gradients" else 0  # unless the worker holds it; nothing waits for what arrives
    assert of_trainer(waits.forward) == 0
    assert of_trainer(waits.backward) <= STEPS * SEGMENTS * (1 + sent)


def waits_of(simulation: Any, checkpoint: Checkpoint, case: Case) -> tuple[int, int]:
    """Returns how often the trainer waits for one segment in forward and in backward, in the third step."""
    model, waits = case.build().to("cuda", case.dtype), (0, 0)
    for _ in range(3):
        x = case.inputs()
        torch.cuda.synchronize()
        simulation.reset_counters()
        with case.around():
            loss = checkpoint(model, x * 1.0).float().square().mean()
            forward = of_trainer(Counter(simulation.counters()["sync_calls"]))
            loss.backward()
        waits = forward, of_trainer(Counter(simulation.counters()["sync_calls"])) - forward
    return waits


@pytest.mark.parametrize("case", ORDINARY.values(), ids=ORDINARY)
def test_ordinary_models_wait_for_nothing_in_forward(
    simulation: Any, gpu_worker: WorkerProcess, case: Case, returns: str
) -> None:
    with backhaul.connect(gpu_worker.address, settings=QUIET) as session:
        ours = waits_of(simulation, lambda *args: session.checkpoint(*args, returns=returns, strict=True), case)
    forward, backward = waits_of(simulation, plainly, case)  # what an op of the training waits for
    assert ours[0] == forward
    assert ours[1] <= backward + (2 if returns == "gradients" else 1)


def test_a_recomputation_on_the_trainer_waits_for_each_kind_of_digest_once(simulation: Any, returns: str) -> None:
    """They are forward's, those of the sources, the replay's, and those of activations that lie in parameters."""
    with (
        WorkerProcess("--memory", "1GiB", "--device", "cuda") as lost,
        backhaul.connect(lost.address, settings=QUIET) as session,
    ):
        session.checkpoint(torch.nn.Linear(4, 4).cuda(), torch.ones(4, 4, device="cuda"))
        lost.kill()
        waits = count(lambda segment, x: session.checkpoint(segment, x, returns=returns))
    assert of_trainer(waits.forward) == 0
    assert of_trainer(waits.backward) <= STEPS * SEGMENTS * (3 if returns == "gradients" else 4)

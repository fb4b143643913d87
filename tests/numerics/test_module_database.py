"""Every module of torch's own database, recorded and replayed: outputs, gradients, buffers, generators, bit by bit."""

from typing import Any

import pytest
import torch

from support.bits import differing, outcome, plainly, seed_generators
from support.loopback import Loopback

# Why their samples stay on the trainer.
KEPT = {
    f"nn.Lazy{kind}{n}d": "makes its parameters in the first call, past the dispatcher"
    for kind in ("Conv", "ConvTranspose")
    for n in (1, 2, 3)
}


CHUNKS = 8
"""The database is one test, divided so that processes can share it."""


@pytest.mark.slow
@pytest.mark.parametrize("returns", ["gradients", "activations"])
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.filterwarnings("ignore")
def test_every_module_of_torchs_database(chunk: int, returns: str, subtests: pytest.Subtests) -> None:
    from torch.testing._internal.common_modules import module_db  # takes a second in a process that only collects

    for info in module_db[chunk::CHUNKS]:
        with subtests.test(info.name):
            check(info, returns)


def check(info: Any, returns: str) -> None:
    seed_generators(0)
    loopback = Loopback()
    compared = 0
    dtype = torch.float64 if "Fractional" in info.name else torch.float32  # its samples fit no other
    for training in (True, False) if info.train_and_eval_differ else (True,):
        samples = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
        for sample in samples[:6]:

            def make(sample: Any = sample, training: bool = training) -> Any:
                seed_generators(1)
                return info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).train(
                    training
                )

            def checkpointed(*args: Any, **kwargs: Any) -> Any:
                return loopback.checkpoint(*args, returns=returns, **kwargs)

            inputs = sample.forward_input.args, sample.forward_input.kwargs
            try:
                expected = outcome(plainly, make(), *inputs)
            except (RuntimeError, NotImplementedError, TypeError, AssertionError, ValueError):
                continue  # a sample that shows an error
            assert differing(outcome(checkpointed, make(), *inputs), expected) == []
            compared += 1
    report = loopback.report()
    assert compared
    assert report.fallbacks == 0
    kept = {reason for segment in report.segments for reason in segment.kept}
    assert bool(kept) == (info.name in KEPT), kept
    assert loopback.changed() == []

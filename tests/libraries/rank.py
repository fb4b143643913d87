"""A rank of an example that a test starts with torchrun: `rank.py NAME WORKER FOLDER`.

Trains the example with and without Backhaul, and writes what it found to a file in the folder, named by its rank.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.libraries import example


def local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def results(model: nn.Module) -> dict[str, Tensor]:
    """What this rank has of the trained parameters, and of the gradients of the last step."""
    parameters = dict(model.named_parameters())
    return {
        **{name: local(parameter) for name, parameter in parameters.items()},
        **{f"gradient of {name}": local(parameter.grad) for name, parameter in parameters.items()},
    }


def main(name: str, worker: str, folder: str) -> None:
    torch.set_num_threads(1)
    if name == "torchtitan":  # whose Trainer creates the process group
        import support.torchtitan_on_cpu  # noqa: F401 # before the example imports torchtitan
    else:
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    module = example(name)
    without, _ = module.train(None, remote=False)
    model, report = module.train(worker)
    expected, ours = results(without), results(model)
    outcome = {
        "names": sorted(expected) == sorted(ours),
        "differing": [name for name in expected if not torch.equal(expected[name], ours[name])],
        "travels": report.travels,
        "remote": report.remote,
    }
    (Path(folder) / str(dist.get_rank())).write_text(json.dumps(outcome))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A rank of an example that a test starts with torchrun: `rank.py NAME FOLDER [WORKER]`.

Trains the example, with Backhaul if a worker is named, and writes what it has then to files in the folder, which are
named by its rank.
"""

import json
import os
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
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def results(model: nn.Module) -> dict[str, Tensor]:
    """What this rank has of the trained parameters, and of the gradients of the last step."""
    parameters = dict(model.named_parameters())
    return {
        **{name: local(parameter) for name, parameter in parameters.items()},
        **{f"gradient of {name}": local(parameter.grad) for name, parameter in parameters.items()},
    }


def main(name: str, folder: str, worker: str | None = None) -> None:
    torch.set_num_threads(1)
    if name == "torchtitan":  # whose Trainer creates the process group
        import support.torchtitan_on_cpu  # noqa: F401 # before the example imports torchtitan
    else:
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
    model, report = example(name).train(worker, remote=worker is not None)
    torch.save(results(model), Path(folder) / f"{rank}.pt")
    shares = None if report is None else {"travels": report.travels, "remote": report.remote}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(shares))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

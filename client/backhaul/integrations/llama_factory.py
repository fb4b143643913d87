"""LLaMA-Factory's training, with workers that recompute. See docs/integrations/llama_factory.md.

    BACKHAUL_WORKER=gpu-box:50051 python -m backhaul.integrations.llama_factory config.yaml

takes the place of `llamafactory-cli train config.yaml`, also under torchrun. In Python, `run` takes the place of
LLaMA-Factory's `run_exp`.
"""

from collections.abc import Sequence
from typing import Any

from llamafactory.hparams.parser import read_args
from llamafactory.train.tuner import run_exp

from backhaul.integrations.transformers import BackhaulCallback

_PREVENTING = {
    "disable_gradient_checkpointing": "switches gradient checkpointing off",
    "use_unsloth_gc": "replaces gradient checkpointing",
    "use_unsloth": "replaces gradient checkpointing",
}


def run(args: dict[str, Any] | None = None, callbacks: Sequence[Any] = (), **backhaul: Any) -> None:
    """Runs a training of LLaMA-Factory in which workers recompute the layers of the model.

    Args:
        args: The arguments of the training; None for those of the command line, which may begin with a YAML file.
        callbacks: Further callbacks of the Trainer.
        **backhaul: Arguments of `backhaul.integrations.transformers.BackhaulCallback`, such as `worker`.

    Raises:
        ConnectError: No worker answers at one of the addresses.
        NotRemoteError: The first forward shows that no segment can be recomputed by a worker.
        ValueError: The arguments switch gradient checkpointing off, or replace it.
    """
    parsed = read_args(args)
    for name, effect in _PREVENTING.items():
        if isinstance(parsed, dict) and parsed.get(name):
            raise ValueError(f"{name}: true {effect}, so no layer would be recomputed by a worker. Remove it")
    run_exp(parsed, [*callbacks, BackhaulCallback(**backhaul)])


if __name__ == "__main__":
    run()

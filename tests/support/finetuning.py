"""A fine-tuning that workers speed up, as a process: what pictures of the dashboard show.

    python -m support.finetuning ADDRESS,... NAME SEED STEPS [--tag TAG] [--notes TEXT]

The base is frozen, so that only small gradients return. The micro-batches of a step run in an accumulation block, so
that workers compute while the trainer goes on.
"""

import argparse
import sys

import torch
from torch.nn import functional as F  # noqa: N812  torch's own name for it

import backhaul
from backhaul.demo.corpus import batch, standard_library
from backhaul.demo.model import LanguageModel

LAYERS, WIDTH, CONTEXT = 4, 384, 256
ROWS, MICRO_BATCHES = 8, 8


def model(seed: int) -> LanguageModel:
    """Returns a model of which only biases and norms are trained."""
    torch.manual_seed(seed)
    made = LanguageModel(LAYERS, WIDTH, CONTEXT)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(parameter.dim() == 1 or "head" in name)
    return made


def main() -> None:
    """Trains, says "trained", and keeps the session until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workers")
    parser.add_argument("name")
    parser.add_argument("seed", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("--tag", action="append", default=[])
    parser.add_argument("--notes", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = standard_library()
    network = model(options.seed)
    optimizer = torch.optim.AdamW([one for one in network.parameters() if one.requires_grad], lr=2e-3)
    with backhaul.connect(
        options.workers,
        run=options.name,
        returns="gradients",
        settings=backhaul.Settings(tags=options.tag, notes=options.notes),
    ) as session:
        for step in range(options.steps):
            inputs, targets = batch(text, ROWS, CONTEXT, options.seed + step)
            total = 0.0
            with session.accumulate() as block:
                for rows, wanted in zip(inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True):
                    logits = network(rows, session.checkpoint)
                    loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten()) / MICRO_BATCHES
                    block.backward(loss)
                    total += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            session.step(total)
        sys.stdout.write("trained\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()

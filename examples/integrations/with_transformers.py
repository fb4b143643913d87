"""Trains a small Llama in a loop of your own, after the training loop of Transformers' documentation.

    python examples/integrations/with_transformers.py gpu-box:50051

The two lines of Backhaul are marked. Without an address a worker is started on this machine.
"""

import sys

import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler

import backhaul.integrations.transformers  # <- Backhaul


def tokens(sequences: int = 24, length: int = 64) -> list[dict[str, torch.Tensor]]:
    """Returns sequences of random tokens, in place of a tokenized data set."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 256, (sequences, length), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def train(worker: str | None, *, remote: bool = True) -> tuple[torch.nn.Module, backhaul.Report | None]:
    """Trains the model, and returns it with the report of the session; without Backhaul if `remote` is False."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    session = backhaul.integrations.transformers.enable(model, worker) if remote else None  # <- Backhaul

    loader = DataLoader(tokens(), shuffle=True, batch_size=4)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    steps = 2 * len(loader)
    scheduler = get_scheduler("linear", optimizer=optimizer, num_warmup_steps=0, num_training_steps=steps)

    model.train()
    for _epoch in range(2):
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return model, session and session.report()


if __name__ == "__main__":
    print(train(sys.argv[1] if len(sys.argv) > 1 else None)[1])

"""Trains LoRA adapters of PEFT on a small Llama, in a loop of your own.

    python examples/integrations/with_peft.py gpu-box:50051

The two lines of Backhaul are marked. Without an address a worker is started on this machine.
"""

import sys

import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import backhaul.integrations.transformers  # <- Backhaul


def train(worker: str | None, *, remote: bool = True) -> tuple[torch.nn.Module, backhaul.Report | None]:
    """Trains the adapters, and returns the model with the report of the session; without one if `remote` is False."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
    )
    peft_config = LoraConfig(
        task_type=TaskType.CAUSAL_LM, r=8, lora_alpha=32, lora_dropout=0.1, init_lora_weights="gaussian"
    )
    model = get_peft_model(LlamaForCausalLM(config), peft_config)
    session = backhaul.integrations.transformers.enable(model, worker) if remote else None  # <- Backhaul
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    model.train()
    for _step in range(6):
        tokens = torch.randint(0, 256, (4, 64))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, session and session.report()


if __name__ == "__main__":
    print(train(sys.argv[1] if len(sys.argv) > 1 else None)[1])

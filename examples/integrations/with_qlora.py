"""Trains LoRA adapters of PEFT on a small Llama whose weights bitsandbytes has quantized to 4 bits.

    backhaul worker --allow bitsandbytes
    python examples/integrations/with_qlora.py gpu-box:50051

The two lines of Backhaul are marked. A worker runs the functions of bitsandbytes only if it was started with
`--allow bitsandbytes`.
"""

import sys

import bitsandbytes
import torch
from peft import LoraConfig, TaskType, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import backhaul.integrations.transformers  # <- Backhaul


def quantized(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Replaces the decoder's linear layers in place, as `BitsAndBytesConfig(load_in_4bit=True)` does on loading."""
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    replacement = bitsandbytes.nn.Linear4bit(
                        child.in_features, child.out_features, bias=False, quant_type="nf4", compute_dtype=torch.float32
                    )
                    replacement.weight = bitsandbytes.nn.Params4bit(
                        child.weight.data, requires_grad=False, quant_type="nf4"
                    )
                    setattr(parent, name, replacement.to(model.device))
    model.is_loaded_in_4bit = True
    return model


def train(worker: str | None, *, remote: bool = True) -> tuple[torch.nn.Module, backhaul.Report | None]:
    """Trains the adapters, and returns the model with the report of the session; without one if `remote` is False."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
    )
    model = prepare_model_for_kbit_training(quantized(LlamaForCausalLM(config)))
    model = get_peft_model(
        model,
        LoraConfig(task_type=TaskType.CAUSAL_LM, r=8, lora_alpha=16, target_modules="all-linear", lora_dropout=0.05),
    )
    session = backhaul.integrations.transformers.enable(model, worker) if remote else None  # <- Backhaul
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)

    model.train()
    for _step in range(20):
        tokens = torch.randint(0, 256, (2, 32))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, session and session.report()


if __name__ == "__main__":
    print(train(sys.argv[1] if len(sys.argv) > 1 else None)[1])

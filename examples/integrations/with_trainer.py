"""Fine-tunes a small Llama with the Trainer of Transformers, after the quick tour of its documentation.

    python examples/integrations/with_trainer.py gpu-box:50051

The two lines of Backhaul are marked. Without an address a worker is started on this machine.
"""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import backhaul.integrations.transformers  # <- Backhaul


def tokens(sequences: int, length: int = 64) -> list[dict[str, torch.Tensor]]:
    """Returns sequences of random tokens in place of a tokenized data set. Prompts, of any length, have no loss."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 256, (sequences, length), generator=generator)
    prompts = torch.randint(1, length // 2, (sequences, 1), generator=generator)
    labels = rows.masked_fill(torch.arange(length) < prompts, -100)
    return [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]


def train(worker: str | None, *, remote: bool = True) -> tuple[torch.nn.Module, backhaul.Report | None]:
    """Trains the model, and returns it with the report of the session; without Backhaul if `remote` is False."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
    )
    callback = backhaul.integrations.transformers.BackhaulCallback(worker)  # <- Backhaul
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=LlamaForCausalLM(config),
            args=TrainingArguments(
                output_dir=folder,
                learning_rate=1e-3,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=4,
                num_train_epochs=2,
                eval_strategy="epoch",
                save_strategy="epoch",
                logging_steps=1,
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=tokens(26),
            eval_dataset=tokens(4),
            callbacks=[callback] if remote else [],  # <- Backhaul
        )
        trainer.train()
    return trainer.model, callback.report() if remote else None


if __name__ == "__main__":
    print(train(sys.argv[1] if len(sys.argv) > 1 else None)[1])

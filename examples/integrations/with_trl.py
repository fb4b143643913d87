"""Fine-tunes LoRA adapters with the SFTTrainer of TRL, after the quick start of its documentation.

    python examples/integrations/with_trl.py gpu-box:50051

The two lines of Backhaul are marked. Without an address a worker is started on this machine.
"""

import sys
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import backhaul.integrations.transformers  # <- Backhaul

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "sleeps"]


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of a few words, in place of a downloaded one."""
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=64
    )


def texts(rows: int) -> Dataset:
    """Returns random sentences of different lengths."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(8, 40, (rows,), generator=generator).tolist()
    numbers = [torch.randint(0, len(WORDS), (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_dict({"text": [" ".join(WORDS[number] for number in row) for row in numbers]})


def train(worker: str | None, *, remote: bool = True) -> tuple[torch.nn.Module, backhaul.Report | None]:
    """Trains the adapters, and returns the model with the report of the session; without one if `remote` is False."""
    torch.manual_seed(0)
    words = tokenizer()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
        )
    )
    callback = backhaul.integrations.transformers.BackhaulCallback(worker)  # <- Backhaul
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                output_dir=folder,
                learning_rate=1e-3,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=4,
                num_train_epochs=2,
                eval_strategy="epoch",
                logging_steps=1,
                report_to="none",
                disable_tqdm=True,
                use_cpu=not torch.cuda.is_available(),
            ),
            train_dataset=texts(26),
            eval_dataset=texts(4),
            processing_class=words,
            peft_config=LoraConfig(r=8, lora_dropout=0.1, init_lora_weights="gaussian"),
            callbacks=[callback] if remote else [],  # <- Backhaul
        )
        trainer.train()
    return trainer.model, callback.report() if remote else None


if __name__ == "__main__":
    print(train(sys.argv[1] if len(sys.argv) > 1 else None)[1])

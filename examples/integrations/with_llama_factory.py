"""Fine-tunes a small Llama with LoRA through LLaMA-Factory, after its example llama3_lora_sft.yaml.

    python examples/integrations/with_llama_factory.py gpu-box:50051

The two lines of Backhaul are marked. Without an address a worker is started on this machine. In place of a downloaded
model and data set, the script makes small ones with random weights and random words.
"""

import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", DISABLE_VERSION_CHECK="1")  # nothing here is downloaded

import torch
from llamafactory.train.tuner import run_exp
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import backhaul
import backhaul.integrations.llama_factory  # <- Backhaul


def arguments(folder: Path) -> dict[str, Any]:
    """Returns the arguments of the training, which LLaMA-Factory also takes as a YAML file."""
    return {
        "stage": "sft",
        "do_train": True,
        "model_name_or_path": str(folder / "model"),
        "template": "empty",
        "dataset_dir": str(folder),
        "dataset": "words",
        "overwrite_cache": True,
        "cutoff_len": 64,
        "finetuning_type": "lora",
        "lora_rank": 8,
        "lora_target": "all",
        "output_dir": str(folder / "output"),
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "max_steps": 3,
        "bf16": True,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "use_cpu": not torch.cuda.is_available(),
        "seed": 0,
    }


def prepare(folder: Path) -> None:
    """Makes a small model, its tokenizer, and a data set."""
    words = ["<s>", "</s>", "<unk>", *(f"word{number}" for number in range(253))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    ).save_pretrained(folder / "model")
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            bos_token_id=0,
            eos_token_id=1,
        )
    ).save_pretrained(folder / "model")
    chosen = random.Random(0)
    rows = [
        {name: " ".join(chosen.choices(words[3:], k=20)) for name in ("instruction", "input", "output")}
        for _ in range(64)
    ]
    (folder / "words.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text(json.dumps({"words": {"file_name": "words.json"}}))


def train(worker: str | None, *, remote: bool = True) -> tuple[dict[str, torch.Tensor], backhaul.Report | None]:
    """Trains the model. Returns its adapters and the report of the session; without Backhaul if `remote` is False."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        if remote:
            backhaul.integrations.llama_factory.run(arguments(folder), worker=worker)  # <- Backhaul, for run_exp
        else:
            run_exp(arguments(folder))
        adapters = load_file(folder / "output/adapter_model.safetensors")
    return adapters, backhaul.current_session().report() if remote else None


if __name__ == "__main__":
    print(train(sys.argv[1] if len(sys.argv) > 1 else None)[1])

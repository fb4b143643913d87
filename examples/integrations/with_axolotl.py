"""Fine-tunes a small Llama with LoRA through Axolotl, after its example llama-3/lora-1b.yml. YAML alone is enough.

    python examples/integrations/with_axolotl.py gpu-box:50051

The lines of Backhaul in the configuration are marked. Without an address a worker is started on this machine. In place
of a downloaded model and data set, the script makes small ones with random weights and random words.
"""

import os
import random
import sys
import tempfile
from pathlib import Path

os.environ.update(AXOLOTL_DO_NOT_TRACK="1", HF_HUB_OFFLINE="1")  # nothing here is downloaded or reported

import torch
from axolotl.cli.config import load_cfg
from axolotl.common.datasets import load_datasets
from axolotl.train import train as train_by_axolotl
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import backhaul

CONFIG = """
base_model: {folder}/model
datasets:
  - path: {folder}/data.jsonl
    ds_type: json
    type: completion
dataset_prepared_path: {folder}/prepared
output_dir: {folder}/output

adapter: lora
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_linear: true
lora_mlp_kernel: false  # these kernels need a GPU, and workers cannot run them
lora_qkv_kernel: false
lora_o_kernel: false
lora_embedding_kernel: false

sequence_len: 64
sample_packing: true
gradient_checkpointing: true
micro_batch_size: 2
gradient_accumulation_steps: 2
max_steps: 5
learning_rate: 0.001
optimizer: adamw_torch
lr_scheduler: constant
dataset_num_proc: 1
attn_implementation: sdpa
bf16: false
save_strategy: "no"
seed: 0
"""

WITH_BACKHAUL = """
plugins:
  - backhaul.integrations.axolotl.BackhaulPlugin  # <- Backhaul
backhaul:
  worker: {worker}                                # <- Backhaul: an address, several, or null
"""


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
    rows = (" ".join(chosen.choices(words[3:], k=60)) for _ in range(64))
    (folder / "data.jsonl").write_text("".join(f'{{"text": "{row}"}}\n' for row in rows))


def train(worker: str | None, *, remote: bool = True) -> tuple[torch.nn.Module, backhaul.Report | None]:
    """Trains the model, and returns it with the report of the session; without Backhaul if `remote` is False."""
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        text = CONFIG + (WITH_BACKHAUL if remote else "")
        (Path(folder) / "config.yaml").write_text(text.format(folder=folder, worker=worker or "null"))
        config = load_cfg(str(Path(folder) / "config.yaml"))
        model, _, _ = train_by_axolotl(cfg=config, dataset_meta=load_datasets(cfg=config))
    if not remote:
        return model, None
    return model, backhaul.current_session().report()


if __name__ == "__main__":
    print(train(sys.argv[1] if len(sys.argv) > 1 else None)[1])

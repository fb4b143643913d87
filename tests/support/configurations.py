"""Small forms of public example configurations, each trained with and without Backhaul.

Models are random and tiny, and data is random. Everything else that decides what travels, such as architecture,
adapters, precision, loss and accumulation, is that of the public example.
"""

import tempfile
from collections.abc import Callable
from typing import Any

import torch

from backhaul import Report
from support.libraries import assert_equal_states, patient_sessions

Trained = tuple[torch.nn.Module, Report | None]
SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}


def rows(count: int, names: tuple[str, ...] = ("input_ids", "labels"), length: int = 24) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 64, (count, length), generator=generator)
    return [dict.fromkeys(names, row) for row in tokens]


def by_trainer(model: torch.nn.Module, worker: str | None, data: list[dict[str, Any]], **arguments: Any) -> Trained:
    from transformers import Trainer, TrainingArguments

    from backhaul.integrations.transformers import BackhaulCallback

    callback = BackhaulCallback(worker)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", max_steps=3, **arguments
        )
        callbacks: list[Any] = [] if worker is None else [callback]
        Trainer(model=model, args=settings, train_dataset=data, callbacks=callbacks).train()
    return model, None if worker is None else callback.report()


def language_modeling(worker: str | None) -> Trained:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=4, n_positions=32))
    return by_trainer(model, worker, rows(24), per_device_train_batch_size=2, learning_rate=5e-5)


def classification(worker: str | None) -> Trained:
    from transformers import BertConfig, BertForSequenceClassification

    data = [{"input_ids": row["input_ids"], "labels": number % 2} for number, row in enumerate(rows(24))]
    model = BertForSequenceClassification(BertConfig(vocab_size=64, **SMALL))
    return by_trainer(model, worker, data, per_device_train_batch_size=8, learning_rate=2e-5)


def summarization(worker: str | None) -> Trained:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(  # type: ignore[call-arg]
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=6, num_heads=4, decoder_start_token_id=0, pad_token_id=0
    )
    model = T5ForConditionalGeneration(config)
    return by_trainer(model, worker, rows(24), per_device_train_batch_size=4, gradient_accumulation_steps=2)


def lora(worker: str | None) -> Trained:
    from peft import LoraConfig, TaskType, get_peft_model
    from transformers import MistralConfig, MistralForCausalLM

    adapters = LoraConfig(task_type=TaskType.CAUSAL_LM, r=8, lora_alpha=32, lora_dropout=0.1)
    config = MistralConfig(vocab_size=64, num_key_value_heads=2, sliding_window=16, **SMALL)
    model = get_peft_model(MistralForCausalLM(config), adapters)
    return by_trainer(model, worker, rows(24), per_device_train_batch_size=2, bf16=True, gradient_accumulation_steps=4)


def _words() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(61))]
    words = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=32
    )


def _texts() -> list[str]:
    return [" ".join(f"w{int(token) - 3}" for token in row["input_ids"]) for row in rows(24)]


def _qwen() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(vocab_size=64, num_key_value_heads=2, head_dim=8, **SMALL))


def _by_trl(kind: str, worker: str | None, columns: dict[str, list[str]], **arguments: Any) -> Trained:
    import trl
    from datasets import Dataset
    from peft import LoraConfig

    from backhaul.integrations.transformers import BackhaulCallback

    callback = BackhaulCallback(worker)
    with tempfile.TemporaryDirectory() as folder:
        trainer = getattr(trl, f"{kind}Trainer")(
            model=_qwen(),
            args=getattr(trl, f"{kind}Config")(
                output_dir=folder,
                use_cpu=True,
                report_to="none",
                disable_tqdm=True,
                save_strategy="no",
                max_steps=3,
                per_device_train_batch_size=2,
                **arguments,
            ),
            train_dataset=Dataset.from_dict(columns),
            processing_class=_words(),
            peft_config=LoraConfig(r=16, lora_alpha=16, task_type="CAUSAL_LM"),
            callbacks=[] if worker is None else [callback],
        )
        trainer.train()
    return trainer.model, None if worker is None else callback.report()


def sft(worker: str | None) -> Trained:
    return _by_trl("SFT", worker, {"text": _texts()}, learning_rate=2e-4, gradient_accumulation_steps=4)


def dpo(worker: str | None) -> Trained:
    texts = _texts()
    columns = {"prompt": texts, "chosen": texts[::-1], "rejected": [*texts[3:], *texts[:3]]}
    return _by_trl("DPO", worker, columns, learning_rate=5e-6, gradient_accumulation_steps=2)


def _denoise(model: Any, worker: str | None, *conditions: torch.Tensor) -> Trained:
    from diffusers import DDPMScheduler

    from backhaul.integrations import diffusers

    session = None if worker is None else diffusers.enable(model, worker)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    noise_scheduler: Any = DDPMScheduler(num_train_timesteps=1000)
    model.train()
    for _ in range(3):
        images = torch.randn(2, model.config.in_channels, 16, 16)
        noise, timesteps = torch.randn(images.shape), torch.randint(0, 1000, (2,))
        noisy = noise_scheduler.add_noise(images, noise, timesteps)
        prediction = model(noisy, timesteps, *conditions, return_dict=False)[0]
        torch.nn.functional.mse_loss(prediction, noise).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if session is None:
        return model, None
    session.close()
    return model, session.report()


def unconditional_images(worker: str | None) -> Trained:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=2,
        block_out_channels=(16, 16, 32),
        norm_num_groups=8,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    )
    return _denoise(model, worker)


def text_to_image_lora(worker: str | None) -> Trained:
    from diffusers import UNet2DConditionModel
    from peft import LoraConfig

    model: Any = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=2,
        norm_num_groups=8,
        cross_attention_dim=16,
        attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    model.requires_grad_(False)
    targets = ["to_k", "to_q", "to_v", "to_out.0"]
    model.add_adapter(LoraConfig(r=4, lora_alpha=4, init_lora_weights="gaussian", target_modules=targets))
    return _denoise(model, worker, torch.randn(2, 5, 16))


CONFIGURATIONS: dict[str, Callable[[str | None], Trained]] = {
    "Transformers `run_clm.py`": language_modeling,
    "Transformers `run_glue.py`": classification,
    "Transformers `run_summarization.py`": summarization,
    "PEFT `causal_language_modeling`": lora,
    "TRL `sft.py`": sft,
    "TRL `dpo.py`": dpo,
    "diffusers `train_unconditional.py`": unconditional_images,
    "diffusers `train_text_to_image_lora.py`": text_to_image_lora,
}
"""Configurations by their rows in docs/integrations/index.md."""


def assert_configuration_travels(row: str, worker: str) -> float:
    """Trains a configuration twice and compares the parameters bitwise. Returns the share that can travel."""
    models = []
    with patient_sessions():
        for address in (None, worker):
            torch.manual_seed(0)
            model, report = CONFIGURATIONS[row](address)
            models.append(model)
    assert report is not None
    assert_equal_states(*models)
    calls = sum(segment.calls for segment in report.segments)
    assert report.fallbacks < calls / 2, report
    return report.travels + report.fallbacks / calls  # a starved worker says nothing about what can travel

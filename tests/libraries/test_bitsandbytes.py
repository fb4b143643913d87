"""Quantised models with adapters (QLoRA), against the real libraries: bitsandbytes and PEFT."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul import Decision, Session
from conftest import QUIET
from support.bits import same_bits
from support.processes import WorkerProcess

bitsandbytes = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

STEPS = 20
FAKE_KERNELS = """
import os
open(os.environ["FETCHED"], "a").write("imported")
def get_kernel(*args, **kwargs):
    open(os.environ["FETCHED"], "a").write("fetched")
    raise RuntimeError("no network")
"""


@pytest.fixture(scope="module")
def operators() -> Iterator[WorkerProcess]:
    """A worker whose operator allows bitsandbytes and BLOOM's own function."""
    names = ["bitsandbytes", "transformers.models.bloom.modeling_bloom"]
    with WorkerProcess("--memory", "2GiB", "--allow", *names, environment={"OMP_NUM_THREADS": "1"}) as process:
        yield process


@pytest.fixture
def allowed(operators: WorkerProcess) -> Iterator[Session]:
    """A session on that worker."""
    with backhaul.connect(operators.address, settings=QUIET) as session:
        yield session


def _quantised(linear: nn.Linear, bits: int) -> nn.Module:
    size: tuple[int, int] = (linear.in_features, linear.out_features)
    if bits == 4:
        four: Any = bitsandbytes.nn.Linear4bit(*size, bias=False, compute_dtype=torch.float32, quant_type="nf4")
        four.weight = bitsandbytes.nn.Params4bit(
            linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True, module=four
        )
        return four.to("cpu")
    eight: Any = bitsandbytes.nn.Linear8bitLt(*size, bias=False, has_fp16_weights=False)
    eight.weight = bitsandbytes.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
    return eight.to("cpu")


def _quantise(module: nn.Module, bits: int) -> None:
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear) and name != "lm_head":
            setattr(module, name, _quantised(child, bits))
        else:
            _quantise(child, bits)


def qlora(bits: int) -> nn.Module:
    """A tiny Llama with quantised layers and adapters, ready to train."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    _quantise(model, bits)
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.1)
    adapted: Any = peft.get_peft_model(peft.prepare_model_for_kbit_training(model, False), adapters)
    adapted.enable_input_require_grads()
    adapted.train()
    return adapted


def trained(
    model: nn.Module, session: Session | None, *, micro_batches: int = 1, **options: Any
) -> list[Tensor | None]:
    """Returns losses and all gradients of twenty steps."""
    if session is not None:
        layer = transformers.models.llama.modeling_llama.LlamaDecoderLayer
        backhaul.wrap(model, layer, session=session, **options)
    taking = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(taking, lr=1e-2)
    results: list[Tensor | None] = []
    torch.manual_seed(5)
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses: list[Tensor] = []

        def backward(losses: list[Tensor] = losses) -> None:
            for _ in range(micro_batches):
                tokens = torch.randint(0, 128, (2, 16))
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                losses.append(loss.detach())

        if session is not None and micro_batches > 1:
            with session.accumulate():
                backward()
        else:
            backward()
        results += [*losses, *[None if p.grad is None else p.grad.clone() for p in taking]]
        optimizer.step()
    return results


@pytest.mark.parametrize("returns", ["gradients", "activations"])
@pytest.mark.parametrize("bits", [4, 8])
def test_qlora_is_exact_on_a_worker(bits: int, returns: str, allowed: Session) -> None:
    same_bits(trained(qlora(bits), allowed, returns=returns), trained(qlora(bits), None))
    report = allowed.report()
    (segment,) = report.segments
    assert segment.calls == 4 * STEPS
    assert report.remote >= 0.9 * segment.calls, report
    expected = Decision.GRADIENTS if returns == "gradients" else Decision.ACTIVATIONS
    assert segment.decisions.get(expected, 0) >= 0.9 * segment.calls, report


@pytest.mark.parametrize("bits", [4, 8])
def test_qlora_without_the_option_names_it(bits: int, session: Session) -> None:
    same_bits(trained(qlora(bits), session), trained(qlora(bits), None))
    report = session.report()
    assert report.remote == 0
    assert [reason.endswith("(a worker with --allow bitsandbytes would run it)") for reason in report.segments[0].kept]


def test_micro_batches_of_qlora(allowed: Session) -> None:
    same_bits(trained(qlora(4), allowed, micro_batches=3), trained(qlora(4), None, micro_batches=3))
    assert allowed.report().fallbacks == 0


def test_a_worker_that_is_lost_costs_nothing_but_time() -> None:
    model = qlora(4)
    with (
        WorkerProcess("--memory", "1GiB", "--allow", "bitsandbytes") as process,
        backhaul.connect(process.address, settings=QUIET) as session,
    ):
        torch.manual_seed(5)
        tokens = torch.randint(0, 128, (2, 16))
        backhaul.wrap(model, transformers.models.llama.modeling_llama.LlamaDecoderLayer, session=session)
        loss = model(input_ids=tokens, labels=tokens).loss
        process.kill()
        loss.backward()
        assert session.report().segments[0].decisions[Decision.TRAINER] == 4
    plain = qlora(4)
    torch.manual_seed(5)
    tokens = torch.randint(0, 128, (2, 16))
    plain(input_ids=tokens, labels=tokens).loss.backward()
    same_bits([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_blooms_own_gelu(allowed: Session) -> None:
    def step(session: Session | None) -> list[Tensor | None]:
        torch.manual_seed(0)
        config = transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=64, use_cache=False)
        model = transformers.BloomForCausalLM(config).train()
        if session is not None:
            backhaul.wrap(model, transformers.models.bloom.modeling_bloom.BloomBlock, session=session)
        tokens = torch.randint(0, 64, (2, 8))
        model(input_ids=tokens, labels=tokens).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    same_bits(step(allowed), step(None))
    assert (allowed.report().remote, allowed.report().fallbacks) == (2, 0), allowed.report()


def test_a_worker_fetches_no_kernels(tmp_path: Path) -> None:
    """On some CPUs bitsandbytes downloads code as soon as the package `kernels` is installed."""
    (tmp_path / "kernels.py").write_text(FAKE_KERNELS)
    environment = {"PYTHONPATH": str(tmp_path), "FETCHED": str(tmp_path / "fetched")}
    with (
        WorkerProcess("--memory", "1GiB", "--allow", "bitsandbytes", environment=environment) as process,
        backhaul.connect(process.address, settings=QUIET) as session,
    ):
        same_bits(trained(qlora(4), session), trained(qlora(4), None))
        assert session.report().remote == 4 * STEPS
    assert not (tmp_path / "fetched").exists()
    assert os.environ.get("FETCHED") is None

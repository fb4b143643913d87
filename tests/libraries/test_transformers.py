"""examples/integrations/with_transformers.py, and models of Transformers in loops of one's own."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

import backhaul
from support.libraries import assert_trains_equally
from support.processes import WorkerProcess

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

from backhaul.integrations.transformers import enable

TOKENS = torch.arange(12)[None] % 7


def model_of() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    return LlamaForCausalLM(config).train()


def gradients(model: Any) -> list[Tensor]:
    model.zero_grad()
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_the_example_trains_as_without_backhaul(worker: WorkerProcess) -> None:
    assert_trains_equally("transformers", worker.address)


def test_passes_without_gradients_and_copies_of_the_model(session: backhaul.Session) -> None:
    expected = gradients(model_of())
    model = model_of()
    enable(model, session=session)
    with torch.no_grad():
        model(input_ids=TOKENS)
    model.eval()
    model(input_ids=TOKENS)
    model.train()
    model.gradient_checkpointing_disable()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert all(map(torch.equal, gradients(model), expected))
    assert session.report().remote == 2
    assert all(map(torch.equal, gradients(deepcopy(model)), expected))
    assert session.report().remote == 4


def test_micro_batches_in_a_block(session: backhaul.Session) -> None:
    expected, model = model_of(), model_of()
    for _ in range(3):
        expected(input_ids=TOKENS, labels=TOKENS).loss.backward()
    enable(model, session=session)
    with session.accumulate() as step:
        for _ in range(3):
            step.backward(model(input_ids=TOKENS, labels=TOKENS).loss)
    pairs = zip(expected.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)


def test_an_error_in_forward_leaves_nothing_redirected(session: backhaul.Session) -> None:
    model = model_of()
    enable(model, session=session)
    hook = model.model.norm.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(input_ids=TOKENS)
    calls = sum(segment.calls for segment in session.report().segments)
    torch.utils.checkpoint.checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=False)
    assert sum(segment.calls for segment in session.report().segments) == calls
    hook.remove()
    assert all(map(torch.equal, gradients(model), gradients(model_of())))


def test_an_error_at_the_first_forward_if_nothing_is_checkpointed(session: backhaul.Session) -> None:
    model = model_of()
    enable(model, session=session)
    model.gradient_checkpointing_disable()
    with pytest.raises(
        backhaul.NotRemoteError, match="LlamaForCausalLM will be recomputed by a worker: it called torch"
    ):
        model(input_ids=TOKENS)


def test_a_choice_that_does_not_exist(session: backhaul.Session) -> None:
    with pytest.raises(ValueError, match="'raise', 'warn'"):
        enable(model_of(), session=session, if_nothing_travels="ignore")  # type: ignore[arg-type]

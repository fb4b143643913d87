"""Real architectures: a step gives the same bits as without checkpointing, and runs where `models.FAMILIES` says."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul import Decision, Session
from backhaul._accumulate.plan import Shares
from backhaul._config import Boundaries, Local
from conftest import quiet
from numerics.models import FAMILIES, Family
from support.bits import differing, plainly, seed_generators, train
from support.blocks import loop
from support.processes import WorkerProcess


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[None]:
    """Models are built from configurations; nothing asks the hub for a file or a kernel."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_HUB_OFFLINE", "1")
        yield


def one_step(
    family: Family, prepare: Callable[[nn.Module], object] = lambda model: None, steps: int = 1
) -> list[Tensor | None]:
    """Losses, gradients, buffers and the generator's state after steps of a model that was prepared first."""

    def build() -> nn.Module:
        model = family.build().train()
        prepare(model)
        return model

    return train(plainly, build, lambda _, model: (family.loss(model), ()), steps=steps)


def classes(model: nn.Module, family: Family) -> tuple[type[nn.Module], ...]:
    return tuple({type(module) for module in model.modules() if type(module).__name__ in family.segments})


@pytest.mark.slow
@pytest.mark.parametrize("returns", ["gradients", "activations"])
@pytest.mark.parametrize("name", FAMILIES)
def test_model(name: str, returns: str, session: Session) -> None:
    family = FAMILIES[name]
    ours = one_step(family, lambda model: session.wrap(model, classes(model, family), returns=returns))
    assert differing(ours, one_step(family)) == []

    report = session.report()
    assert report.fallbacks == 0
    assert all(not segment.reasons for segment in report.segments)
    kept = {reason: count for segment in report.segments for reason, count in segment.kept.items()}
    assert kept == ({family.kept: sum(family.segments.values())} if family.kept else {})
    assert {segment.name: segment.decisions for segment in report.segments} == family.decisions(returns)


FEW = {"Llama", "BERT", "BERT, bf16 autocast", "ViT"}
"""Families whose steps with graphs are compared in each CI run."""
STEPS = 4
"""The first three calls of a kind are recorded, so what a step calls once is known in the last of them."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile says what it ignores
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("name", "autocast"),
    [
        pytest.param(name, autocast, marks=() if name in FEW else pytest.mark.nightly)
        for name, family in FAMILIES.items()
        for autocast in ((False, True) if not family.autocast else (True,))
        if not autocast or family.autocast or f"{name}, bf16 autocast" not in FAMILIES
    ],
)
def test_model_with_graphs(name: str, autocast: bool, worker: WorkerProcess) -> None:
    family = replace(FAMILIES[name], autocast=autocast)
    expected = one_step(family, steps=STEPS)
    with backhaul.connect(worker.address, graphs="eager", settings=quiet()) as session:
        ours = one_step(family, lambda model: session.wrap(model, classes(model, family)), STEPS)
        report = session.report()
    assert differing(ours, expected) == []
    assert report.fallbacks == 0
    calls = STEPS * sum(family.segments.values())
    assert sum(segment.calls for segment in report.segments) == calls
    assert report.remote >= (0 if family.kept else 0.9 * calls)
    recorded = [reason for segment in report.segments for reason in segment.recorded]
    if family.recorded:
        assert family.recorded in recorded or all(reason.startswith(family.recorded) for reason in recorded)
    else:
        assert recorded == []
        assert sum(segment.known for segment in report.segments) == calls - 3 * family.kinds


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "BERT, bf16 autocast", "ViT"])
def test_model_with_inductors_kernels(name: str) -> None:
    family = FAMILIES[name]

    def compile_layers(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, classes(model, family)):
                module.compile()

    expected = one_step(family, compile_layers, 2)
    with backhaul.connect(graphs="inductor", settings=quiet()) as session:
        ours = one_step(family, lambda model: session.wrap(model, classes(model, family)), 2)
        report = session.report()
    assert differing(ours, expected) == []
    assert sum(segment.known for segment in report.segments) == 2 * sum(family.segments.values())


@pytest.mark.parametrize("name", FAMILIES)
def test_dropout_is_on_where_a_model_has_it(name: str) -> None:
    family = FAMILIES[name]
    in_training = one_step(family)[-1]
    in_evaluation = one_step(family, nn.Module.eval)[-1]
    assert (differing([in_training], [in_evaluation]) == []) is not family.draws


@dataclass(frozen=True)
class OwnCheckpointing:
    """What a library's switch for gradient checkpointing makes a segment, and what becomes of it."""

    switch: str
    calls: Mapping[str, int]
    decisions: Mapping[str, Mapping[Decision, int]]
    inside: Mapping[str, int] = field(default_factory=dict)


def _all_gradients(switch: str, calls: Mapping[str, int]) -> OwnCheckpointing:
    return OwnCheckpointing(switch, calls, {name: {Decision.GRADIENTS: count} for name, count in calls.items()})


TRANSFORMERS, DIFFUSERS = "gradient_checkpointing_enable", "enable_gradient_checkpointing"
OWN_CHECKPOINTING = {
    "Llama": _all_gradients(TRANSFORMERS, {"LlamaDecoderLayer.forward": 2}),
    "BERT, bf16 autocast": _all_gradients(TRANSFORMERS, {"BertLayer.forward": 2}),
    # With the switch on, the first decoder block makes a bias of zeros for cross attention and lets it require grad.
    "T5": OwnCheckpointing(
        TRANSFORMERS,
        {"T5Block.forward": 4},
        # Of the first encoder block gradients come in two stages.
        {"T5Block.forward": {Decision.GRADIENTS: 4, Decision.ACTIVATIONS: 1}},
        {"it returns a tensor whose requires_grad it turned on": 1},
    ),
    "Mixtral": _all_gradients(TRANSFORMERS, {"MixtralDecoderLayer.forward": 2}),
    "U-Net": _all_gradients(DIFFUSERS, {"ResnetBlock2D": 7, "BasicTransformerBlock": 4}),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", OWN_CHECKPOINTING)
def test_a_librarys_own_checkpointing_runs_remotely(name: str, session: Session) -> None:
    family, own = FAMILIES[name], OWN_CHECKPOINTING[name]
    expected = one_step(family)
    with ExitStack() as stack:

        def prepare(model: nn.Module) -> None:
            getattr(model, own.switch)()  # as people do it: where the model is made
            stack.enter_context(session.patched())

        ours = one_step(family, prepare)
    assert differing(ours, expected) == []

    report = session.report()
    assert report.fallbacks == 0
    assert {segment.name: segment.calls for segment in report.segments} == own.calls
    assert {segment.name: segment.decisions for segment in report.segments} == own.decisions
    assert {reason: n for segment in report.segments for reason, n in segment.inside.items()} == own.inside
    assert not any(segment.kept for segment in report.segments)


def test_the_documentation_says_the_same() -> None:
    root = Path(__file__).parents[2]
    said = (root / "docs/models.md").read_text()
    for name, family in FAMILIES.items():
        segments = ", ".join(f"{calls} `{layer}`" for layer, calls in family.segments.items())
        where = [family.returned(returns) for returns in ("gradients", "activations")]
        why = family.keeps or family.kept
        assert f"| {name} | {segments} | {'on' if family.draws else 'none'} | {' | '.join(where)} | {why} |\n" in said
        known = "recorded" if family.recorded else f"{STEPS * sum(family.segments.values()) - 3 * family.kinds} known"
        assert f"| {name} | {known} | {family.kinds} | {family.recorded} |\n" in said
    for name, own in OWN_CHECKPOINTING.items():
        segments = ", ".join(f"{calls} `{layer}`" for layer, calls in own.calls.items())
        totals = sum((Counter(done) for done in own.decisions.values()), Counter())
        counts = ", ".join(f"{count} {decision.value}" for decision, count in totals.items())
        assert f"| {name} | {segments} | {counts} | {', '.join(own.inside)} |\n" in said
    pinned = dict(line.split("==") for line in (root / "constraints.txt").read_text().splitlines() if "==" in line)
    for name in ("torch", "transformers", "diffusers"):
        assert f"{name} {pinned[name]}" in said


def _block_of(family: Family, micro_batches: int, session: Session | None, local: Local) -> list[Tensor | None]:
    """Gradients, buffers and the generator's state after an accumulated step, in a block if there is a session."""
    seed_generators(0)
    model = family.build().train()
    if session is not None:
        session.wrap(model, classes(model, family))
    with session.accumulate(local) if session is not None else loop() as block:
        for _ in range(micro_batches):
            block.backward(family.loss(model) / micro_batches)
    gradients = [parameter.grad for parameter in model.parameters()]
    return [*gradients, *(buffer.clone() for buffer in model.buffers()), torch.get_rng_state()]


IN_BLOCKS = [
    pytest.param(name, marks=pytest.mark.nightly) if "," in name or name in {"T5", "U-Net", "Mamba"} else name
    for name in FAMILIES
]
"""Variants of a family and models of many small ops take longest. `test_model` has them all."""


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_BLOCKS)
def test_model_in_a_block(name: str, worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each way once. `test_random_blocks` has the combinations."""
    expected = _block_of(FAMILIES[name], 3, None, "recompute")
    ways: list[tuple[int, int, Local, Boundaries]] = [
        (0, 0, "recompute", "send"),
        (1, 0, "keep", "derive"),
        (0, 1, "recompute", "derive"),
    ]
    for share, last, local, boundaries in ways:
        monkeypatch.setattr(Shares, "trainers_share", lambda self, share=share: share)
        monkeypatch.setattr(Shares, "last_segments", lambda self, number, *_, last=last: last if number > 2 else 0)
        with backhaul.connect(worker.address, settings=quiet(boundaries=boundaries)) as session:
            ours = _block_of(FAMILIES[name], 3, session, local)
            assert session.report().fallbacks == 0, session.report()
        assert differing(ours, expected) == [], (share, last, boundaries)

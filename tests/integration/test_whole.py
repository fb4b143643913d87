"""Whole micro-batches: the trainer runs no forward of them, and everything has the bits of the loop."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import backhaul
from backhaul import AccumulationError, Session, Settings
from backhaul._accumulate.whole_shares import LEARNING
from backhaul_proto.v1 import telemetry_pb2
from backhaul_runtime.errors import Refusal
from conftest import QUIET, quiet, wait_until
from support.bits import differing
from support.processes import WorkerProcess
from support.whole import SHARE, Language, Layer, batch, cross_entropy, most_remote, train, whole_in

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("whole_share")]


@pytest.mark.parametrize(
    "options",
    [
        {"build": Language},
        {"build": partial(Language, is_tied=False)},
        {"build": partial(Language, is_adapted=True)},
        {"optimizer": partial(torch.optim.AdamW, fused=True)},
        {"clip": 0.1},
        {"prepare": nn.Module.eval},
    ],
    ids=["tied", "untied", "adapters", "fused", "clipped", "without dropout"],
)
def test_it_has_the_bits_of_the_loop(session: Session, options: dict[str, Any]) -> None:
    assert differing(train(session, **options), train(None, **options)) == []
    assert whole_in(session) == most_remote(3, 6, SHARE)
    assert session.report().fallbacks == 0


@pytest.mark.parametrize("micro_batches", [2, 4, 16])
def test_any_number_of_micro_batches(session: Session, micro_batches: int) -> None:
    ours = train(session, micro_batches=micro_batches, steps=2)
    assert differing(ours, train(None, micro_batches=micro_batches, steps=2)) == []


def test_layers_that_checkpoint_themselves_are_parts_of_the_micro_batch(session: Session) -> None:
    ours = train(session, prepare=lambda model: session.wrap(model, Layer))
    assert differing(ours, train(None)) == []
    assert whole_in(session) == most_remote(3, 6, SHARE)


def test_several_shapes_in_a_block(session: Session) -> None:
    """Each shape is a kind of its own, so the first calls of each run here."""
    ours = train(session, lengths=(5, 7), steps=5)
    assert differing(ours, train(None, lengths=(5, 7), steps=5)) == []
    assert whole_in(session) >= SHARE * 5 - 3 * LEARNING  # torch captures it again, for any length


@pytest.mark.parametrize("count", [2, 3])
def test_several_helpers(count: int) -> None:
    with ExitStack() as stack:
        workers = [stack.enter_context(WorkerProcess("--memory", "1GiB")) for _ in range(count)]
        session = stack.enter_context(backhaul.connect(",".join(one.address for one in workers), settings=QUIET))
        assert differing(train(session), train(None)) == []
        assert whole_in(session) == most_remote(3, 6, SHARE)
        assert all(sum(one.segments for one in worker.telemetry().sessions) == 0 for worker in workers)


def test_a_scaled_loss(session: Session) -> None:
    """The scale of a GradScaler is a tensor that changes from step to step, and is not trained."""

    def results(session: Session | None) -> list[Tensor]:
        scale = torch.tensor(1024.0)

        def scaled(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
            return cross_entropy(model, tokens, targets) * scale

        def happens(step: int, number: int) -> None:
            if not number:
                scale.mul_(0.5)

        return train(session, loss=scaled, happens=happens)

    assert differing(results(session), results(None)) == []
    assert whole_in(session) == most_remote(3, 6, SHARE)


def test_autocast_inside_the_function(session: Session) -> None:
    def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return cross_entropy(model, tokens, targets)

    assert differing(train(session, loss=loss), train(None, loss=loss)) == []
    assert whole_in(session) == most_remote(3, 6, SHARE)


@pytest.mark.parametrize("build", [Language, partial(Language, is_adapted=True)], ids=["trained", "adapters"])
def test_what_the_user_has_compiled_counts_as_it_is_compiled(session: Session, build: Callable[[], nn.Module]) -> None:
    """It is asked for values that torch.compile does not see, so that its graph runs other ops."""

    def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        is_even = torch.compiler.is_compiling() or bool(tokens.sum() >= 0)
        return cross_entropy(model, tokens, targets) * (2 if is_even else 1)

    compiled = torch.compile(loss, backend="backhaul")
    assert differing(train(session, build, compiled), train(None, build, loss)) == []
    assert whole_in(session) == SHARE * 3 - 1  # one call is recorded
    assert session.report().fallbacks == 0


def test_a_function_with_kernels_of_its_own_runs_here(session: Session) -> None:
    compiled = torch.compile(cross_entropy, backend="backhaul", options={"kernels": "inductor"})
    with pytest.raises(Refusal, match="compiled with Inductor's kernels"):
        session.graphs.unseen(compiled, (Language(), *batch(0, 1)[0]), {}, None)


def test_torchs_own_checkpoint_inside_is_a_part_of_the_micro_batch(session: Session) -> None:
    def checkpointed(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        x = model.embedding(tokens)
        for layer in model.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return functional.cross_entropy(model.head(x).flatten(0, 1), targets.flatten())

    compiled = torch.compile(checkpointed, backend="backhaul")
    assert differing(train(session, loss=compiled), train(None, loss=checkpointed)) == []
    assert whole_in(session) == SHARE * 3 - 1


def test_nothing_travels_but_the_inputs(session: Session) -> None:
    """No boundary, no weight that the worker has, no gradient before the sum."""
    train(session, steps=2, optimizer=partial(torch.optim.SGD, weight_decay=0.0))
    before = session.report()
    model_bytes = sum(parameter.nbytes for parameter in Language().parameters())
    train(session, steps=1)
    after = session.report()
    assert after.down_bytes - before.down_bytes < 1.5 * model_bytes + 4_000 * SHARE


def test_dashboards_see_them_as_calls_without_a_forward(worker: WorkerProcess) -> None:
    with backhaul.connect(worker.address, settings=quiet(telemetry=True)) as session:
        train(session)

        def calls() -> list[Any]:
            reports = [received.report for received in worker.reports() if received.report.run.id == session.run]
            every = [call for report in reports for call in report.calls if call.name == "cross_entropy"]
            return [call for call in every if call.decision]

        wait_until(lambda: len(calls()) == SHARE * 3, "all calls are told")
        forward = telemetry_pb2.Lane.LANE_FORWARD
        assert sum(all(span.lane != forward for span in call.spans) for call in calls()) == whole_in(session)


def test_a_changed_attribute_is_another_program(session: Session) -> None:
    class Scaled(Language):
        scale = 1.0

        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) * self.scale

    def results(session: Session | None) -> list[Tensor]:
        models: list[nn.Module] = []

        def happens(step: int, number: int) -> None:
            (model,) = models
            model.scale = 1.0 if step < 3 else 0.5  # type: ignore[assignment]

        return train(session, build=Scaled, prepare=models.append, happens=happens, steps=5)

    assert differing(results(session), results(None)) == []
    assert whole_in(session) > SHARE


def test_an_error_of_the_function_reaches_the_caller(session: Session) -> None:
    model = Language()
    for _ in range(2):
        with pytest.raises(IndexError), session.accumulate() as block:
            block.run(cross_entropy, model, torch.tensor([[TOO_LARGE]]), torch.tensor([[0]]))
    assert all(parameter.grad is None for parameter in model.parameters())


TOO_LARGE = 1_000


@pytest.mark.parametrize("function", [lambda model, x: None, lambda model, x: [], lambda model, x: {"other": x}])
def test_a_function_without_a_loss_is_refused(session: Session, function: Callable[..., Any]) -> None:
    with pytest.raises(AccumulationError, match="returns a loss"), session.accumulate() as block:
        block.run(function, Language(), torch.zeros(2))


@pytest.mark.parametrize("shape", ["tuple", "mapping"])
def test_what_it_returns_beside_the_loss(session: Session, shape: str) -> None:
    model, tokens, targets = Language().eval(), *batch(0, 1)[0]

    def loss(tokens: Tensor, targets: Tensor) -> Any:
        logits = model(tokens)
        one = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return (one, logits) if shape == "tuple" else {"logits": logits, "loss": one}

    with session.accumulate() as block:
        returned = [block.run(loss, tokens, targets) for _ in range(6)]
    parts = [list(one) if isinstance(one, tuple) else [one["loss"], one["logits"]] for one in returned]
    assert all(type(part) is Tensor and not part.requires_grad for one in parts for part in one)
    assert all(torch.equal(one, model(tokens)) for _, one in parts)


def test_a_parameter_that_it_returns_takes_no_gradients(session: Session) -> None:
    model, tokens, targets = Language(), *batch(0, 1)[0]

    def loss(tokens: Tensor, targets: Tensor) -> Any:
        return cross_entropy(model, tokens, targets), model.head.weight

    with session.accumulate() as block:
        weights = [block.run(loss, tokens, targets)[1] for _ in range(6)]
    assert whole_in(session) == 1
    assert all(torch.equal(one, model.head.weight) and not one.requires_grad for one in weights)


def test_a_share_that_is_rechecked_has_the_same_bits(worker: WorkerProcess) -> None:
    with backhaul.connect(worker.address, settings=quiet(whole_recheck=1.0)) as session:
        assert differing(train(session), train(None)) == []
        rechecked = sum(segment.rechecked for segment in session.report().segments)
        assert rechecked == whole_in(session) == most_remote(3, 6, SHARE)


def test_settings_refuse_a_share_that_is_none() -> None:
    with pytest.raises(backhaul.SettingError):
        Settings(whole_recheck=1.5)

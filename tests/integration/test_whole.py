"""Whole micro-batches: the trainer runs no forward of them, and everything has the bits of the loop."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import backhaul
from backhaul import AccumulationError, Session, Settings
from backhaul._accumulate.whole_shares import LEARNING, WholeShares
from backhaul_proto.v1 import telemetry_pb2
from backhaul_runtime.errors import Refusal
from conftest import QUIET, quiet, wait_until
from support.bits import differing
from support.processes import WorkerProcess
from support.whole import WIDTH, Language, Layer, alone, batch, cross_entropy, most_remote, reasons_in, train, whole_in

pytestmark = pytest.mark.slow
SHARE = 4


@pytest.fixture(autouse=True)
def share(monkeypatch: pytest.MonkeyPatch, fresh_compiler: None) -> None:
    """Workers get this many micro-batches of each block, however fast they are."""
    monkeypatch.setattr(WholeShares, "first", lambda self: SHARE)


@pytest.fixture
def session(worker: WorkerProcess) -> Iterator[Session]:
    with backhaul.connect(worker.address, settings=QUIET) as session:
        yield session


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


@pytest.mark.parametrize("is_seen", [False, True])
def test_a_sum_that_the_loop_keeps_waits_for_nothing(session: Session, *, is_seen: bool) -> None:
    """Unless somebody else sees its memory."""
    model = Language().eval()
    for step in range(2):
        total = torch.zeros(())
        seen = total.detach() if is_seen else None
        with session.accumulate() as block:
            for tokens, targets in batch(step, 6):
                total += block.run(cross_entropy, model, tokens, targets)
        expected = torch.zeros(())
        for one in batch(step, 6):
            expected += cross_entropy(model, *one).detach()
        assert type(total) is Tensor
        assert torch.equal(total, expected)
        assert seen is None or torch.equal(seen, expected)
    assert bool(sum(one.losses_read for one in session.report().segments)) == is_seen


def test_what_is_read_inside_the_block_waits_and_is_counted(session: Session) -> None:
    model, losses, means = Language(), [], []
    for step in range(2):
        total: Any = 0.0
        with session.accumulate() as block:
            for tokens, targets in batch(step, 6):
                loss = block.run(cross_entropy, model, tokens, targets)
                total += loss.detach()
                if step:
                    losses.append(loss.item())
            mean = total / 6
        means.append(float(mean))
        assert type(total) is type(mean) is Tensor
    expected = [cross_entropy(model, *one) for one in batch(1, 6)]  # dropout draws others
    assert len(losses) == len(expected)
    assert means[1] == pytest.approx(sum(losses) / 6)  # another order of additions, in float64
    assert whole_in(session) == SHARE * 2 - LEARNING
    assert sum(one.losses_read for one in session.report().segments) == SHARE  # of the second step


def writes_to_an_alias(total: list[Tensor], loss: Tensor) -> Tensor:
    alias = loss.detach()
    alias.mul_(3)
    return loss


def writes_to_what_has_an_alias(total: list[Tensor], loss: Tensor) -> Tensor:
    alias = loss.detach().detach()
    loss.mul_(3)
    return alias * 2


def adds_to_an_alias_of_the_first(total: list[Tensor], loss: Tensor) -> Tensor:
    if not total:
        total.append(loss.detach())
        return loss
    total[0] += loss
    return total[0].clone()


def adds_in_inference_mode(total: list[Tensor], loss: Tensor) -> Tensor:
    with torch.inference_mode():
        total.append(torch.zeros(()).add_(loss))
        return loss * 2 + loss.detach()


def calls_a_compiled_function(total: list[Tensor], loss: Tensor) -> Tensor:
    return torch.compile(lambda x: x * 2 + 1, backend="eager")(loss)


@pytest.mark.parametrize(
    "use",
    [
        writes_to_an_alias,
        writes_to_what_has_an_alias,
        adds_to_an_alias_of_the_first,
        adds_in_inference_mode,
        calls_a_compiled_function,
    ],
    ids=lambda use: use.__name__,
)
def test_what_a_block_does_with_a_loss(session: Session, use: Callable[[list[Tensor], Tensor], Tensor]) -> None:
    def results(session: Session | None) -> list[Tensor]:
        torch.manual_seed(0)
        model, used = Language(), list[Tensor]()
        for step in range(2):
            total: list[Tensor] = []
            with alone() if session is None else session.accumulate() as block:
                used += [use(total, block.run(cross_entropy, model, *one)) for one in batch(step, 6)]
            used += total
        assert all(type(one) is Tensor for one in used)
        return used

    assert differing(results(session), results(None)) == []
    assert whole_in(session) == most_remote(2, 6, SHARE)


def test_many_threads_read_a_loss(session: Session) -> None:
    model, values = Language().eval(), list[Tensor]()
    with session.accumulate() as block:
        losses = [block.run(cross_entropy, model, *one) for one in batch(0, 1) * SHARE]
        threads = [threading.Thread(target=lambda: values.append(losses[-1] / 1)) for _ in range(2)]
        threads += [threading.Thread(target=lambda: values.append(losses[-1].sqrt())) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    loss = cross_entropy(model, *batch(0, 1)[0])
    assert len(values) == len(threads)
    assert all(torch.equal(value, loss) or torch.equal(value, loss.sqrt()) for value in values)
    assert whole_in(session) == 1


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


CHANGED: list[Any] = []
COUNTS = {"calls": 0.0}


def appends(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    loss = cross_entropy(model, tokens, targets)
    CHANGED.append(loss.detach())
    return loss


def sets_an_attribute(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    loss = cross_entropy(model, tokens, targets)
    model.last = loss.detach()
    return loss


def counts_calls(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    COUNTS["calls"] += 1.0
    return cross_entropy(model, tokens, targets) * COUNTS["calls"]


def sets_a_global(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    global LAST
    loss = cross_entropy(model, tokens, targets)
    LAST = loss.detach()
    return loss


LAST: Tensor | None = None
WRITTEN = torch.zeros(())


def writes_to_a_tensor(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    loss = cross_entropy(model, tokens, targets)
    WRITTEN.copy_(loss.detach())
    return loss


def reads_what_it_wrote(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    loss = cross_entropy(model, tokens, targets) * (1 + WRITTEN)
    with torch.no_grad():
        WRITTEN.add_(0.25)
    return loss


def prints(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    print("a micro-batch")  # noqa: T201
    return cross_entropy(model, tokens, targets)


def draws_in_python(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    import random

    return cross_entropy(model, tokens, targets) * random.random()


def draws_in_numpy(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    import numpy as np

    return cross_entropy(model, tokens, targets) * float(np.random.rand())


def reads_a_value(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    loss = cross_entropy(model, tokens, targets)
    return loss * 2 if loss.item() > 1 else loss


def hooks_a_tensor(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(tokens)
    logits.register_hook(lambda gradient: gradient * 2)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def returns_two(model: nn.Module, tokens: Tensor, targets: Tensor) -> Any:
    logits = model(tokens)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    "loss",
    [
        appends,
        sets_an_attribute,
        counts_calls,
        sets_a_global,
        writes_to_a_tensor,
        reads_what_it_wrote,
        prints,
        draws_in_python,
        draws_in_numpy,
        reads_a_value,
        hooks_a_tensor,
    ],
    ids=lambda function: function.__name__,
)
def test_what_a_worker_cannot_do_runs_here_with_the_reason(
    session: Session, loss: Callable[..., Tensor], capfd: pytest.CaptureFixture[str]
) -> None:
    def results(session: Session | None) -> list[Any]:
        import random

        import numpy as np

        random.seed(0)
        np.random.seed(0)
        CHANGED.clear()
        COUNTS["calls"] = 0.0
        WRITTEN.zero_()
        trained = train(session, loss=loss)
        last = [] if LAST is None else [LAST]
        return [
            *trained,
            *CHANGED,
            *last,
            WRITTEN.clone(),
            torch.tensor(COUNTS["calls"]),
            torch.tensor(random.random()),
        ]

    assert differing(results(session), results(None)) == []
    assert whole_in(session) == 0
    (reason,) = reasons_in(session)
    assert reason
    if loss is prints:
        assert capfd.readouterr().out.count("a micro-batch") == 2 * 3 * 6


class Normed(Language):
    """With statistics that forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens).flatten(0, 1)).unflatten(0, tokens.shape)
        logits: Tensor = self.head(x)
        return logits


def test_statistics_are_written_here(session: Session) -> None:
    assert differing(train(session, build=Normed), train(None, build=Normed)) == []
    assert reasons_in(session) == ["it writes to an input, as BatchNorm does to its statistics"]


def test_hooks_of_parameters_are_called_here(session: Session) -> None:
    def hook(model: nn.Module) -> None:
        next(model.parameters()).register_hook(lambda gradient: gradient * 2)

    assert differing(train(session, prepare=hook), train(None, prepare=hook)) == []
    assert reasons_in(session) == ["a parameter has hooks, which see each gradient"]


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

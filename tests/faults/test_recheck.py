"""Recheck: a worker whose backward is wrong is found, although its digests are right, and gets nothing any more."""

import gc
import itertools
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul import RecheckError, Session, SettingError, Settings
from backhaul._backward import local_recompute
from backhaul._backward.recheck import Rechecks
from backhaul._backward.remote_side import RemoteAnswer
from backhaul._config import Boundaries
from backhaul._observe.report import Decision
from backhaul._worker_client.remote_segment import SavedSegment
from backhaul_runtime.errors import WorkerError
from backhaul_runtime.replay.replay import Contribution, Replay
from backhaul_runtime.torch_internals.private import call_when_backward_ends
from conftest import QUIET, wait_until
from support.bits import differing, grad_of
from support.processes import WorkerProcess

LAYERS, WIDTH = 20, 8
SEEDS = [0, *[pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 5)]]
STEPS = 24
"""Within so many steps a share of 0.5 misses one wrong gradient of each step with a probability of 6e-8."""

LIAR = """
import sys
import torch
from backhaul_runtime.replay.replay import Contribution, Replay

wrong, of, bit, count = *map(int, sys.argv[1:4]), 0
backward = Replay.backward

def with_a_flipped_bit(self, gradients, **options):
    global count
    contributions, count = backward(self, gradients, **options), count + 1
    if count % of != wrong:
        return contributions
    (first, *_) = [i for i, one in enumerate(contributions) if one.gradient is not None]
    flipped = contributions[first].gradient.detach().clone()
    flipped.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << bit)
    return [Contribution(one.source, flipped if i == first else one.gradient) for i, one in enumerate(contributions)]

class Flipped:
    def __init__(self, saved):
        self.saved = saved

    def unpack(self):
        tensor = self.saved.unpack().clone()
        tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << bit)
        return tensor

saved = Replay.saved
Replay.saved = lambda self, index: Flipped(saved(self, index))
Replay.backward = with_a_flipped_bit
sys.argv[1:] = sys.argv[4:]
from backhaul.__main__ import main
main()
"""


class LyingWorker(WorkerProcess):
    """A worker that flips a bit of one gradient in each round of so many backwards, before it takes any digest.

    It also flips one of each saved tensor that it returns, after the digest of that.
    """

    def __init__(
        self, wrong: int, of: int = LAYERS, bit: int = 9, environment: Mapping[str, str] | None = None
    ) -> None:
        program = "-c", LIAR, str(wrong), str(of), str(bit)
        super().__init__("--memory", "1GiB", program=program, environment=environment)


def model() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))


def step(layers: nn.ModuleList, session: Session | None, seed: int) -> list[Tensor | None]:
    """The gradients of a step: of the input, and of all parameters."""
    torch.manual_seed(seed)
    x = torch.randn(4, WIDTH, requires_grad=True)
    layers.zero_grad()
    y = x * 1
    for layer in layers:
        y = layer(y) if session is None else session.checkpoint(layer, y)
    y.square().sum().backward()
    return [grad_of(x), *[parameter.grad for parameter in layers.parameters()]]


@pytest.fixture
def keyed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The keys of the draws are known numbers, so that a test that has passed once passes again."""
    numbers = itertools.count()
    monkeypatch.setattr("os.urandom", lambda count: next(numbers).to_bytes(count, "little"))
    yield


@pytest.mark.usefixtures("keyed")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("workers", [1, 2])
def test_one_wrong_bit_is_found_and_the_gradients_are_right_from_then_on(seed: int, workers: int) -> None:
    with ExitStack() as stack:
        liar = stack.enter_context(LyingWorker(seed, LAYERS // workers))
        others = [stack.enter_context(WorkerProcess("--memory", "1GiB")) for _ in range(workers - 1)]
        addresses = ",".join(worker.address for worker in (liar, *others))
        with backhaul.connect(addresses, recheck=0.5, settings=QUIET) as session:
            found_at = None
            for number in range(STEPS):
                expected = step(model(), None, number)
                try:
                    given = step(model(), session, number)
                except RecheckError as error:
                    assert error.worker == liar.address
                    given = step(model(), session, number)  # as the error says
                if found_at is None and any("wrong gradients" in reason for reason in reasons(session)):
                    found_at = number
                if found_at is not None:
                    assert not differing(expected, given)
            assert found_at is not None


def reasons(session: Session) -> list[str]:
    return [reason for segment in session.report().segments for reason in segment.reasons]


def test_what_counted_before_is_said_and_the_worker_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([False] * 7 + [True] * LAYERS)
    monkeypatch.setattr(Rechecks, "draws", lambda _: next(drawn))
    with LyingWorker(8) as liar, backhaul.connect(liar.address, recheck=0.1, settings=QUIET) as session:
        with pytest.raises(RecheckError, match=r"wrong gradients for segment Sequential.*counted before") as raised:
            step(model(), session, 0)
        assert raised.value.worker == liar.address
        assert not differing(step(model(), None, 1), step(model(), session, 1))
        (segment,) = (segment for segment in session.report().segments if segment.name == "Sequential")
        assert segment.decisions == {Decision.GRADIENTS: 7, Decision.TRAINER: 2 * LAYERS - 7}
        assert any("wrong gradients" in text for text in segment.reasons)


def test_with_all_of_them_rechecked_a_wrong_gradient_never_counts() -> None:
    with LyingWorker(11) as liar, backhaul.connect(liar.address, recheck=1.0, settings=QUIET) as session:
        for number in range(2):
            assert not differing(step(model(), None, number), step(model(), session, number))
        assert any("wrong gradients" in reason for reason in reasons(session))


def test_a_worker_with_other_hardware_that_is_wrong_is_found() -> None:
    with (
        LyingWorker(11, bit=30, environment={"ATEN_CPU_CAPABILITY": "default"}) as liar,
        backhaul.connect(liar.address, recheck=1.0, settings=QUIET) as session,
    ):
        step(model(), session, 0)
        (segment,) = (segment for segment in session.report().segments if segment.name == "Sequential")
        assert any("wrong gradients" in reason for reason in segment.reasons)
        assert segment.rechecked == segment.decisions[Decision.GRADIENTS] == 10


def test_a_rechecked_run_has_the_bits_of_another(worker: WorkerProcess) -> None:
    with backhaul.connect(worker.address, recheck=0.5, settings=QUIET) as session:
        for number in range(3):
            expected = step(model(), None, number), torch.get_rng_state()
            given = step(model(), session, number), torch.get_rng_state()
            assert not differing([*expected[0], expected[1]], [*given[0], given[1]])
        segment = session.report().segments[0]
        assert 0 < segment.rechecked < 3 * LAYERS
        assert f"{segment.rechecked} rechecked: the trainer has computed the same gradients" in str(session.report())


def block_step(layers: nn.ModuleList, session: Session | None, seed: int) -> list[Tensor | None]:
    """The gradients of all parameters after an accumulation block of three micro-batches."""
    torch.manual_seed(seed)
    batches = torch.randn(3, 4, WIDTH)
    layers.zero_grad()
    with nullcontext() if session is None else session.accumulate() as block:
        for batch in batches:
            y = batch
            for layer in layers:
                y = layer(y) if session is None else session.checkpoint(layer, y)
            loss = y.square().sum()
            loss.backward() if block is None else block.backward(loss)
    return [parameter.grad for parameter in layers.parameters()]


@pytest.mark.usefixtures("keyed")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("workers", "boundaries"), [(1, "derive"), pytest.param(1, "send", marks=pytest.mark.nightly), (2, "send")]
)
def test_a_wrong_bit_is_found_in_blocks(seed: int, workers: int, boundaries: Boundaries) -> None:
    with ExitStack() as stack:
        liar = stack.enter_context(LyingWorker(seed, LAYERS // workers))
        others = [stack.enter_context(WorkerProcess("--memory", "1GiB")) for _ in range(workers - 1)]
        addresses = ",".join(worker.address for worker in (liar, *others))
        settings = Settings(**{**QUIET.given(), "boundaries": boundaries})
        with backhaul.connect(addresses, recheck=0.5, settings=settings) as session:
            is_found = False
            for number in range(STEPS // 3):
                layers = model()
                try:
                    given = block_step(layers, session, number)
                except RecheckError as error:
                    is_found = True
                    assert error.worker == liar.address
                    assert all(parameter.grad is None for parameter in layers.parameters())
                    given = block_step(layers, session, number)  # as the error says
                assert not is_found or not differing(block_step(model(), None, number), given)
            assert is_found


def test_a_rechecked_block_has_the_bits_of_another(worker: WorkerProcess) -> None:
    with backhaul.connect(worker.address, recheck=0.5, settings=QUIET) as session:
        for number in range(3):
            assert not differing(block_step(model(), None, number), block_step(model(), session, number))
        (segment,) = (segment for segment in session.report().segments if segment.name == "Sequential")
        assert 0 < segment.rechecked < 9 * LAYERS
        assert segment.decisions[Decision.GRADIENTS] > 3 * LAYERS


def test_a_wrong_gradient_of_a_plain_backward_ends_the_block_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rechecks, "draws", lambda self: torch._C._current_graph_task_id() != -1)  # none of the block's
    with LyingWorker(0, of=1) as liar, backhaul.connect(liar.address, recheck=0.1, settings=QUIET) as session:
        layers = model()
        with pytest.raises(RecheckError, match="have counted in accumulation block"), session.accumulate() as block:
            y = torch.randn(4, WIDTH)
            for layer in layers:
                y = session.checkpoint(layer, y)
            block.backward(y.square().sum())
            step(model(), session, 0)


@pytest.mark.parametrize("environment", [{}, {"ATEN_CPU_CAPABILITY": "default"}])
def test_activations_that_are_not_those_of_forward_are_found(environment: dict[str, str]) -> None:
    with (
        LyingWorker(0, bit=30, environment=environment) as liar,
        backhaul.connect(liar.address, recheck=1.0, returns="activations", settings=QUIET) as session,
    ):
        assert not differing(step(model(), None, 0), step(model(), session, 0))
        assert any("wrong activations" in reason for reason in reasons(session))
        (segment,) = (segment for segment in session.report().segments if segment.name == "Sequential")
        assert segment.decisions == {Decision.ACTIVATIONS: 1, Decision.TRAINER: LAYERS}


def test_wrong_activations_that_counted_before_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([False] * (LAYERS - 1) + [True])
    monkeypatch.setattr(Rechecks, "draws", lambda _: next(drawn))
    with (
        LyingWorker(0) as liar,
        backhaul.connect(liar.address, recheck=0.1, returns="activations", settings=QUIET) as session,
        pytest.raises(RecheckError, match=r"wrong activations for segment Sequential.*counted before"),
    ):
        step(model(), session, 0)


def test_a_worker_that_was_wrong_does_not_come_back_under_its_address(tmp_path: Path) -> None:
    file = tmp_path / "workers"
    with LyingWorker(0, of=1) as liar:
        file.write_text(f"{liar.address}\n")
        with backhaul.connect(f"file:{file}", recheck=1.0, settings=QUIET) as session:
            step(model(), session, 0)
            (handle,) = session._workers
            file.write_text("")
            wait_until(lambda: handle.is_leaving, "it leaves")
            gc.collect()
            wait_until(lambda: not handle.uploader.segments(), "nothing of it is needed")
            session._workers._part()
            file.write_text(f"{liar.address}\n")
            wait_until(lambda: any(not other.is_leaving for other in session._workers), "it is named again")
            assert list(session._workers) == [handle]
            assert handle.up is None
            before = session.report().remote
            step(model(), session, 0)
            assert session.report().remote == before


@pytest.mark.parametrize("share", [1e-9, 1.0])
def test_what_a_worker_computes_after_an_error_in_a_block_is_rechecked_too(
    share: float, worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward, numbers = SavedSegment.backward, itertools.count()

    def failing_once(*args: Any, **options: Any) -> RemoteAnswer:
        if next(numbers) == LAYERS // 2:
            raise WorkerError("injected")
        return backward(*args, **options)

    monkeypatch.setattr(SavedSegment, "backward", failing_once)
    with backhaul.connect(worker.address, recheck=share, settings=QUIET) as session:
        assert not differing(block_step(model(), None, 0), block_step(model(), session, 0))
        (segment,) = (segment for segment in session.report().segments if segment.name == "Sequential")
        assert segment.rechecked == (segment.decisions[Decision.GRADIENTS] if share == 1.0 else 0)
        assert next(numbers) > LAYERS  # requests went on


def test_what_counted_in_the_backward_of_another_thread_is_said_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker is found wrong in one thread while the backward of another has taken a gradient of it."""
    monkeypatch.setattr(Rechecks, "draws", lambda _: threading.current_thread().name == "finds it")
    has_counted, is_found, errors = threading.Event(), threading.Event(), list[BaseException]()

    with LyingWorker(0, of=1) as liar, backhaul.connect(liar.address, recheck=0.1, settings=QUIET) as session:

        def wait(gradient: Tensor) -> None:
            has_counted.set()
            assert is_found.wait(60)

        def counts() -> None:
            x = torch.randn(4, WIDTH, requires_grad=True)
            y = x * 1
            y.register_hook(wait)
            try:
                session.checkpoint(model()[0], y).sum().backward()
            except RecheckError as error:
                errors.append(error)

        def finds() -> None:
            session.checkpoint(model()[0], torch.randn(4, WIDTH)).sum().backward()

        threads = [threading.Thread(target=counts), threading.Thread(target=finds, name="finds it")]
        threads[0].start()
        assert has_counted.wait(60)
        threads[1].start()
        threads[1].join()
        is_found.set()
        threads[0].join()
        (error,) = errors
        assert isinstance(error, RecheckError)
        assert error.worker == liar.address


def test_a_backward_that_fails_leaves_nothing_behind(worker: WorkerProcess) -> None:
    def fail(gradient: Tensor) -> None:
        raise KeyError

    with backhaul.connect(worker.address, recheck=1e-9, settings=QUIET) as session:
        x = torch.randn(4, WIDTH, requires_grad=True)
        y = x * 1
        y.register_hook(fail)
        with pytest.raises(KeyError):
            session.checkpoint(model()[0], y).sum().backward()
        assert session._dispatcher.rechecks is not None
        assert not session._dispatcher.rechecks._unchecked


def test_the_error_comes_after_what_others_do_at_the_end_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as DistributedDataParallel, which ends its reduction there."""
    drawn = iter([False] * (LAYERS - 1) + [True])
    monkeypatch.setattr(Rechecks, "draws", lambda _: next(drawn))
    ended = list[int]()
    with LyingWorker(0) as liar, backhaul.connect(liar.address, recheck=0.1, settings=QUIET) as session:
        x = torch.randn(4, WIDTH, requires_grad=True)
        y = x * 1
        y.register_hook(lambda _: call_when_backward_ends(lambda: ended.append(1)))
        for layer in model():
            y = session.checkpoint(layer, y)
        with pytest.raises(RecheckError, match="counted before"):
            y.sum().backward()
        assert ended == [1]


def test_a_trainer_without_room_for_a_recheck_goes_on(worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> list[Contribution]:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1 GiB")

    monkeypatch.setattr(local_recompute, "gradients_here", full)
    with backhaul.connect(worker.address, recheck=1.0, settings=QUIET) as session:
        assert not differing(step(model(), None, 0), step(model(), session, 0))
        (segment,) = (segment for segment in session.report().segments if segment.name == "Sequential")
        assert segment.not_rechecked == {"OutOfMemoryError: CUDA out of memory.": LAYERS}
        assert segment.decisions == {Decision.GRADIENTS: LAYERS}


def test_inputs_that_nobody_has_any_more_are_not_repeated(
    worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "_fetch", lambda *_: None)
    with backhaul.connect(worker.address, recheck=1.0, durability="none", settings=QUIET) as session:
        assert not differing(step(model(), None, 0), step(model(), session, 0))
        (segment,) = session.report().segments
        assert all('durability="host"' in reason for reason in segment.not_rechecked)
        assert sum(segment.not_rechecked.values()) + segment.rechecked == LAYERS
        assert segment.not_rechecked


def test_a_trainer_that_cannot_repeat_its_own_gradients_says_so(
    worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, noise = Replay.backward, itertools.count(1)

    def damaged(*args: Any, **options: Any) -> list[Contribution]:
        wrong = next(noise)
        return [
            replace(one, gradient=None if one.gradient is None else one.gradient + wrong)
            for one in computed(*args, **options)
        ]

    monkeypatch.setattr(Replay, "backward", damaged)
    with backhaul.connect(worker.address, recheck=1.0, settings=QUIET) as session:
        with pytest.raises(RecheckError, match="computed its gradients twice") as raised:
            step(model(), session, 0)
        assert (raised.value.worker, raised.value.segment) == ("", "Sequential")


@pytest.mark.parametrize("noise", [1e-7, 1e-2])
def test_kernels_that_add_in_no_fixed_order_need_only_be_near(
    noise: float, worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, count = Replay.backward, itertools.count(1)

    def unordered(*args: Any, **options: Any) -> list[Contribution]:
        near = 1 + 4e-7 * next(count) + (noise if noise > 1e-4 else 0)
        return [
            replace(one, gradient=None if one.gradient is None else one.gradient * near)
            for one in computed(*args, **options)
        ]

    monkeypatch.setattr(Replay, "backward", unordered)
    with backhaul.connect(worker.address, recheck=1.0, settings=QUIET) as session:
        step(model(), session, 0)
        assert any("wrong gradients" in reason for reason in reasons(session)) == (noise > 1e-4)


@pytest.mark.parametrize("value", [-0.1, 1.5, math.nan])
def test_a_share_outside_of_0_to_1_is_an_error(value: float) -> None:
    with pytest.raises(SettingError, match="recheck=.* must be from 0 to 1"):
        backhaul.connect(recheck=value)

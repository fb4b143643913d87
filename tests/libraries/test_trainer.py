"""BackhaulCallback in the Trainer of Transformers: each training must end with the bits of one without Backhaul."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul._accumulate import guards
from backhaul._accumulate.whole_shares import WholeShares
from support.libraries import assert_trains_equally
from support.processes import WorkerProcess

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from backhaul.integrations.transformers import BackhaulCallback  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
QUIET = backhaul.Settings(silence_s=240.0)
BACKWARD = torch.autograd.backward


@pytest.fixture(autouse=True)
def nothing_stays_replaced() -> Iterator[None]:
    """Whatever a training replaced is restored, however it ended."""
    yield
    assert torch.autograd.backward is BACKWARD
    assert guards._guards._blocks == {}


class Spy(Trainer):
    """Keeps the gradients of each step before they are clipped."""

    model: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.gradients: list[list[Tensor | None]] = []
        self.micro_batches = 0
        super().__init__(*args, **kwargs)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        self.gradients.append([None if p.grad is None else p.grad.clone() for p in self.model.parameters()])
        return super()._clip_grad_norm(model)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.micro_batches += 1
        return super().compute_loss(*args, **kwargs)


class Uncounted(Spy):
    """Counts no micro-batches, which a loss that a worker computes could not."""

    compute_loss = Trainer.compute_loss


def data(rows: int = 14, length: int = 16) -> list[dict[str, Tensor]]:
    """Sequences with different numbers of labels, so that the loss depends on how many a step has in all."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 64, (rows, length), generator=generator)
    prompts = torch.randint(1, length - 2, (rows, 1), generator=generator)
    labels = tokens.masked_fill(torch.arange(length) < prompts, -100)
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def model_of(**settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, **settings
    )
    return LlamaForCausalLM(config)


def trainer_of(
    folder: Path,
    callbacks: list[Any],
    kind: type[Spy] = Spy,
    model: nn.Module | None = None,
    eval_strategy: str = "no",
    **arguments: Any,
) -> Spy:
    settings = {"gradient_accumulation_steps": 4, "num_train_epochs": 2, "save_strategy": "no", **arguments}
    return kind(
        model=model or model_of(attention_dropout=0.1),
        args=TrainingArguments(
            str(folder),
            per_device_train_batch_size=1,
            max_grad_norm=0.5,
            learning_rate=1e-2,
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            eval_strategy=eval_strategy,
            **settings,
        ),
        train_dataset=data(),
        eval_dataset=data(3),
        callbacks=callbacks,
    )


def assert_equal_trainings(expected: Spy, actual: Spy, fewest_steps: int = 4) -> None:
    """Compares gradients of all steps before clipping, the parameters at the end, and what was logged."""
    assert len(expected.gradients) == len(actual.gradients) >= fewest_steps
    for step, (ours, theirs) in enumerate(zip(actual.gradients, expected.gradients, strict=True)):
        for number, (gradient, other) in enumerate(zip(ours, theirs, strict=True)):
            assert (gradient is None) == (other is None), (step, number)
            assert gradient is None or other is None or torch.equal(gradient, other), (step, number)
    state = expected.model.state_dict()
    assert [name for name, value in actual.model.state_dict().items() if not torch.equal(value, state[name])] == []
    assert logged(expected) == logged(actual)


def logged(trainer: Spy) -> list[dict[str, Any]]:
    return [
        {
            name: value
            for name, value in entry.items()
            if not name.startswith("backhaul/") and not name.endswith(("runtime", "per_second"))
        }
        for entry in trainer.state.log_history
    ]


Train = Callable[[Spy], Any]


def compared(
    worker: WorkerProcess, tmp_path: Path, train: Train = lambda trainer: trainer.train(), **settings: Any
) -> tuple[Spy, BackhaulCallback]:
    """Trains without and with the callback, and compares both."""
    own: dict[str, Any] = settings.pop("callback", {})
    others: Callable[[], list[Any]] = settings.pop("others", list)
    build: Callable[[], nn.Module | None] = settings.pop("build", lambda: None)
    fewest_steps = settings.pop("fewest_steps", 4)
    callback = BackhaulCallback(worker.address, settings=QUIET, **own)
    trainers = [
        trainer_of(tmp_path / folder, [*others(), *callbacks], model=build(), **settings)
        for folder, callbacks in (("without", []), ("with", [callback]))
    ]
    for trainer in trainers:
        torch.manual_seed(3)
        train(trainer)
    assert_equal_trainings(trainers[0], trainers[1], fewest_steps)
    assert callback.report().travels >= 0.9, callback.report()
    assert callback.report().remote
    return trainers[1], callback


def test_the_example_trains_as_without_backhaul(worker: WorkerProcess) -> None:
    assert_trains_equally("trainer", worker.address)


def test_what_the_trainer_logs_has_the_metrics(worker: WorkerProcess, tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []

    class Tracker(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            seen.append(dict(logs))

    callback = BackhaulCallback(worker.address, settings=QUIET)
    trainer_of(tmp_path, [Tracker(), callback]).train()
    with_loss = [logs for logs in seen if "loss" in logs]
    assert with_loss
    assert all(logs["backhaul/remote_share"] == 1.0 and "backhaul/fallbacks" in logs for logs in with_loss[1:])
    assert not any(name.startswith("backhaul/") for logs in seen if "loss" not in logs for name in logs)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("is_on", [False, True])
def test_gradients_with_evaluations_and_a_resumed_training(
    worker: WorkerProcess, tmp_path: Path, steps: int, is_on: bool
) -> None:
    settings: dict[str, Any] = {
        "gradient_accumulation_steps": steps,
        "activation_checkpointing": is_on,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    trainer, callback = compared(worker, tmp_path, **settings)
    assert trainer.model.is_activation_checkpointing == is_on
    assert "backward" not in vars(trainer.accelerator)
    assert "training_step" not in vars(trainer)
    assert (callback.report().block is not None) == (steps == 4)

    resumed_by = BackhaulCallback(worker.address, settings=QUIET)
    resumed = trainer_of(tmp_path / "with", [resumed_by], **settings)
    torch.manual_seed(3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "with/checkpoint-3"))
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, trainer.model.state_dict()[name])
    assert resumed_by.report().remote


@pytest.mark.parametrize(
    "options",
    [
        {"every_n_layers": 2},
        {"use_reentrant": True},
        {"use_reentrant": False, "determinism_check": "none"},
    ],
    ids=repr,
)
def test_options_of_checkpointing(worker: WorkerProcess, tmp_path: Path, options: dict[str, Any]) -> None:
    compared(worker, tmp_path, activation_checkpointing=True, activation_checkpointing_kwargs=options)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("steps", [1, 4])
def test_blocks_can_be_chosen(worker: WorkerProcess, tmp_path: Path, accumulate: bool, steps: int) -> None:
    own = {"accumulate": accumulate}
    _, callback = compared(worker, tmp_path, callback=own, gradient_accumulation_steps=steps)
    assert (callback.report().block is not None) == accumulate


@pytest.mark.parametrize(
    "settings",
    [
        {"bf16": True},
        {"neftune_noise_alpha": 5.0},
        {"average_tokens_across_devices": False},
        {"label_smoothing_factor": 0.1},
        {"optim": "adafactor"},
        {"gradient_accumulation_steps": 5},  # the last step of an epoch has four micro-batches
        {"gradient_accumulation_steps": 20},  # one incomplete step in each epoch
        {"torch_empty_cache_steps": 1},
        {"max_steps": 5},
    ],
    ids=repr,
)
def test_arguments_of_the_trainer(worker: WorkerProcess, tmp_path: Path, settings: dict[str, Any]) -> None:
    compared(worker, tmp_path, fewest_steps=2, **settings)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_layers_are_compiled_segments(worker: WorkerProcess, tmp_path: Path) -> None:
    _, callback = compared(worker, tmp_path, callback={"graphs": "eager"}, gradient_accumulation_steps=2)
    (layer,) = [segment for segment in callback.report().segments if segment.calls]
    assert layer.known > layer.calls / 2
    assert layer.compilations


def test_whole_micro_batches(worker: WorkerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WholeShares, "first", lambda self: 2)
    options: dict[str, Any] = {"settings": QUIET, "accumulate": "whole"}
    arguments: dict[str, Any] = {"kind": Uncounted, "gradient_accumulation_steps": 3, "logging_nan_inf_filter": False}
    expected = trainer_of(tmp_path / "plain", [], model=model_of(), **arguments)
    expected.train()
    callback = BackhaulCallback(worker.address, **options)
    actual = trainer_of(tmp_path / "whole", [callback], model=model_of(), **arguments)
    actual.train()
    assert_equal_trainings(expected, actual)
    report = callback.report()
    assert sum(segment.whole for segment in report.segments) > 2
    assert sum(segment.losses_read for segment in report.segments) == 0


def test_whole_micro_batches_refuse_a_trainer_that_reads_each_loss(worker: WorkerProcess, tmp_path: Path) -> None:
    callback = BackhaulCallback(worker.address, accumulate="whole", settings=QUIET)
    with pytest.raises(ValueError, match="logging_nan_inf_filter"):
        trainer_of(tmp_path, [callback]).train()


def test_a_trainer_that_compiles_the_whole_model_is_refused(worker: WorkerProcess, tmp_path: Path) -> None:
    callback = BackhaulCallback(worker.address, settings=QUIET)
    with pytest.raises(ValueError, match=r"torch_compile=False.*graphs=.eager"):
        trainer_of(tmp_path, [callback], torch_compile=True).train()
    assert callback.session is None


class _FailsOnce(Spy):
    has_failed = False

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        if self.micro_batches == 7 and not self.has_failed:
            self.has_failed = True
            raise KeyboardInterrupt
        return loss


def test_an_error_in_a_micro_batch_and_a_second_training(worker: WorkerProcess, tmp_path: Path) -> None:
    def train(trainer: Spy) -> None:
        with suppress(KeyboardInterrupt):
            trainer.train()
        assert torch.autograd.backward is BACKWARD
        probe = nn.Linear(2, 2)
        probe(torch.ones(1, 2)).sum().backward()  # would deliver what an open block holds back
        if trainer.callback_handler.callbacks[-1].__class__ is BackhaulCallback:
            assert all(parameter.grad is None for parameter in trainer.model.parameters())
        trainer.train()
        trainer.train()

    compared(worker, tmp_path, train, kind=_FailsOnce)


class _StopsMidway(TrainerCallback):
    """Cuts a step short after its second micro-batch."""

    def __init__(self, event: str) -> None:
        self.event, self.substeps = event, 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self.substeps += 1
        if self.substeps == 5:
            setattr(control, self.event, True)
        return control


@pytest.mark.parametrize("event", ["should_epoch_stop", "should_training_stop"])
def test_a_step_that_is_cut_short(worker: WorkerProcess, tmp_path: Path, event: str) -> None:
    left: list[list[Tensor | None]] = []

    def train(trainer: Spy) -> None:
        trainer.train()
        left.append([parameter.grad for parameter in trainer.model.parameters()])

    compared(worker, tmp_path, train, others=lambda: [_StopsMidway(event)], fewest_steps=1)
    for ours, theirs in zip(*left, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or theirs is None or torch.equal(ours, theirs)


class _Generates(TrainerCallback):
    """Generates in every micro-batch, in training and in evaluation mode, and evaluates a loss."""

    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        tokens = torch.arange(4)[None]
        for mode in (True, False):
            model.train(mode)
            model.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0)
            with torch.no_grad():
                model(tokens, labels=tokens)
        model.train()

    on_step_end = on_substep_end


@pytest.mark.parametrize("steps", [1, 4])
def test_generation_between_micro_batches(worker: WorkerProcess, tmp_path: Path, steps: int) -> None:
    # Where checkpointing is on, Transformers generates without its cache in training mode, and draws other numbers.
    settings: dict[str, Any] = {"gradient_accumulation_steps": steps, "activation_checkpointing": True}
    compared(worker, tmp_path, others=lambda: [_Generates()], **settings)


class _TwoLosses(Spy):
    """Differentiates two losses of separate forwards in each micro-batch, and one forward twice."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        first = model(**inputs).loss
        second = model(**inputs).loss
        self.accelerator.backward(first)
        self.accelerator.backward(second * 0.5)
        shared = model(**inputs).loss
        self.accelerator.backward(shared, retain_graph=True)
        self.accelerator.backward(shared.square())
        return first.detach()


class _OwnBackward(Spy):
    """Calls backward itself, in every second micro-batch, and never in the one that ends a step."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        loss: Tensor = model(**self._prepare_inputs(inputs)).loss
        if not self.accelerator.sync_gradients:
            self.micro_batches += 1
            self.accelerator.backward(loss) if self.micro_batches % 2 else loss.backward()
        return loss.detach()


class _Toggles(Spy):
    """Switches checkpointing off and on again around a pass without gradients, as trainers of TRL do."""

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        model.gradient_checkpointing_disable()
        with torch.no_grad():
            super().compute_loss(model, *args, **kwargs)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return super().compute_loss(model, *args, **kwargs)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("kind", [_TwoLosses, _OwnBackward, _Toggles])
def test_trainers_with_steps_of_their_own(worker: WorkerProcess, tmp_path: Path, kind: type[Spy], steps: int) -> None:
    if kind is _OwnBackward and steps == 1:
        pytest.skip("it would never differentiate")
    compared(worker, tmp_path, kind=kind, gradient_accumulation_steps=steps)


def test_a_worker_that_dies(tmp_path: Path, own_worker: WorkerProcess) -> None:
    class Kills(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                own_worker.kill()

    callback = BackhaulCallback(own_worker.address)
    trainers = [
        trainer_of(tmp_path / "without", []),
        trainer_of(tmp_path / "with", [Kills(), callback]),
    ]
    for trainer in trainers:
        torch.manual_seed(3)
        trainer.train()
    assert_equal_trainings(trainers[0], trainers[1])
    assert 0 < callback.report().travels < 1


class Scale(torch.autograd.Function):
    """A function that no program can express."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def model_that_stays() -> LlamaForCausalLM:
    model = model_of()
    for layer in model.model.layers:
        layer.input_layernorm.register_forward_pre_hook(lambda _, args: (Scale.apply(args[0]),))
    return model


def test_an_error_at_the_start_if_nothing_can_travel(worker: WorkerProcess, tmp_path: Path) -> None:
    callback = BackhaulCallback(worker.address, settings=QUIET)
    trainer = trainer_of(tmp_path, [callback], model=model_that_stays())
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(backhaul.NotRemoteError, match="no part of LlamaForCausalLM .*3 of 3 segments: .*Scale"):
        trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert not trainer.model.is_activation_checkpointing


def test_training_goes_on_with_a_warning_if_that_is_wanted(worker: WorkerProcess, tmp_path: Path) -> None:
    callback = BackhaulCallback(worker.address, if_nothing_travels="warn", settings=QUIET)
    trainers = [trainer_of(tmp_path, callbacks, model=model_that_stays()) for callbacks in ([], [callback])]
    for trainer in trainers:
        torch.manual_seed(3)
        with warnings.catch_warnings(record=True) as issued:
            warnings.simplefilter("always")
            trainer.train()
    assert [str(warning.message) for warning in issued if warning.category is backhaul.NotRemoteWarning]
    assert_equal_trainings(trainers[0], trainers[1])


class Blocks(nn.Module):
    """A model without checkpointing of its own, with a batch norm, whose statistics change in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(16, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.embedding(input_ids)
        for block in self.blocks:
            y = y + block(y)
        return {"loss": nn.functional.cross_entropy(self.head(y).flatten(0, 1), labels.flatten())}


def blocks() -> Blocks:
    torch.manual_seed(0)
    return Blocks()


def test_a_model_without_checkpointing_of_its_own(worker: WorkerProcess, tmp_path: Path) -> None:
    trainer, _ = compared(worker, tmp_path, build=blocks, callback={"layers": nn.Sequential})
    assert type(trainer.model.blocks[0]) is nn.Sequential
    with pytest.raises(ValueError, match="layers=Block"):
        trainer_of(tmp_path, [BackhaulCallback(worker.address)], model=blocks()).train()


def test_an_unknown_argument_is_an_error_before_the_training() -> None:
    with pytest.raises(TypeError, match="'silence_s': it is a field of Settings"):
        BackhaulCallback("nowhere:1", silence_s=60)


def test_a_given_session_stays_open(worker: WorkerProcess, tmp_path: Path) -> None:
    with backhaul.connect(worker.address, settings=QUIET) as session:
        trainer = trainer_of(tmp_path, [], max_steps=1)
        trainer.add_callback(BackhaulCallback(session=session))
        trainer.train()
        assert not session.closed
        assert session.report().remote
    with pytest.raises(backhaul.SettingError, match="not both"):
        BackhaulCallback(worker.address, session=session)


def test_a_smaller_batch_after_too_little_memory(worker: WorkerProcess, tmp_path: Path) -> None:
    class Tight(Spy):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            if self.micro_batches == 3:
                self.gradients.clear()
                raise RuntimeError("CUDA out of memory.")
            return loss

    callback = BackhaulCallback(worker.address, settings=QUIET)
    trainers = []
    for callbacks in ([], [callback]):
        trainer = trainer_of(tmp_path, callbacks, Tight, auto_find_batch_size=True)
        trainer._train_batch_size = 2
        torch.manual_seed(3)
        trainer.train()
        trainers.append(trainer)
    assert_equal_trainings(trainers[0], trainers[1])
    assert callback.report().remote

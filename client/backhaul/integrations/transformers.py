"""Models of Transformers and its Trainer: layers become segments. See docs/integrations/transformers.md."""

import functools
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from backhaul._api import connect
from backhaul._observe.report import Report
from backhaul._session import Session
from backhaul.integrations._accelerator import defer_backward, is_sharded
from backhaul.integrations._attributes import replace_attribute
from backhaul.integrations._enable import Models
from backhaul.integrations._first_pass import FirstPass, IfNothingTravels
from backhaul.integrations._model import Layers, make_segments
from backhaul.integrations._optimizer_steps import OptimizerSteps
from backhaul.integrations._sessions import check_choice

_TODO = "it called torch.utils.checkpoint.checkpoint nowhere. Call its train() and activation_checkpointing_enable()."

enable = Models(_TODO).enable


class BackhaulCallback(TrainerCallback):
    """Lets workers recompute the layers of the model that a Trainer of Transformers or TRL trains.

    Each `train()` has a session, which is connected at its start and closed at its end. Whatever switches the model's
    checkpointing on and off meanwhile stays in force. If several micro-batches make up an optimizer step, workers
    finish the backward of one while the trainer goes on with the next: see docs/accumulation.md. What the Trainer logs
    of the training, also to W&B, TensorBoard or MLflow, has the figures of `Report.metrics`.

    Args:
        worker: The address of a worker, or several; see `backhaul.connect`. None: starts one on this machine.
        session: The session to use instead of one for each training. It is not closed.
        layers: Classes of the modules to checkpoint, for a model that has no checkpointing of its own.
        accumulate: Whether the micro-batches of an optimizer step are an accumulation block. None: if there are
            several, and the model is not sharded. "whole": workers get micro-batches whole, see
            docs/whole-micro-batches.md.
        if_nothing_travels: What happens if the first forward shows that no segment can be recomputed by a worker:
            "raise" NotRemoteError, or "warn" with NotRemoteWarning.
        **arguments: Further arguments of `backhaul.connect`.

    Attributes:
        session: The session of the training, or of the last one; None before the first one.
    """

    def __init__(
        self,
        worker: str | None = None,
        *,
        session: Session | None = None,
        layers: Layers | None = None,
        accumulate: bool | Literal["whole"] | None = None,
        if_nothing_travels: IfNothingTravels = "raise",
        **arguments: Any,
    ) -> None:
        check_choice(session, worker, arguments)
        self.session = session
        self._is_given = session is not None
        self._worker, self._arguments = worker, arguments
        self._layers, self._accumulate, self._if_nothing_travels = layers, accumulate, if_nothing_travels
        self._trainer: Trainer | None = None
        self._steps: OptimizerSteps | None = None
        self._undo = ExitStack()
        _surround_training()

    def report(self) -> Report:
        """Returns what has run where in the training, or in the last one.

        Raises:
            ValueError: There was no training yet.
        """
        if self.session is None:
            raise ValueError("there is no report before the first training")
        return self.session.report()

    @contextmanager
    def training(self, trainer: Trainer) -> Iterator[None]:
        """Surrounds a call of `Trainer.train`. Whatever ends it, nothing of the callback stays on the trainer.

        Raises:
            ValueError: The Trainer compiles the whole model, or would wait for each whole micro-batch.
        """
        if trainer.args.torch_compile:
            raise ValueError(
                "torch_compile=True compiles the whole model with the checkpoints inside, so that none is a segment. "
                'Set torch_compile=False, and let Backhaul compile the layers: BackhaulCallback(..., graphs="eager")'
            )
        if self._accumulate == "whole" and trainer.args.logging_nan_inf_filter:
            raise ValueError(
                'accumulate="whole" needs TrainingArguments(logging_nan_inf_filter=False): the filter reads each loss '
                "at once, so the Trainer would wait for the worker"
            )
        if self._trainer is not None:
            raise RuntimeError("this BackhaulCallback is in a training already: give each Trainer one of its own")
        if not self._is_given:
            self.session = connect(self._worker, **self._arguments)
        self._trainer = trainer
        try:
            yield
        finally:
            self._trainer = None
            self._restore()
            if not self._is_given and self.session is not None:
                self.session.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Takes over the model's checkpointing, after the Trainer has switched it on."""
        trainer, session = self._trainer, self.session
        if trainer is None or session is None:
            raise RuntimeError("BackhaulCallback works only in a Trainer's train()")
        self._restore()  # the Trainer begins again after it has found a smaller batch size
        with ExitStack() as undo:
            make_segments(model, session, self._layers, undo)
            undo.enter_context(session._redirecting())
            first_pass = FirstPass(session, type(model).__name__, self._if_nothing_travels, _TODO)
            steps = OptimizerSteps(session)
            undo.callback(steps.abandon)
            accelerator = trainer.accelerator
            # The Trainer calls no callback between the last micro-batch and clipping.
            backward = defer_backward(accelerator, steps)

            def backward_after_forward(*args: Any, **kwargs: Any) -> Any:
                first_pass.ended()
                return backward(*args, **kwargs)

            training_step = trainer.training_step

            def ended_training_step(*args: Any, **kwargs: Any) -> Any:
                loss = (self._whole_step if self._is_whole(accelerator) else training_step)(*args, **kwargs)
                if accelerator.sync_gradients:  # for a step of the user's own whose last micro-batch has no backward
                    steps.end()
                return loss

            log = trainer.log

            def log_with_metrics(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
                # Trackers that the Trainer was given come before this callback, so its `on_log` would be too late.
                log({**logs, **session.report().metrics()} if "loss" in logs else logs, *args, **kwargs)

            undo.callback(replace_attribute(trainer, "log", log_with_metrics))
            undo.callback(replace_attribute(accelerator, "backward", backward_after_forward))
            undo.callback(replace_attribute(trainer, "training_step", ended_training_step))
            self._steps = steps if self._defers(args, accelerator) else None
            self._undo = undo.pop_all()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Opens the accumulation block of an optimizer step."""
        if self._steps is not None:
            self._steps.begin()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Completes the gradients of an optimizer step that another callback has cut short."""
        if self._steps is not None:
            self._steps.end()

    def _defers(self, args: Any, accelerator: Any) -> bool:
        """Whether the micro-batches of an optimizer step become an accumulation block."""
        if self._accumulate is not None:
            return bool(self._accumulate)
        has_replicas = args.n_gpu > 1  # nn.DataParallel runs forwards in threads of their own
        return args.gradient_accumulation_steps > 1 and not has_replicas and not is_sharded(accelerator)

    def _is_whole(self, accelerator: Any) -> bool:
        """Whether the next micro-batch may be computed whole: only a division comes between its loss and backward."""
        is_plain = getattr(accelerator, "scaler", None) is None and accelerator.gradient_accumulation_steps == 1
        return self._accumulate == "whole" and is_plain and self._steps is not None and self._steps.is_open

    def _whole_step(self, model: nn.Module, inputs: dict[str, Any], items: Any = None) -> Any:
        """Does what `Trainer.training_step` does for one process, except that its backward is that of the block."""
        trainer, steps = self._trainer, self._steps
        assert trainer is not None
        assert steps is not None
        model.train()
        is_scaled = trainer.loss_is_scaled_for_ga
        if is_scaled is None:
            counts = trainer.model_accepts_loss_kwargs and items is not None
            is_scaled = counts or trainer.compute_loss_func is not None
        count = 1 if is_scaled else trainer.current_gradient_accumulation_steps

        def compute_loss(inputs: dict[str, Any], items: Any) -> Any:
            with trainer.compute_loss_context_manager():
                loss: Any = trainer.compute_loss(model, inputs, num_items_in_batch=items)
            return loss if count == 1 else loss / count

        # The masks of Transformers depend on values, except where a call is captured: so the graph is what counts.
        compiled = torch.compile(compute_loss, backend="backhaul")
        return steps.run(compiled, trainer._prepare_inputs(inputs), items)

    def _restore(self) -> None:
        self._steps = None
        self._undo.close()


def _surround_training() -> None:
    """Lets each `Trainer.train` enter and leave its BackhaulCallback: no callback is called when a training fails."""
    with _lock:
        train = Trainer.train
        if getattr(train, "enters_backhaul", False):
            return

        @functools.wraps(train)
        def train_with_callback(self: Trainer, *args: Any, **kwargs: Any) -> Any:
            with ExitStack() as entered:
                for callback in self.callback_handler.callbacks:
                    if isinstance(callback, BackhaulCallback):
                        entered.enter_context(callback.training(self))
                return train(self, *args, **kwargs)

        train_with_callback.enters_backhaul = True  # type: ignore[attr-defined]
        Trainer.train = train_with_callback  # type: ignore[method-assign]


_lock = threading.Lock()  # guards the replacement of Trainer.train

"""Training with Lightning's Trainer. See docs/integrations/lightning.md."""

from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from backhaul._observe.report import Report
from backhaul._session import Session
from backhaul.integrations._first_pass import FirstPass, IfNothingTravels
from backhaul.integrations._model import Layers, make_segments
from backhaul.integrations._optimizer_steps import OptimizerSteps
from backhaul.integrations._sessions import check_choice, session_of

_TODO = "it called torch.utils.checkpoint.checkpoint nowhere. Name the classes of its layers, as in layers=Block."


class LightningCallback(Callback):
    """Lets workers recompute the layers of the model that a Trainer of Lightning trains.

    Each `fit` has a session, which is connected at its start and closed at its end. The loggers get the figures of
    `Report.metrics`. With `accumulate_grad_batches`,
    workers finish the backward of one micro-batch while the trainer goes on with the next: see docs/accumulation.md.
    Put it first in the list of callbacks: those before it see gradients that are not complete.

    Args:
        worker: The address of a worker, or several; see `backhaul.connect`. None: starts one on this machine.
        session: The session to use instead of one for each training. It is not closed.
        layers: Classes of the modules to checkpoint. None: the models of Transformers inside, with their own
            checkpointing.
        accumulate: Whether the micro-batches of an optimizer step are an accumulation block. None: if there are
            several, optimization is automatic, and the strategy does not shard the model.
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
        accumulate: bool | None = None,
        if_nothing_travels: IfNothingTravels = "raise",
        **arguments: Any,
    ) -> None:
        check_choice(session, worker, arguments)
        self.session = session
        self._is_given = session is not None
        self._worker, self._arguments = worker, arguments
        self._layers, self._accumulate, self._if_nothing_travels = layers, accumulate, if_nothing_travels
        self._first_pass: FirstPass | None = None
        self._steps: OptimizerSteps | None = None
        self._deferring = ExitStack()
        self._undo = ExitStack()

    def report(self) -> Report:
        """Returns what has run where in the training, or in the last one.

        Raises:
            ValueError: There was no training yet.
        """
        if self.session is None:
            raise ValueError("there is no report before the first training")
        return self.session.report()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes over the layers of the model, which `configure_model` has made by then."""
        self._undo.close()
        with ExitStack() as undo:
            given = self.session if self._is_given else None
            session = self.session = session_of(given, self._worker, self._arguments)
            if given is None:
                undo.callback(session.close)
            make_segments(pl_module, session, self._layers, undo)
            undo.enter_context(session._redirecting())
            self._first_pass = FirstPass(session, type(pl_module).__name__, self._if_nothing_travels, _TODO)
            if self._defers(trainer, pl_module):
                steps = self._steps = OptimizerSteps(session, ends_in_closure=True)
                undo.callback(steps.abandon)
            self._undo = undo.pop_all()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Opens the accumulation block of an optimizer step."""
        if self._steps is not None and not self._steps.is_open:
            self._steps.begin()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Makes the backward that follows a micro-batch of the block."""
        if self._first_pass is not None:
            self._first_pass.ended()
        if self._steps is not None:
            self._deferring.enter_context(self._steps.deferring())

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the block after the last micro-batch, before Lightning clips gradients and shows them to hooks."""
        self._deferring.close()
        if self._steps is not None and not trainer.fit_loop._should_accumulate():
            self._steps.end()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Gives the figures of `Report.metrics` to the loggers, as often as Lightning logs."""
        if self.session is not None and not (trainer.global_step + 1) % trainer.log_every_n_steps:
            figures = self.session.report().metrics()
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=trainer.global_step)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Ends the block of a step whose last micro-batch was skipped."""
        if self._steps is not None:
            self._steps.end()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the block of a step that the end of an epoch has cut short."""
        if self._steps is not None:
            self._steps.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restores the model after an error."""
        self._restore()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restores the model after the training."""
        self._restore()

    def _defers(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        if self._accumulate is not None:
            return self._accumulate
        kind = type(trainer.strategy).__name__
        is_sharded = "FSDP" in kind or "DeepSpeed" in kind or "ModelParallel" in kind or "XLA" in kind
        return trainer.accumulate_grad_batches > 1 and pl_module.automatic_optimization and not is_sharded

    def _restore(self) -> None:
        self._deferring.close()
        self._steps = self._first_pass = None
        self._undo.close()

"""Runs some of the plans and compares them with their predictions.

NOTE [Validation of plans]
1. No plan with a length of segments that the costs were measured with is run, except where there is no other.
2. On a CPU the trainer and a worker that this process starts get a core each, from before the first measurement on, as
   if they were two machines. With an accelerator or a named worker nothing is changed.
3. A step has all micro-batches, forward and backward, and no optimizer. Its duration is the lower quartile of several
   steps, like that of all costs.
4. Where each side has a core of its own, steps during which other programs used these cores do not count. A plan with
   too few other steps is shown, but says nothing.
5. A machine may be faster or slower by a third from one minute to the next. So a measured duration is multiplied by the
   pace: what a step without checkpointing took when the costs were measured, divided by what it takes just before and
   after the plan. For the plan without checkpointing this leaves little to compare.
"""

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from backhaul._config import Config
from backhaul._session import Session
from backhaul._torch_api.wrap import unwrap
from backhaul._worker_client.embedded import EmbeddedWorker
from backhaul.demo.memory import peak_live_bytes
from backhaul.plan.candidates import Candidate
from backhaul.plan.measured import LayerCosts
from backhaul.plan.search import PredictedPlan
from backhaul.profile.foreign import CoreUse, Watch, family, steps_wanted
from backhaul.profile.plain import PlainRun, synchronise, undisturbed, update
from backhaul.profile.target import Target
from backhaul_runtime.process.units import size_text

BAR = 0.15
"""The largest error of a prediction that counts as close."""
_WARM_STEPS = 4
"""Steps before those that count. The trainer's share of accumulation blocks follows the measured speeds after three."""
_ENOUGH = 3
"""Undisturbed steps that are enough for a conclusion, if not fewer were asked for."""
_CORES = 2


@dataclass(frozen=True, slots=True)
class ValidatedPlan:
    """A plan that was run.

    Attributes:
        name: The plan as text.
        predicted_s: Predicted duration of a step, in seconds.
        measured_s: Measured duration at the pace at which the costs were measured (Rule 5), in seconds.
        pace: The pace of the machine beside this plan, relative to that.
        predicted_bytes: Predicted peak of activations and gradients, in bytes.
        measured_bytes: Measured peak, in bytes.
        fallbacks: Number of segments that were meant for a worker but ran on the trainer.
        is_conclusive: Whether enough steps were undisturbed.
    """

    name: str
    predicted_s: float
    measured_s: float
    pace: float
    predicted_bytes: int
    measured_bytes: int
    fallbacks: int
    is_conclusive: bool

    @property
    def error(self) -> float:
        """The predicted duration relative to the measured one, minus 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        """The predicted peak relative to the measured one, minus 1."""
        return self.predicted_bytes / max(1, self.measured_bytes) - 1

    def as_json(self) -> dict[str, Any]:
        """Returns the fields and the errors."""
        return asdict(self) | {"error": self.error, "memory_error": self.memory_error}


class SeparateCores:
    """Gives the trainer and a worker a core each (Rule 2). A context manager.

    Args:
        config: The settings of the sessions.

    Attributes:
        config: The settings with the address of the worker that was started, if one was.
        watch: Tells disturbed steps; None if no cores were given away.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.watch: Watch | None = None
        self._worker: EmbeddedWorker | None = None
        self._cores: set[int] = set()

    def __enter__(self) -> Self:
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        if self.config.worker or torch.cuda.is_available() or len(cores) < _CORES:
            return self
        self._cores = set(cores)
        torch.set_num_threads(1)
        os.sched_setaffinity(0, {cores[1]})  # the worker's process inherits it
        self._worker = EmbeddedWorker(self.config.memory_bytes, self.config.connect_timeout_s)
        address = self._worker.ensure()
        os.sched_setaffinity(0, {cores[0]})
        self.config = replace(self.config, worker=address.text)
        pids = family({os.getpid(), *filter(None, [self._worker.pid])})
        self.watch = partial(CoreUse.now, cores[:_CORES], pids)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._cores:
            os.sched_setaffinity(0, self._cores)


def chosen(plans: Sequence[PredictedPlan], costs: LayerCosts) -> list[PredictedPlan]:
    """Returns the plans to run: the fastest of each kind with a length of segments that was not measured (Rule 1).

    Args:
        plans: All plans, the fastest first.
        costs: The costs that the predictions were made from.
    """
    measured = {segment.layers for segment in costs.segments}
    by_kind: dict[tuple[object, ...], PredictedPlan] = {}
    # Plans with other lengths come first.
    for plan in sorted(plans, key=lambda plan: plan.candidate.is_remote and plan.candidate.segment_layers in measured):
        one = plan.candidate
        key = (one.kind, one.returns, one.boundaries, one.local) if not one.kept_layers else (one.kind, "kept")
        by_kind.setdefault(key, plan)
    return list(by_kind.values())


def validate(
    target: Target,
    config: Config,
    costs: LayerCosts,
    plans: Sequence[PredictedPlan],
    micro_batches: int,
    rounds: int,
    watch: Watch | None = None,
) -> list[ValidatedPlan]:
    """Runs one plan of each kind and compares it with its prediction.

    Args:
        target: The model that was measured. Its parameters are changed a little.
        config: The settings of the sessions, with the same workers as when the costs were measured.
        costs: The costs that the predictions were made from.
        plans: All plans, the fastest first.
        micro_batches: Number of micro-batches of a step.
        rounds: Number of measured steps of each plan.
        watch: Tells disturbed steps; None if all count.
    """
    rows, before_s = [], _plain_s(target, rounds)
    plain_s = costs.layers * (costs.forward_s + costs.backward_s) + costs.outside_s
    for plan in chosen(plans, costs):
        row = _run(target, config, plan, micro_batches, rounds, watch)
        after_s = _plain_s(target, rounds)
        pace = plain_s / statistics.mean((before_s, after_s))
        rows.append(replace(row, measured_s=row.measured_s * pace, pace=pace))
        before_s = after_s
    return rows


def _plain_s(target: Target, rounds: int) -> float:
    """Returns the seconds of a micro-batch without checkpointing, on the trainer alone."""
    run = PlainRun(target)
    run.run(rounds)
    plain = run.profile()
    return plain.layers * (plain.forward_s + plain.backward_s) + plain.outside_forward_s + plain.outside_backward_s


def _run(
    target: Target, config: Config, plan: PredictedPlan, micro_batches: int, rounds: int, watch: Watch | None
) -> ValidatedPlan:
    quiet_s: list[float] = []
    trained = [parameter for parameter in target.model.parameters() if parameter.requires_grad]
    durations_s: list[float] = []
    with _trained_by(plan.candidate, target, config) as (session, backwards):

        def step() -> None:
            with backwards() as backward:
                for _ in range(micro_batches):
                    backward(target.run() / micro_batches)
            synchronise(target.device)

        for number in range(_WARM_STEPS + steps_wanted(rounds, watch)):
            torch.manual_seed(number)
            before, began_s = watch() if watch is not None else None, perf_counter()
            step()
            if number >= _WARM_STEPS:
                durations_s.append(perf_counter() - began_s)
                if watch is None or before is None or watch().was_quiet(before):
                    quiet_s.append(durations_s[-1])
            update(trained)
            if len(quiet_s) == rounds:
                break
        measured_bytes = _peak_bytes(step, target.device)
        update(trained)
        fallbacks = session.report().fallbacks if session is not None else 0
    peak_bytes = plan.peak.trainer_bytes
    is_conclusive = len(quiet_s) >= min(rounds, _ENOUGH)
    measured_s = undisturbed(quiet_s if is_conclusive else durations_s)
    return ValidatedPlan(
        str(plan.candidate), plan.step_s, measured_s, 1.0, peak_bytes, measured_bytes, fallbacks, is_conclusive
    )


Backward = Callable[[Tensor], object]


@contextmanager
def _trained_by(
    candidate: Candidate, target: Target, config: Config
) -> Iterator[tuple[Session | None, Callable[[], Any]]]:
    """Prepares the model for a way to train.

    Yields the session, and what opens the micro-batches of a step and yields their backward.
    """

    @contextmanager
    def one_by_one() -> Iterator[Backward]:
        yield Tensor.backward

    if candidate.kind == "plain":
        yield None, one_by_one
        return
    if candidate.kind == "torch":
        from torch.utils.checkpoint import checkpoint

        from backhaul._torch_api.wrap import wrap

        def local(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return checkpoint(function, *args, use_reentrant=False, **kwargs)

        wrap(target.model, target.kinds, local, kept_layers=candidate.kept_layers)
        try:
            yield None, one_by_one
        finally:
            unwrap(target.model)
        return
    settings = {name: value for name, value in candidate.settings.items() if name != "worker"}
    with Session(replace(config, **settings)) as session:
        session.wrap(target.model, target.kinds)

        @contextmanager
        def as_block() -> Iterator[Backward]:
            with session.accumulate() as block:
                yield block.backward

        try:
            yield session, as_block if candidate.kind == "deferred" else one_by_one
        finally:
            unwrap(target.model)


def _peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Returns the most bytes of activations and gradients in a step."""
    if device.type != "cuda":
        return peak_live_bytes(step)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    return torch.cuda.max_memory_allocated(device) - before


def is_close(rows: Sequence[ValidatedPlan]) -> bool:
    """Whether all predicted durations of plans with enough undisturbed steps are close to the measured ones."""
    return all(abs(row.error) <= BAR for row in rows if row.is_conclusive)


def rows_as_text(rows: Sequence[ValidatedPlan]) -> str:
    """Formats the comparison as a text table."""
    columns = f"{'predicted':>11}{'measured':>11}{'error':>8}{'pace':>7}{'peak':>12}{'measured':>12}{'error':>8}"
    head = f"{'plan that was run':<66}{columns}"
    conclusive = [row for row in rows if row.is_conclusive]
    close = sum(abs(row.error) <= BAR for row in conclusive)
    disturbed = (
        ["Other programs disturbed too many steps of the plans in brackets."] if len(conclusive) < len(rows) else []
    )
    return "\n".join(
        [
            head,
            "-" * len(head),
            *map(_row_as_text, rows),
            "",
            f"{close} of {len(conclusive)} predicted durations are within {BAR:.0%} of the measured ones.",
            *disturbed,
            "Measured durations are multiplied by the pace of the machine just then, see docs/doctor.md.",
            "Peaks count activations and gradients, without parameters and the optimizer's state.",
        ]
    )


def _row_as_text(row: ValidatedPlan) -> str:
    measured = f"{row.measured_s * 1e3:.0f} ms"
    text = (
        f"{row.name:<66}{row.predicted_s * 1e3:>8.0f} ms{measured if row.is_conclusive else f'({measured})':>11}"
        f"{row.error:>+8.1%}{row.pace:>7.2f}"
        f"{size_text(row.predicted_bytes):>12}{size_text(row.measured_bytes):>12}{row.memory_error:>+8.1%}"
    )
    return text + (f"  ({row.fallbacks} segments fell back)" if row.fallbacks else "")

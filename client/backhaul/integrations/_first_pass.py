"""Checks at the start of a training that its segments travel. Silence would cost the user the whole training."""

from collections import Counter
from typing import Any, Literal, get_args

import torch
from torch import nn

from backhaul._observe.report import TRAINERS_SHARE, UNREACHABLE, Report
from backhaul._observe.warnings import warn_not_remote
from backhaul._session import Session
from backhaul_runtime.errors import NotRemoteError

IfNothingTravels = Literal["raise", "warn"]


class FirstPass:
    """The check after the first forward of a training, when every segment has been recorded and no gradient exists.

    Args:
        session: The session whose calls are counted from now on.
        model: The name of the model, for the message.
        if_nothing_travels: Whether to raise NotRemoteError or to issue a NotRemoteWarning.
        todo: What the user should do if the model checkpoints nothing, as a sentence.

    Raises:
        ValueError: `if_nothing_travels` is neither of the two.
    """

    def __init__(self, session: Session, model: str, if_nothing_travels: IfNothingTravels, todo: str) -> None:
        if if_nothing_travels not in get_args(IfNothingTravels):
            allowed = ", ".join(map(repr, get_args(IfNothingTravels)))
            raise ValueError(f"if_nothing_travels={if_nothing_travels!r} is not one of {allowed}")
        self._session, self._model, self._raises, self._todo = session, model, if_nothing_travels == "raise", todo
        self._before = session.report()
        self._is_over = False

    def watch(self, model: nn.Module) -> None:
        """Calls `ended` after the first forward of a model in training, or of a copy of the model."""

        def forward_ended(model: nn.Module, args: Any, output: Any) -> None:  # deepcopy does not copy functions
            if model.training and torch.is_grad_enabled():
                hook.remove()
                self.ended()

        hook = model.register_forward_hook(forward_ended)

    def ended(self) -> None:
        """Notes that a forward has ended that will be differentiated. Only the first one is checked.

        Raises:
            NotRemoteError: No segment of the forward can be recomputed by a worker, and not because of the worker.
        """
        if self._is_over:
            return
        self._is_over = True
        why = why_nothing_travels(self._before, self._session.report())
        if why is None:
            return
        message = f"no part of {self._model} will be recomputed by a worker: {why or self._todo}"
        if self._raises:
            raise NotRemoteError(
                f'{message} Pass if_nothing_travels="warn" to train without a worker\'s help.',
                segment=self._model,
                reason=why or "no call was checkpointed",
            )
        warn_not_remote(message)


def why_nothing_travels(before: Report, now: Report) -> str | None:
    """Returns why no call between two reports has a segment that travels.

    Returns:
        None if a segment travels, or if no worker was reachable, which says nothing about the segments; an empty string
        if there was no call; else the most frequent reasons, as a sentence.
    """
    calls = _calls(now) - _calls(before)
    reasons = _reasons(now) - _reasons(before)
    if not calls:
        return ""
    if sum(reasons.values()) < calls or any(reason.startswith(UNREACHABLE) for reason in reasons):
        return None
    counts = [f"{count} of {calls} segments: {reason}" for reason, count in reasons.most_common(3)]
    return "; ".join(counts) + "."


def _calls(report: Report) -> int:
    return sum(segment.calls for segment in report.segments)


def _reasons(report: Report) -> Counter[str]:
    """Returns why segments stayed on the trainer, with counts, without those that it computes by choice."""
    reasons = Counter[str]()
    for segment in report.segments:
        for reason, count in (*segment.reasons.items(), *segment.kept.items()):
            if reason != TRAINERS_SHARE:
                reasons[reason] += count
    return reasons

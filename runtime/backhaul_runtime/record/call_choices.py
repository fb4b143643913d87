"""The recorded choices of a running call: its draws and decisions, for workers with other hardware."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from backhaul_runtime.errors import Refusal
from backhaul_runtime.program.op_rules import OpRules, rules, tensors_in
from backhaul_runtime.program.program import Node
from backhaul_runtime.record.generator_states import GeneratorStates
from backhaul_runtime.record.recording import Recording, SavedTensor
from backhaul_runtime.record.sources import SourceLedger
from backhaul_runtime.replay.recorded_choices import ChoiceRecorder, DrawRecorder
from backhaul_runtime.torch_internals.private import DisablePythonDispatcher, DisableTorchDispatch, OpOverload


class CallChoices:
    """Records draws and decisions as sources, see NOTE [Recorded choices]. Does nothing if the recording has none.

    Args:
        recording: Says whether choices are recorded, until one of them can't be.
        sources: The ledger that choices are added to.
        generators: Records the state before a draw that can't be a source.
    """

    def __init__(self, recording: Recording, sources: SourceLedger, generators: GeneratorStates) -> None:
        self._recording = recording
        self._sources = sources
        self._generators = generators
        self._choices = ChoiceRecorder() if recording.has_recorded_choices else None

    @property
    def are_recorded(self) -> bool:
        """Whether draws and decisions are recorded."""
        return self._choices is not None

    def begin(self, op_rules: OpRules, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Prepares for an op that is about to run."""
        if self._choices is not None:
            try:
                self._choices.begin(op_rules, _read(args, kwargs))
            except Refusal as refusal:
                self.give_up(refusal)

    def draws_of(self, op: OpOverload) -> DrawRecorder | None:
        """Returns the context to run an op in if its draws are to be recorded."""
        return DrawRecorder() if self._choices is not None and rules(op).draws else None

    def projection(self, tensor: Tensor, saved: SavedTensor, *, is_hidden: bool) -> tuple[float, ...]:
        """Returns the random projection of a tensor that autograd saves, see `ChoiceRecorder.saved`."""
        if self._choices is None:
            return ()
        is_fixed = saved.source >= 0 and not self._recording.sources[saved.source].is_written
        with DisablePythonDispatcher(), DisableTorchDispatch():
            return self._choices.saved(tensor, is_hidden=is_hidden, is_undefined=saved.is_undefined, is_fixed=is_fixed)

    def end(
        self,
        op: OpOverload,
        node: Node,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        results: Sequence[Tensor],
        draws: DrawRecorder | None,
    ) -> None:
        """Adds an op's draws and decisions as sources, or gives up if they can't be derived from its results."""
        if self._choices is None:
            return
        try:
            noted = self._choices.noted(op, _read(args, kwargs), results, draws)
        except Refusal as refusal:
            if rules(op).draws:  # without its recorded draws, a replay of the node needs the generator's state
                self._generators.add(node)
            self.give_up(refusal)
        else:
            node.given = tuple(map(self._sources.add_given, noted))

    def give_up(self, refusal: Refusal) -> None:
        """Marks the call as one that workers with other hardware can't recompute. The trainer still can."""
        if self._choices is not None:
            self._choices = None
            self._recording.has_recorded_choices, self._recording.unrecorded_choices = False, refusal.reason


def _read(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    return tensors_in((*args, *kwargs.values()))

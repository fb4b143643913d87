"""What is kept of a call while it is recorded."""

from collections.abc import Callable, Sequence

from torch import Tensor

from backhaul_runtime.record.ambient_states import AmbientStates
from backhaul_runtime.record.call_choices import CallChoices
from backhaul_runtime.record.call_memory import CallMemory
from backhaul_runtime.record.contents import FixedDigests
from backhaul_runtime.record.generator_states import GeneratorStates
from backhaul_runtime.record.known_tensors import KnownTensors
from backhaul_runtime.record.program_builder import ProgramBuilder
from backhaul_runtime.record.recording import Recording, SavedTensor
from backhaul_runtime.record.running_op import RunningOp
from backhaul_runtime.record.sources import MakeCopy


class RunningCall:
    """Owns the parts. Each gets those that it uses, and none refers to the recorder.

    Args:
        arguments: The tensors passed to the call.
        make_copy: Makes copies of tensors that may change before backward.
        pack: The only pack hook that ops may run under; None to check no hooks.
        fixed: Digests of parameters that do not change during the call; None to compute all digests.
        has_recorded_choices: Whether to record draws and decisions.

    Attributes:
        recording: The result, which may outlive the call.
        saved: The tensors that autograd has saved so far, in the recording.
        op: The op or custom function that runs at present.
        memory: The memory that ops read, make and write to.
        states: The ambient states that nodes run under.
        generators: The states of generators before nodes that draw.
        choices: The draws and decisions, for workers with other hardware.
        builder: The nodes, and the programs that they make.
        known: The tensors that a program can refer to.
        values_given: The number of ops that gave Python a value of a tensor.
        selects_by_masks: Whether an op has indexed by a mask, so that the size of its result depends on values.
    """

    def __init__(
        self,
        arguments: Sequence[Tensor],
        make_copy: MakeCopy,
        pack: Callable[[Tensor], object] | None,
        fixed: FixedDigests | None,
        *,
        has_recorded_choices: bool,
    ) -> None:
        self.saved: list[SavedTensor] = []
        self.recording = Recording(saved=self.saved, has_recorded_choices=has_recorded_choices)
        self.op = RunningOp()
        self.memory = CallMemory(self.recording.sources, arguments, make_copy, fixed)
        self.states = AmbientStates(pack)
        self.generators = GeneratorStates(self.recording)
        self.choices = CallChoices(self.recording, self.memory.sources, self.generators)
        self.builder = ProgramBuilder(self.recording, self.saved, self.memory, self.states)
        self.known = KnownTensors(self.recording, self.memory, self.states, self.builder)
        self.values_given = 0
        self.selects_by_masks = False

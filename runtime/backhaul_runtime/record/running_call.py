"""What is kept of a call while it is recorded."""

from collections.abc import Callable, Sequence

from torch import Tensor

from backhaul_runtime.program.names import JoinedNames
from backhaul_runtime.record.ambient_states import AmbientStates
from backhaul_runtime.record.call_choices import CallChoices
from backhaul_runtime.record.contents import Contents, FixedDigests
from backhaul_runtime.record.custom_functions import CustomFunctions
from backhaul_runtime.record.generator_states import GeneratorStates
from backhaul_runtime.record.interior_memory import InteriorMemory
from backhaul_runtime.record.known_tensors import KnownTensors
from backhaul_runtime.record.memory_writes import MemoryWrites
from backhaul_runtime.record.node_arguments import NodeArguments
from backhaul_runtime.record.opaque_nodes import OpaqueNodes
from backhaul_runtime.record.program_builder import ProgramBuilder
from backhaul_runtime.record.recording import Recording
from backhaul_runtime.record.running_op import RunningOp
from backhaul_runtime.record.sources import Hold, SourceLedger


class RunningCall:
    """Owns the parts. Each gets those that it uses, and none refers to the recorder.

    Args:
        arguments: The tensors passed to the call.
        hold: Makes copies of tensors that may change before backward.
        pack: The only pack hook that ops may run under; None to check no hooks.
        fixed: Digests of parameters that do not change during the call; None to compute all digests.
        allows: What workers run beside torch's own ops.
        has_recorded_choices: Whether to record draws and decisions.

    Attributes:
        recording: The result, which may outlive the call.
        sources: The tensors from outside that ops have used.
        op: The op or custom function that runs at present.
        contents: Takes the digests of tensors.
        interior: The memory that the ops have made.
        states: The ambient states that nodes run under.
        generators: The states of generators before nodes that draw.
        choices: The draws and decisions, for workers with other hardware.
        functions: The custom functions that the call has run.
        builder: The nodes, and the programs that they make.
        known: The tensors that a program can refer to.
        arguments: Takes the arguments of nodes apart.
        writes: Copies sources before ops write to them.
        opaque: Checks nodes whose insides torch does not describe.
    """

    def __init__(
        self,
        arguments: Sequence[Tensor],
        hold: Hold,
        pack: Callable[[Tensor], object] | None,
        fixed: FixedDigests | None,
        allows: JoinedNames,
        *,
        has_recorded_choices: bool,
    ) -> None:
        self.recording = Recording(has_recorded_choices=has_recorded_choices)
        self.sources = SourceLedger(self.recording.sources, arguments, hold)
        self.op = RunningOp()
        self.contents = Contents(fixed)
        self.interior = InteriorMemory(self.sources)
        self.states = AmbientStates(pack)
        self.generators = GeneratorStates(self.recording)
        self.choices = CallChoices(self.recording, self.sources, self.generators)
        self.functions = CustomFunctions(allows)
        self.builder = ProgramBuilder(self.recording, self.sources, self.states, self.interior)
        self.known = KnownTensors(
            self.recording, self.sources, self.contents, self.interior, self.states, self.functions, self.builder
        )
        self.arguments = NodeArguments(self.op, self.recording, self.known, self.builder, allows)
        self.writes = MemoryWrites(self.recording, self.sources, self.known, self.interior)
        self.opaque = OpaqueNodes(
            self.recording,
            self.op,
            self.sources,
            self.contents,
            self.interior,
            self.choices,
            self.functions,
            self.builder,
        )

    def forget_op(self) -> None:
        """Removes what was recorded of an op or function that raised an exception."""
        self.opaque.drop()
        self.builder.forget_op()

    def end(self) -> None:
        """Drops what refers to the caller: a cycle would keep the inside of the call alive."""
        self.states.pack = None
        self.opaque.watch = None

"""Builds the program of a running call from its nodes."""

from dataclasses import replace

from backhaul_runtime.program.op_rules import MAKES_LEAF
from backhaul_runtime.program.program import Node, Program, Ref, Source
from backhaul_runtime.record.ambient_states import AmbientStates
from backhaul_runtime.record.call_memory import CallMemory
from backhaul_runtime.record.recording import Recording, SavedTensor


class ProgramBuilder:
    """The nodes that were recorded so far, and the programs that they make.

    Args:
        recording: The sources, saved tensors and generator states of the same call.
        saved: The saved tensors in the recording.
        memory: The ledger of these sources, and the memory that the ops make.
        states: The ambient states that nodes run under.

    Attributes:
        nodes: The recorded nodes, in the order they ran.
        types: The names of the types of composite arguments, in order; the values are None.
        saving_nodes: For each saved tensor, the number of nodes up to the one that saved it.
    """

    def __init__(
        self, recording: Recording, saved: list[SavedTensor], memory: CallMemory, states: AmbientStates
    ) -> None:
        self.nodes: list[Node] = []
        self.types: dict[str, None] = {}
        self._recording, self._saved = recording, saved
        self._memory = memory
        self._states = states
        self.saving_nodes: list[int] = []
        self._recorded_saves = 0  # saved tensors of the nodes recorded so far
        self._sources_used: list[int] = []  # by each node and those before it
        self._left_out: tuple[Node, ...] = ()

    def add(self, node: Node) -> None:
        """Adds a node that has run, with the tensors that autograd saved in it."""
        self.nodes.append(node)
        self._states.node_added()
        self._recorded_saves = len(self._saved)
        self._sources_used += [len(self._recording.sources)] * (len(self.nodes) - len(self._sources_used))

    def add_leaf(self, ref: Ref) -> None:
        """Adds a node that makes a tensor a leaf, before the node that is being recorded."""
        self.nodes.append(Node(MAKES_LEAF, (ref, True), (), self._states.present, result_bytes=(0,), draws=False))

    @property
    def made_leaves(self) -> bool:
        """Whether the function turned on `requires_grad` of a tensor that it made."""
        return any(node.op == MAKES_LEAF for node in self.nodes)

    def note_save(self) -> None:
        """Notes that autograd saves a tensor in the node that is being recorded."""
        self.saving_nodes.append(len(self.nodes) + 1)

    def forget_op(self) -> None:
        """Removes what was recorded of an op that raised an exception. The function may catch it and continue."""
        if self._recording.refusal is None:
            del self._saved[self._recorded_saves :], self.saving_nodes[self._recorded_saves :]
            self._cut_generator_states()

    def finish(self, outputs: tuple[Ref, ...], casts: tuple[int, ...], *, early_stop: bool) -> Program:
        """Returns the program of a call that has ended, see `Recorder.finish`."""
        if self._recording.refusal is not None:
            early_stop = True
            # What only later nodes read may change before backward, as a function that is no node may write to it.
            needed = min(self._last_saving, len(self._sources_used))
            self._memory.sources.cut(self._sources_used[needed - 1] if needed and self._recorded_saves else 0)
        if early_stop:
            self._left_out = tuple(self.nodes[self._last_saving :])
            del self.nodes[self._last_saving :]
            self._cut_generator_states()
        return self.program(outputs, casts)

    def whole(self, program: Program, outputs: tuple[Ref, ...]) -> Program | None:
        """Returns the program of `finish` with the nodes that it left out; None if one of these draws."""
        if any(node.draws for node in self._left_out):  # their generator states were left out, too
            return None
        return replace(program, nodes=program.nodes + self._left_out, outputs=outputs)

    def program(self, outputs: tuple[Ref, ...] = (), casts: tuple[int, ...] = ()) -> Program:
        """Returns the nodes recorded so far as a program."""
        return Program(
            sources=tuple(
                Source(source.requires_grad, source.is_leaf, source.is_written) for source in self._recording.sources
            ),
            nodes=tuple(self.nodes),
            ambient_states=self._states.states,
            outputs=outputs,
            saved_count=self._recorded_saves,
            saved_bytes=self._memory.interior.unreturned_bytes,
            casts=casts,
            types=tuple(self.types),
        )

    @property
    def _last_saving(self) -> int:
        return self.saving_nodes[-1] if self.saving_nodes else 0

    def _cut_generator_states(self) -> None:
        del self._recording.generator_states[sum(node.draws for node in self.nodes) :]

"""Runs a call whose program is known: a worker gets the segment before the call runs, and nothing is recorded."""

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from torch import Tensor

from backhaul._backward.checkpointed_call import CheckpointedCall
from backhaul._backward.frame import Frame, RecordedSegment
from backhaul._backward.handles import Handle, HandleTable
from backhaul._dispatch.dispatcher import Dispatcher
from backhaul._forward.captured_graph import GraphCall, KnownSegment, pattern_of
from backhaul._forward.graft import graft
from backhaul._forward.keep import (
    evidence_of,
    lineage_of,
    note_grafted,
    note_sources,
    offer,
    predecessors_of,
    versions_of,
)
from backhaul._forward.saved_tensor_hooks import modified
from backhaul._observe.call_log import CallLog
from backhaul._torch_api.call_options import Options
from backhaul._torch_api.selective import KeptTensor
from backhaul_runtime.errors import Refusal
from backhaul_runtime.record.known_program import KnownCall
from backhaul_runtime.tensors.durations import Duration
from backhaul_runtime.tensors.stopwatch import device_of_work
from backhaul_runtime.torch_internals.graph_uses import structure_of
from backhaul_runtime.torch_internals.private import (
    DisableTorchDispatch,
    edge_of,
    next_sequence_number,
    pop_saved_tensor_hooks,
    sequence_of,
    version_of,
)


class BegunKnownCall:
    """A call of a known program. A worker has the segment, if one takes it.

    Args:
        dispatcher: Gives the segment to a worker.
        graph_call: The call that begins now.
        segment: What is known of calls of its kind.
        options: The options that the call has.
        log: Counts what happens to the call.
        whole: For a whole micro-batch, as in `PendingCall`.

    Attributes:
        call: The call, with its recording.
        table: Makes the handles of what autograd saves.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        graph_call: GraphCall,
        segment: KnownSegment,
        options: Options,
        log: CallLog,
        whole: tuple[int, int] | None = None,
    ) -> None:
        known, inputs = segment.known, graph_call.inputs
        self._inputs = inputs
        self._dispatcher, self._segment = dispatcher, segment
        self._arguments = [value for value in graph_call.arguments if isinstance(value, Tensor)]
        self._sources = [inputs[position] for position in known.inputs]
        with DisableTorchDispatch():
            self._known = KnownCall(
                known,
                self._sources,
                dispatcher.copies.copy_of,
                dispatcher.fixed,
                compares_outputs=options.compares_outputs and segment.structure is None,
            )
        recording = self._known.recording
        self.call = CheckpointedCall(
            log.name,
            log,
            options,
            recording,
            device=next(iter(recording.accelerators), device_of_work(self._arguments)),
        )
        self.table = HandleTable(self.call, self._so_far)
        self._histories = [(index, edge_of(self._sources[index])) for index in known.histories]
        self._predecessors = predecessors_of(self._histories, segment.uses.of_frame)
        self._pending = dispatcher.pending(graph_call, self._arguments, segment.encoded)
        self._pending.whole = whole
        uses = segment.uses.of_frame
        recorded = RecordedSegment(
            self.call, known.program, segment.need_bytes, self._sources, uses, self._predecessors
        )
        self._remote, self._program, self._local_reason = offer(dispatcher, recorded, self._pending, None)
        self._is_noting, self._has_ended = True, False
        self._first_sequence = next_sequence_number()

    def _so_far(self) -> Any:
        return self._segment.known.up_to(len(self.call.recording.saved))

    def pack(self, tensor: Tensor) -> int | Handle | Tensor:
        """The pack hook: notes a tensor that autograd saves. Keeps it if the program saves another one there.

        What is noted gets no handle, because hardly ever is anything asked for: a graft takes the place of the graph.
        """
        if self._is_noting:
            try:
                return self._known.note_saved(tensor)
            except Exception as error:  # no variable may refer to it: its traceback refers to the variables
                self.call.recording.refuse(Refusal.of(error).reason)
                self._is_noting = False
        if self._has_ended:  # Ctrl-C has kept the hook from being taken off: what the caller saves stays as it is
            pop_saved_tensor_hooks()
            return tensor.detach()
        handle = Handle(self.table, -1)
        handle.kept = _keep(tensor)
        return handle

    def end(self) -> None:
        """Drops what belongs to the running call. If it has saved too few tensors, keeps those of the last node."""
        self._is_noting, self._has_ended = False, True
        self.table.end_call()
        for position, tensor in enumerate(self._known.end(), len(self.call.recording.saved)):
            self.table.hold(position).kept = _keep(tensor)

    def without_forward(self, began_s: float) -> Frame:
        """Returns the frame of a call that only the worker runs.

        Args:
            began_s: When the call began, by the clock of `perf_counter`.

        Raises:
            Refusal: No worker has taken it, or one that computes other bits.
        """
        call = self.call
        self._is_noting, self._has_ended = False, True
        self.table.end_call()
        if self._remote is None or not self._remote.is_exact:
            raise Refusal(self._local_reason or "its worker computes other bits")
        call.recording.is_unseen = True
        lineage = lineage_of(self._dispatcher, call, self._program)
        note_sources(lineage, call, self._sources, self._histories, is_remote=True)
        evidence_of(self._dispatcher, call, None, "it is a whole micro-batch, whose forward only a worker has run")
        frame = self._frame(lineage=lineage, uses=self._segment.uses.of_frame)
        call.log.taken("")
        call.log.forward(frame, call.recording, 0.0, perf_counter() - began_s, self._segment.packed_bytes)
        lineage.release()
        return frame

    def keep(self, returned: Sequence[Any], forward: Duration) -> tuple[Frame, Any]:
        """Grafts the segment. Returns its frame, and what the caller gets.

        After an unexpected error the graph of its inside stays, and the trainer recomputes.

        Raises:
            NotRemoteError: Under `strict`, after such an error.
        """
        self._pending.site.forward = forward
        try:
            return self._grafted(returned)
        except Exception as error:  # no variable may refer to it: its traceback refers to the variables
            return self._kept_here(Refusal.of(error)), returned

    def _grafted(self, returned: Sequence[Any]) -> tuple[Frame, Any]:
        call, segment = self.call, self._segment
        outputs = [returned[position] for position in segment.outputs]
        if call.recording.refusal is not None:
            raise Refusal(call.recording.refusal)
        if pattern_of(returned, self._inputs) != segment.returned:
            raise Refusal("it returned the same tensors at other places than the recorded call of the same kind")
        self._known.note_returned(outputs)
        if segment.structure is not None and structure_of(outputs, self._sources) != segment.structure:
            raise Refusal("the class of a tensor that it takes has run other ops than in the recorded call")
        graph, casts = segment.uses.of_call(outputs, self._sources, self._first_sequence)
        lineage = lineage_of(self._dispatcher, call, self._program)
        note_sources(lineage, call, self._sources, self._histories, is_remote=self._remote is not None)
        evidence = evidence_of(self._dispatcher, call, self._program, "", segment.uses.of_frame)
        frame = self._frame(lineage=lineage, uses=segment.uses.of_frame, evidence=evidence)
        if self._remote is not None:
            call.log.taken("")
        later = sequence_of(outputs[0]) - graph.output_sequence
        grafted = graft(frame, outputs, [*self._sources, *casts], graph.plan, later)
        note_grafted(frame, grafted, self._sources, self._predecessors)
        grafted_at = dict(zip(segment.outputs, grafted, strict=True))
        value = [grafted_at.get(first, one) for first, one in zip(segment.returned, returned, strict=True)]
        if self._remote is not None:  # last, because after an error the trainer recomputes from what this drops
            lineage.release()
        return frame, tuple(value)

    def _frame(self, **decided: Any) -> Frame:
        return Frame(
            self.call,
            self.table.handles,
            program=self._program,
            arguments=versions_of(self._arguments),
            remote=self._remote,
            local_reason=self._local_reason,
            **decided,
        )

    def _kept_here(self, refusal: Refusal) -> Frame:
        """Returns the frame of a call whose graph stays. The trainer recomputes what the program has saved so far.

        It runs the whole program if the outputs show whether its bits are those of forward.
        """
        self.call.check_strict(refusal.reason, refusal.cause)
        self.call.log.fallback(refusal.reason)
        evidence_of(self._dispatcher, self.call, None, refusal.reason)
        program = self._segment.known.program if self.call.recording.returned else self._so_far()
        self._remote, self._program, self._local_reason = None, program, refusal.reason
        del self.call.recording.generator_states[self._program.draws :]
        for position in range(len(self.call.recording.saved)):
            self.table.hold(position)
        return self._frame(lineage=lineage_of(self._dispatcher, self.call, self._program))


def _keep(tensor: Tensor) -> KeptTensor:
    return KeptTensor(tensor.detach(), version_of(tensor), modified)

"""A remote without a wire: segments are encoded, decoded and run here, on copies, as a worker would."""

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from backhaul import Session
from backhaul._backward.checkpointed_call import CheckpointedCall
from backhaul._backward.frame import RecordedSegment
from backhaul._backward.lineage import Copies
from backhaul._backward.remote_side import RemoteAnswer, StoredGradient
from backhaul._backward.value_check import Recomputed
from backhaul._config import resolve
from backhaul._dispatch.dispatcher import Dispatcher
from backhaul._dispatch.prediction import CallSite, EncodedProgram, PendingCall
from backhaul._evidence.evidence import Evidence
from backhaul._forward.graphs import Graphs
from backhaul._observe.journal import Journal
from backhaul._observe.report import Report
from backhaul._observe.telemetry import Telemetry
from backhaul._torch_api.call_options import options_of
from backhaul._worker_client.answers.answer_checks import check_saved, contributions_in
from backhaul_proto.v1 import segment_pb2
from backhaul_runtime.errors import Refusal, WorkerLostError
from backhaul_runtime.program.codec import decode_program, encode_program
from backhaul_runtime.program.custom.names import JoinedNames
from backhaul_runtime.program.program import Program
from backhaul_runtime.record.contents import FixedDigests
from backhaul_runtime.record.recording import Recording
from backhaul_runtime.replay.compiled_programs import compile_program, functions
from backhaul_runtime.replay.replay import isolated
from backhaul_runtime.tensors.digest import address_of
from backhaul_runtime.tensors.durations import Duration
from backhaul_runtime.tensors.layout import Layout, copy_exact
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.wire.bundle import unbundle
from backhaul_server.worker.allowed import import_allowed
from backhaul_server.worker.engine import executions
from backhaul_server.worker.engine.executions import ExecutionResult, SegmentInputs
from backhaul_server.worker.rpc.segment_answers import encode_contributions
from support.devices import DEVICE


class LoopbackSegment:
    """See `backhaul._backward.remote_side.RemoteSegment`."""

    def __init__(self, work: SegmentInputs, remote: "Loopback") -> None:
        self.work = work
        self.remote = remote
        self.rechecks = None
        self.evidence = None
        self.worker, self.is_exact = "loopback", True

    def expel(self, why: str) -> None:
        """Is never called: nothing is rechecked."""
        raise AssertionError(why)

    def _run(self, perform: Any) -> ExecutionResult:
        if self.remote.is_lost:
            raise WorkerLostError("gone", status="LOST")
        with isolated([torch.empty(0, device=DEVICE).device]), torch.enable_grad():
            return perform(self.work, None)

    def backward(
        self,
        gradients: Mapping[int, Tensor | StoredGradient],
        state: ambient_state.State,
        summed: Collection[int],
        due: Sequence[tuple[int, Layout]],
        may_stay: Mapping[int, Tensor],
        unsent: Collection[int] = (),
        upcoming: Sequence[int] | None = None,
        outputs: Sequence[Layout] = (),
        *,
        checks_bytes: bool,
    ) -> RemoteAnswer:
        assert not outputs  # forward has run here
        copies = {
            output: copy_exact(gradient) for output, gradient in gradients.items() if isinstance(gradient, Tensor)
        }
        self.remote.given |= {address_of(copy): copy for copy in copies.values()}
        execution_result = self._run(
            partial(
                executions.backward,
                start=executions.BackwardInputs((), state, summed=tuple(summed)),
                gradients=copies,
            )
        )
        result = segment_pb2.BackwardResult(contributions=encode_contributions(execution_result))
        tensors = [copy_exact(outgoing.tensor) for outgoing in execution_result.bundle.tensors]
        saved = Recomputed(execution_result.digests, execution_result.saved_projections)
        return RemoteAnswer(saved, contributions_in(result, tensors, due, summed, may_stay), {}, lambda _: set(), 0.0)

    def recompute(self, wanted: Mapping[int, Layout]) -> "LoopbackTensors":
        execution_result = self._run(partial(executions.recompute, positions=list(wanted)))
        tensors = unbundle(
            [copy_exact(outgoing.tensor) for outgoing in execution_result.bundle.tensors], execution_result.bundle.views
        )
        for position, tensor in tensors.items():
            check_saved(position, tensor, wanted[position])
        return LoopbackTensors(Recomputed(execution_result.digests, execution_result.saved_projections), tensors)

    def drifted(self, drift: float) -> None:
        pass


class LoopbackTensors:
    """See `backhaul._backward.remote_side.SavedTensorStream`."""

    def __init__(self, compared: Recomputed, tensors: dict[int, Tensor]) -> None:
        self.compared = compared
        self._tensors = tensors

    def take(self, position: int) -> Tensor:
        return self._tensors.pop(position)

    def close(self) -> None:
        self._tensors.clear()


class Loopback:
    """Has what tests need of a session, and what a call needs of a dispatcher.

    Args:
        records_choices: As for a worker of other hardware.
        allow: As for `backhaul worker`.

    Attributes:
        is_lost: All segments are lost, and none is taken.
        recordings: Of the segments taken, in order.
        given: What they and their backwards were given, by address.
        taken: The segments.
    """

    def __init__(self, *, records_choices: bool = False, allow: Sequence[str] = ()) -> None:
        self.offers = [import_allowed(allow)] if allow else []
        self.fixed: FixedDigests | None = None
        self.has_recorded_choices = records_choices
        self.journal = Journal()
        self.telemetry: Telemetry | None = None
        self.evidence: Evidence | None = None
        self.copies = Copies()
        self.is_lost = False
        self.recordings: list[Recording] = []
        self.given: dict[bytes, Tensor] = {}
        self.taken: list[weakref.ref[LoopbackSegment]] = []
        self.config = resolve()
        self.graphs = Graphs(cast(Dispatcher, self), options_of(self.config, {})[0])

    def changed(self) -> list[bytes]:
        """Addresses of what it was given that no longer holds what it held. Nothing that runs may change it."""
        return [address for address, tensor in self.given.items() if address_of(tensor) != address]

    def keeps_activations(self, name: str) -> bool:
        return False

    def allows(self) -> JoinedNames:
        return JoinedNames(self.offers)

    def records_choices(self, device_types: Iterable[str]) -> bool:
        return self.has_recorded_choices

    def pending(self, fn: Any, arguments: list[Tensor], encoded: EncodedProgram | None = None) -> PendingCall:
        return PendingCall(CallSite(), arguments, fn, encoded)

    def begin(self, call: CheckpointedCall, fn: Any, arguments: list[Tensor]) -> PendingCall:
        return self.pending(fn, arguments)

    def save(
        self, segment: RecordedSegment, pending: PendingCall, forward: Duration | None
    ) -> tuple[LoopbackSegment, Program]:
        recording = segment.call.recording
        if self.is_lost:
            raise Refusal("gone")
        if recording.unrecorded_choices:
            raise Refusal(recording.unrecorded_choices)
        self.recordings.append(recording)
        program = decode_program(encode_program(segment.program), torch.device(DEVICE))
        if program.compilation is not None:
            functions[program] = compile_program(program, torch.empty(0, device=DEVICE).device)
        values = [copy_exact(source.value, source.layout) for source in recording.sources]
        self.given |= {source.address: value for source, value in zip(recording.sources, values, strict=True)}
        inputs = SegmentInputs(
            program,
            values,
            list(recording.generator_states),
            self.has_recorded_choices,
            recording.returned is not None,
        )
        self.taken.append(weakref.ref(taken := LoopbackSegment(inputs, self)))
        return taken, segment.program

    @property
    def session(self) -> Session:
        """This remote, for functions that take a session and use only what a loopback has too."""
        return cast(Session, self)

    def checkpoint(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        options, kwargs = options_of(self.config, kwargs)
        return self.graphs.call(function, args, kwargs, options)

    def report(self) -> Report:
        return self.journal.report()

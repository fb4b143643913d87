"""What a session writes of some steps, so that they can be verified afterwards.

NOTE [Recording evidence]
1. Training only copies and takes digests; a thread writes. What waits for it is bounded in bytes. A call that does not
   fit is left out, and its file says so: training does not wait for a disk.
2. Training changes what a call has read. So parameters that are trained are copied when their call has ended, unless
   the directory has them already. Copies of the recorder do not change. What else the call has captured is read by the
   thread, and its address shows whether it was changed until then.
3. The gradients that a backward returns are not copied: their digests and random projections are taken at once,
   because they become `.grad`, or are added to it.
4. Steps are chosen by their numbers alone: the first one, and then evenly. A session goes on with the number after the
   last one that the directory has, so a training that is often restarted does not record the more.
5. No error of this module reaches the training. If the directory is full or broken, the recording ends, with one line
   in the log.
"""

import itertools
import math
import threading
from collections.abc import Collection, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from backhaul._evidence.evidence_thread import EvidenceMessage, EvidenceThread, reason_of, without
from backhaul._evidence.files import EvidenceName, EvidenceWriter, UnusableError, encoded
from backhaul._evidence.gradients import measured_contribution
from backhaul._evidence.objects import Objects
from backhaul_proto.v1 import evidence_pb2
from backhaul_runtime.errors import SettingError
from backhaul_runtime.process.fingerprint import fingerprint_with_host
from backhaul_runtime.program.codec import encode_program, encode_state
from backhaul_runtime.program.program import Program
from backhaul_runtime.record.recording import RecordedSource, Recording, SavedTensor
from backhaul_runtime.replay.replay import Contribution
from backhaul_runtime.tensors.layout import Layout, copy_exact, layout_of
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.torch_internals.private import DisableTorchDispatch
from backhaul_runtime.version import version
from backhaul_runtime.wire.layout_codec import encode_layout

_MOST_WRITTEN = 1 << 14
"""The number of sources whose objects are remembered, so that they are not copied again."""


def is_chosen(step: int, share: float) -> bool:
    """Whether a step is recorded, by its number from 0: the first one, and then evenly (Rule 4)."""
    return share > 0 and (step == 0 or math.floor(step * share) > math.floor((step - 1) * share))


class Evidence:
    """Records a share of a session's steps. Thread-safe.

    Args:
        path: The directory that the files are in.
        limit_bytes: The most bytes that the files of the directory may have together.
        share: The share of the steps, from 0 to 1.
        session: Id of the session.

    Raises:
        SettingError: The directory can't be used.
    """

    def __init__(self, path: str, limit_bytes: int, share: float, session: str) -> None:
        try:
            writer = EvidenceWriter(Path(path).absolute(), limit_bytes)
        except (OSError, UnusableError) as error:
            raise SettingError(f"evidence={path!r} can't be used: {error}") from None
        self._share, self._session = share, session
        self._step, self._calls = writer.last_step + 1, 0
        self._lock = threading.Lock()  # guards the two fields above
        # The objects of sources that were written, by address. Only the thread adds to it.
        self._written: dict[bytes, bytes] = {}
        self._thread = EvidenceThread(writer, path, session)

    def call(
        self,
        name: str,
        recording: Recording,
        program: Program | None,
        why_missing: str = "",
        uses: Sequence[tuple[int, Layout]] | None = None,
    ) -> "CallEvidence | None":
        """Records a call that has just ended, if the present step is recorded. Raises nothing.

        Args:
            name: The name of the call.
            recording: The recording of the call. If there is a program, all its sources are retained.
            program: The program that recomputes the call; None if there is none.
            why_missing: Why the call can't be verified; empty if it can.
            uses: For each source, then for each cast, then for each output, the number of its contributions and their
                layout; None if the call's gradients do not come from a recomputation of the whole call.

        Returns:
            Records the backwards of the call; None if nothing is to be recorded of them.
        """
        with self._lock:
            self._calls += 1
            if self._thread.has_ended or not is_chosen(self._step, self._share):
                return None
            of_call = EvidenceName(self._step, self._session, self._calls)
        message = evidence_pb2.EvidenceCall(step=of_call.step, call=of_call.call, name=name)
        try:
            if program is not None and (program.functions or program.types):
                why_missing = "it runs custom functions, whose code is not in the directory"
            if why_missing or program is None:
                raise UnusableError(why_missing)
            self._record(of_call, message, recording, program, uses)
        except Exception as error:  # no variable may refer to it: its traceback refers to the variables
            self._thread.enqueue(of_call, without(message, reason_of(error)))
            return None
        return None if uses is None else CallEvidence(self._thread, of_call)

    def _record(
        self,
        of_call: EvidenceName,
        message: evidence_pb2.EvidenceCall,
        recording: Recording,
        program: Program,
        uses: Sequence[tuple[int, Layout]] | None,
    ) -> None:
        with DisableTorchDispatch():  # dispatch modes of the caller must not see our own ops
            sources = [(self._value(source), source) for source in recording.sources]
        device = next(iter(recording.accelerators), torch.device("cpu"))
        states, compared = recording.states_to_send, recording.compared(program)
        whole = evidence_pb2.EvidenceCall(
            step=message.step,
            call=message.call,
            name=message.name,
            compares_outputs=recording.returned is not None,
            has_backwards=uses is not None,
            uses=[evidence_pb2.EvidenceUse(count=count, spec=encode_layout(layout)) for count, layout in uses or ()],
            computes_on_host=recording.computes_on_host,
        )
        copied_bytes = sum(
            value.nbytes for value, source in sources if isinstance(value, Tensor) and _is_copied(source)
        )
        complete = partial(self._completed, whole, program, device, states, sources, compared)
        self._thread.enqueue(of_call, message, complete, copied_bytes)

    def _value(self, source: RecordedSource) -> Tensor | bytes:
        """Returns a tensor on the host with the elements of a source, or the object that has them (Rule 2)."""
        if (written := self._written.get(source.address)) is not None:
            return written
        if source.layout.is_on_accelerator:
            return copy_exact(source.value, source.layout, "cpu")
        must_copy = _is_copied(source) and not source.is_copy
        return copy_exact(source.value, source.layout) if must_copy else source.value

    def _completed(
        self,
        message: evidence_pb2.EvidenceCall,
        program: Program,
        device: torch.device,
        states: Sequence[bytes],
        sources: Sequence[tuple[Tensor | bytes, RecordedSource]],
        compared: Sequence[SavedTensor],
        objects: Objects,
    ) -> EvidenceMessage:
        message.origin = objects.add(_origin(self._session, device))
        message.program = objects.add(encode_program(program))
        message.generator_states.extend(objects.add(state) if state else b"" for state in states)
        for value, source in sources:
            if isinstance(value, Tensor):
                own = value if _is_copied(source) else copy_exact(value, source.layout)
                stored = objects.add_tensor(own, source.layout, source.address)
                if len(self._written) >= _MOST_WRITTEN:
                    self._written.clear()
                self._written[source.address] = stored
            else:
                stored = value
            message.sources.add(spec=encode_layout(source.layout), object=stored)
        for one in compared:
            layout = one.layout
            what = f"{layout.dtype_name} {list(layout.shape)} on {layout.device}"
            message.compared.add(digest=one.digest, op=one.op, description=what)
        return message

    def step_ended(self) -> None:
        """Ends the present step. One without calls does not count."""
        with self._lock:
            if not self._calls:
                return
            step, self._step, self._calls = self._step, self._step + 1, 0
        if is_chosen(step, self._share):
            self._thread.enqueue(EvidenceName(step, self._session), evidence_pb2.EvidenceStep())

    def close(self) -> None:
        """Ends the present step and the recording. Waits until all is written, for a minute at most."""
        self.step_ended()
        self._thread.close()


class CallEvidence:
    """Records the backwards of a call. Any thread may call the methods, one at a time. They raise nothing.

    Args:
        thread: The thread that writes the files of the session.
        of_call: The name of the call's file.
    """

    def __init__(self, thread: EvidenceThread, of_call: EvidenceName) -> None:
        self._thread, self._of_call = thread, of_call
        self._numbers = itertools.count(1)

    def backward(
        self,
        gradients: Mapping[int, Tensor],
        state: ambient_state.State,
        contributions: Sequence[Contribution],
        summed: Collection[int] = (),
        worker: str = "",
        *,
        has_other_bits: bool = False,
    ) -> None:
        """Records a backward whose gradients count from now on.

        Args:
            gradients: The gradients of the program's outputs, by the output's position. They are copied.
            state: The ambient settings under which it ran.
            contributions: What it has returned. Digests of them are taken.
            summed: The sources whose contributions are added up.
            worker: The address of the worker that has computed them; empty for the trainer.
            has_other_bits: Whether that worker computes other bits than the trainer.
        """
        if self._thread.has_ended:
            return
        name, message = self._begun()
        try:
            whole = evidence_pb2.EvidenceBackward(
                step=message.step,
                call=message.call,
                number=message.number,
                worker=worker,
                has_other_bits=has_other_bits,
                ambient_state=encode_state(state),
                summed_sources=sorted(summed),
            )
            with DisableTorchDispatch(), torch.no_grad():
                copies = [
                    (position, layout := layout_of(gradient), copy_exact(gradient, layout, "cpu"))
                    for position, gradient in sorted(gradients.items())
                ]
                whole.contributions.extend(map(measured_contribution, contributions))

            def complete(objects: Objects) -> EvidenceMessage:
                for position, layout, copy in copies:
                    stored = objects.add_tensor(copy, layout)
                    tensor = evidence_pb2.EvidenceTensor(spec=encode_layout(layout), object=stored)
                    whole.gradients.add(output=position, tensor=tensor)
                return whole

            self._thread.enqueue(name, message, complete, sum(copy.nbytes for _, _, copy in copies))
        except Exception as error:  # no variable may refer to it: its traceback refers to the variables
            self._thread.enqueue(name, without(message, reason_of(error)))

    def missed(self, why: str) -> None:
        """Records that a backward ran that can't be verified, and why."""
        if self._thread.has_ended:
            return
        name, message = self._begun()
        self._thread.enqueue(name, without(message, why))

    def _begun(self) -> tuple[EvidenceName, evidence_pb2.EvidenceBackward]:
        name = self._of_call._replace(backward=next(self._numbers))
        return name, evidence_pb2.EvidenceBackward(step=name.step, call=name.call, number=name.backward)


def _is_copied(source: RecordedSource) -> bool:
    """Whether the recording has, or makes in forward, a copy of a source that does not change (Rule 2)."""
    return source.is_copy or source.requires_grad or source.layout.is_on_accelerator


@cache
def _origin(session: str, device: torch.device) -> bytes:
    """Returns the object that says which session wrote calls on a device."""
    facts = fingerprint_with_host(device)
    return encoded(evidence_pb2.EvidenceOrigin(session=session, version=version(), fingerprint=facts))

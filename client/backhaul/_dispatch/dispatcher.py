"""Distributes segments to the workers of a session, and sends predicted segments before their calls have ended."""

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import starmap
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from backhaul._backward.checkpointed_call import CheckpointedCall
from backhaul._backward.frame import RecordedSegment
from backhaul._backward.lineage import Copies
from backhaul._backward.recheck import Rechecks
from backhaul._config import Config
from backhaul._dispatch.placement import Placement, worker_of_whole
from backhaul._dispatch.prediction import CallSite, CallSites, EncodedProgram, PendingCall
from backhaul._dispatch.suitability import advice_on, check_suitable, in_words
from backhaul._dispatch.worker_handle import WorkerHandle
from backhaul._evidence.evidence import Evidence
from backhaul._observe.journal import Journal
from backhaul._observe.report import TRAINERS_SHARE, UNREACHABLE
from backhaul._observe.telemetry import Telemetry
from backhaul._torch_api.fsdp import frees_parameters
from backhaul._worker_client.connection.connection import Connection
from backhaul._worker_client.connection.worker_session import WorkerSession
from backhaul._worker_client.remote_segment import SavedSegment
from backhaul._worker_client.upload.backward_chains import Predecessor, SpeculationHistory
from backhaul._worker_client.upload.segment_upload import SegmentUpload, SourceTensor
from backhaul_runtime.errors import Refusal
from backhaul_runtime.process.fingerprint import DECISIVE, differences, fingerprint, fingerprint_with_host
from backhaul_runtime.process.logs import about
from backhaul_runtime.program.custom.names import JoinedNames
from backhaul_runtime.program.program import Program
from backhaul_runtime.record.contents import FixedDigests
from backhaul_runtime.record.recording import RecordedSource
from backhaul_runtime.tensors.durations import Duration, known_s
from backhaul_runtime.tensors.layout import Layout, copy_exact
from backhaul_runtime.tensors.staging import device_moments
from backhaul_runtime.torch_internals.private import DisableTorchDispatch

logger = logging.getLogger("backhaul")
_FOR_UPLOAD = attrgetter("named", "layout", "retained", "is_copy", "is_transient")  # the attributes of a SourceTensor
_BACKWARD_FACTOR = 3.0  # a replay, and a backward of twice the cost of a forward


class Dispatcher:
    """Distributes the segments of a session to its workers. Thread-safe.

    Args:
        config: The settings of the session.
        journal: The journal of the session, which has the session's id.
        workers: The workers of the session, which may join and leave.
        copies: The copies of tensors that the session keeps.
        is_closed: Returns whether the session is closed, or this process is the child of a fork.
        follow: Called with the device of each segment, before a worker is chosen for it.

    Attributes:
        journal: Counts calls by name.
        telemetry: Reports calls; None if telemetry is off.
        evidence: Records calls so that they can be verified; None if nothing is recorded.
        copies: The copies of tensors that the trainer keeps.
        rechecks: What the session rechecks; None if it rechecks nothing.
    """

    def __init__(
        self,
        config: Config,
        journal: Journal,
        workers: Sequence[WorkerHandle],
        copies: Copies,
        is_closed: Callable[[], bool],
        follow: Callable[[torch.device], None] = lambda _: None,
    ) -> None:
        self._config = config
        self.journal = journal
        self.telemetry: Telemetry | None = None
        self.evidence: Evidence | None = None
        self._workers = workers
        self.copies = copies
        self._is_closed = is_closed
        self._follow = follow
        self.rechecks = Rechecks(config.recheck) if config.recheck else None
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # guards the numbers, the placement and the call sites
        self._placement = Placement()
        self._is_accumulating = self._keeps_share = False
        self._kept = 0  # calls of the present micro-batch whose activations the trainer keeps
        self._speeds: Mapping[str, float] = {}
        self._fixed: tuple[int, FixedDigests] | None = None  # with the thread whose block is open
        self._sites = CallSites()
        self._allows: JoinedNames | None = None

    def keeps_activations(self, name: str) -> bool:
        """Whether the trainer keeps the activations of the call that begins now, because the call is of its share.

        Args:
            name: The name of the call, under which it is counted.
        """
        if not self._keeps_share:
            return False
        with self._lock:
            if not self._placement.is_trainers:
                return False
            self._placement.choose_worker({})
            self._kept += 1
        log = self.journal.log(name)
        log.call()
        log.kept(TRAINERS_SHARE, is_chosen=True)
        return True

    def records_choices(self, device_types: Iterable[str]) -> bool:
        """Whether a usable worker computes other bits than a device of these types of this trainer does.

        See NOTE [Recorded choices].
        """
        if self._config.numerics == "exact" or self._is_closed():
            return False
        up = [(worker, worker_session) for worker in self._workers if (worker_session := worker.up) is not None]
        mismatches = [
            self._differences(worker, worker_session, torch.device(device_type))
            for worker, worker_session in up
            for device_type in device_types
        ]
        return any(different and not different.keys() & DECISIVE for different in mismatches)

    def allows(self) -> JoinedNames:
        """Returns what the workers that are up run beside torch's own ops."""
        if self._is_closed():
            return JoinedNames()
        up = tuple([worker_session.allowed for worker in self._workers if (worker_session := worker.up) is not None])
        if self._allows is None or self._allows.offers != up:
            self._allows = JoinedNames(up)
        return self._allows

    def why_useless(self) -> str:
        """Returns why no worker that is up can get any segment of this trainer, and what to do; empty if one can."""
        reasons: dict[str, str] = {}
        todo = ""
        for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
            for worker in self._workers:
                if (worker_session := worker.up) is not None:
                    mismatch = differences(fingerprint(torch.device(device)), worker_session.fingerprint)
                    if not mismatch or (self._config.numerics != "exact" and not mismatch.keys() & DECISIVE):
                        return ""
                    reasons.setdefault(worker.connection.name, in_words(mismatch))
                    todo = todo or advice_on(mismatch)
        why = "; ".join(f"of worker {name} {reason}" for name, reason in reasons.items())
        return f"{why}. {todo}, or connect to other workers" if why else ""

    @property
    def fixed(self) -> FixedDigests | None:
        """Digests of parameters, while the calling thread has a block open in which they must not change; else None."""
        if self._fixed is None:
            return None
        thread, fixed = self._fixed
        # Ctrl-C may have kept those of a block that has ended.
        return fixed if thread == threading.get_ident() and not fixed.has_ended else None

    def pending(
        self, fn: Callable[..., Any], arguments: list[Tensor], encoded: EncodedProgram | None = None
    ) -> PendingCall:
        """Returns the call that begins now, of which nothing is sent yet.

        Args:
            fn: The function that will be called.
            arguments: The tensors among its arguments.
            encoded: The program that it will run, if that is known.
        """
        return PendingCall(self._sites.of(fn, self._placement.position), arguments, fn, encoded)

    def begin(self, call: CheckpointedCall, fn: Callable[..., Any], arguments: list[Tensor]) -> PendingCall:
        """Sends the inputs of a call that begins now, if its program can be predicted.

        Args:
            call: The call, whose recording is still empty.
            fn: The function that will be called.
            arguments: The tensors among its arguments.
        """
        pending = self.pending(fn, arguments)
        if self._is_closed() or call.local_reason or call.recording.has_recorded_choices:
            return pending
        # A prediction would send what the worker computes itself, or what it does not get.
        if pending.site.speculation.is_derived or self._placement.is_trainers:
            return pending
        with DisableTorchDispatch():  # dispatch modes of the caller must not see our own ops
            predicted = pending.site.predict(arguments, self.copies.copy_of, fn)
        if predicted is not None:
            try:
                worker, worker_session, number = self._next_target()
                if name := worker_session.allowed.missing(predicted[0].program):
                    raise Refusal(f"the worker {worker.connection.name} does not allow {name}")
                pending.target = worker, worker_session, number
                save = self._save_of(call, worker.connection, worker_session, number, *predicted, is_predicted=True)
                try:
                    worker.uploader.save(save)
                except BaseException:  # Ctrl-C, perhaps after the segment was queued: its call will not run
                    worker.uploader.release(worker_session, number)
                    raise
            except Refusal as refusal:
                pending.refusal = refusal
        return pending

    def save(
        self, segment: RecordedSegment, pending: PendingCall, forward: Duration | None
    ) -> tuple[SavedSegment, Program]:
        """Queues a segment for a worker. Raises Refusal if no worker takes it.

        Args:
            segment: The segment as it was recorded in forward, or as it will run.
            pending: What `begin` or `pending` returned for the call.
            forward: What forward took, which determines the deadline of a recomputation; None if it has yet to run.

        Returns:
            The remote side, and the program to keep: an earlier one if that is equal.
        """
        call, tensors, recording = segment.call, segment.tensors, segment.call.recording
        if self._is_closed():  # checked first: in the child of a fork the lock may stay locked for ever
            raise Refusal("the session is closed")
        if pending.refusal is not None:  # a second question would count the segment twice
            raise pending.refusal
        device = next(iter(recording.accelerators), torch.device("cpu"))
        self._follow(device)
        # A program does not say which accelerator its ops ran on: the worker would move all tensors to its own.
        if len(recording.accelerators) > 1:
            raise Refusal("its tensors are on several accelerators, but a worker uses only one")
        target = pending.target
        # If the worker has restarted since, it no longer has what was sent before the call.
        was_sent = target is not None and target[0].connection.up is target[1]
        worker, worker_session, number = target if target is not None and was_sent else self._next_target(pending.whole)
        mismatch = self._differences(
            worker,
            worker_session,
            device,
            computes_on_host=recording.computes_on_host,
        )
        check_suitable(segment, worker.connection.name, worker_session, mismatch)
        # After all refusals, because a segment that no worker takes must not be predicted.
        site = pending.site
        known, superseded = site.learn(
            segment.program, recording, tensors, pending.arguments, pending.fn, pending.encoded
        )
        sources = list(starmap(SourceTensor, map(_FOR_UPLOAD, recording.sources)))
        if frees_parameters():
            for index, (source, tensor) in enumerate(zip(recording.sources, tensors, strict=True)):
                if isinstance(tensor, nn.Parameter) and not source.is_copy:  # FSDP frees no copy of the recorder
                    sources[index] = self._may_be_freed(worker, worker_session, source, tensor)
        save = self._save_of(call, worker.connection, worker_session, number, known, sources, recording.states_to_send)
        save.wants_projections, save.compares_outputs = bool(mismatch), recording.returned is not None
        save.superseded = superseded
        earlier = site.forward
        site.forward = forward = earlier if forward is None else forward
        # Other kernels would derive other bits, and without copies nobody could send what the worker failed to derive.
        may_derive = site.speculation.can_derive and not mismatch and call.options.durability != "none"
        bytes_per_s, forward_s = worker.uploader.sender.bytes_per_s, known_s(forward, earlier) or 0.0

        def derives(layout: Layout) -> bool:
            return may_derive and self._should_derive(layout, bytes_per_s, forward_s)

        save.predecessors = _predecessors(segment, worker_session, site.speculation, derives)
        here = {predecessor.source for predecessor in save.predecessors}
        save.boundaries = [source for source, *_ in segment.predecessors if source not in here]
        # Without predecessors it begins a part of the chain. Its next call need not, if the trainer's share changes.
        if save.predecessors:
            site.speculation.is_derived = any(predecessor.derived is not None for predecessor in save.predecessors)
        if was_sent:  # the prediction has made and queued the same copies
            save.queued_bytes = 0
        call.log.worker = worker.connection.name
        call.log.program(known.address)
        saved = SavedSegment(
            worker.connection,
            worker.uploader,
            save,
            call.log,
            lambda: None if (took_s := known_s(forward, earlier)) is None else _BACKWARD_FACTOR * took_s,
            lambda: self._backward_reached(worker, number, site),
            self.rechecks,
            next(iter(recording.accelerators), None),
        )
        pending.is_saved = was_sent
        worker.uploader.save(save)
        return saved, known.program

    def _should_derive(self, layout: Layout, bytes_per_s: float, forward_s: float) -> bool:
        """Whether a worker should compute a boundary from the segment before it.

        Args:
            layout: The layout of the boundary.
            bytes_per_s: The rate at which the worker receives tensors; 0 if it is unknown.
            forward_s: Seconds of the segment's forward; 0 if unknown. The one before it probably takes as long.
        """
        if self._config.boundaries != "auto":
            return self._config.boundaries == "derive"
        return self._is_accumulating and layout.span_bytes > bytes_per_s * forward_s > 0

    def _may_be_freed(
        self, worker: WorkerHandle, worker_session: WorkerSession, source: RecordedSource, tensor: Tensor
    ) -> SourceTensor:
        """Returns a source whose memory FSDP may free: a copy, unless the worker stores it. NOTE [Sharded], Rule 3."""
        address, layout = source.named, source.layout
        if isinstance(address, bytes) and worker.uploader.stored.knows(worker_session, address):
            return SourceTensor(address, layout, None, False, source.is_transient)
        # FSDP preserves version counters, so an equal counter does not prove that an earlier copy is still right.
        can_share = isinstance(address, bytes)
        value = self.copies.copy_of(tensor, layout, address) if can_share else copy_exact(tensor, layout)
        return SourceTensor(address, layout, value, True, source.is_transient)

    def _save_of(
        self,
        call: CheckpointedCall,
        connection: Connection,
        worker_session: WorkerSession,
        number: int,
        program: EncodedProgram,
        sources: Sequence[SourceTensor],
        generator_states: Sequence[bytes],
        *,
        is_predicted: bool = False,
    ) -> SegmentUpload:
        log = call.log

        def count(size_bytes: int) -> None:
            log.traffic(up_bytes=size_bytes)
            connection.traffic.add(up_bytes=size_bytes)

        return SegmentUpload(
            worker_session=worker_session,
            segment=number,
            program=program.encoded,
            program_address=program.address,
            sources=sources,
            generator_states=generator_states,
            name=call.name,
            queued_bytes=sum([source.layout.span_bytes for source in sources if source.is_copy]),
            count=count,
            sent=log.uploaded,
            spared=log.spared,
            is_predicted=is_predicted,
            made=device_moments([s.value for s in sources if s.layout.is_on_accelerator and s.value is not None]),
        )

    def _next_target(self, whole: tuple[int, int] | None = None) -> tuple[WorkerHandle, WorkerSession, int]:
        """Returns the worker for the next segment and the segment's number.

        Args:
            whole: For a whole micro-batch, as in `PendingCall`.

        Raises Refusal if no worker can be reached.
        """
        with self._lock:
            up = {
                worker.connection.name: (worker, worker_session)
                for worker in self._workers
                if (worker_session := worker.up) is not None
            }
            if not up:
                why = self._workers[0].connection.why_down if self._workers else "none is named"
                raise Refusal(f"{UNREACHABLE}: {why}", is_said=True)
            speeds = self._speeds or {name: worker.connection.speed for name, (worker, _) in up.items()}
            is_known = all(speeds.get(name) for name in up)
            known = {name: speeds[name] if is_known else 1.0 for name in up}
            chosen = self._placement.choose_worker(known) if whole is None else worker_of_whole(*whole, known)
            if chosen is None:
                raise Refusal(TRAINERS_SHARE, is_said=True, is_chosen=True)
            return *up[chosen], next(self._numbers)

    @contextmanager
    def accumulating(
        self, trainers_share: int | None, speeds: Mapping[str, float], fixed: FixedDigests, *, keeps_share: bool
    ) -> Iterator[None]:
        """Lets `micro_batch_ended` end passes instead of backwards, which run beside later forwards.

        Args:
            trainers_share: How many of the first segments of each micro-batch no worker gets; see
                `Placement.begin_block`.
            speeds: The relative speeds of workers, by address. They count if all workers have one.
            fixed: Where digests of parameters are noted, which must not change meanwhile.
            keeps_share: Whether the trainer keeps the activations of these segments instead of recomputing them.
        """
        try:
            with self._lock:
                self._is_accumulating, self._keeps_share = True, keeps_share
                self._fixed = threading.get_ident(), fixed
                self._kept = 0  # a forward of the block before may have failed
                self._placement.begin_block(trainers_share)
                self._speeds = speeds
            yield
        finally:
            with self._lock:
                self._placement.end_block()
                self._is_accumulating, self._keeps_share, self._fixed = False, False, None
                self._speeds = {}

    def micro_batch_ended(self) -> int:
        """Ends a pass inside an accumulation block. Returns of how many segments the trainer keeps the activations."""
        with self._lock:
            self._placement.backward()
            kept, self._kept = self._kept, 0
            return kept

    def take_all(self) -> None:
        """Lets no worker have a segment of the present block that begins from now on."""
        with self._lock:
            self._placement.take_all()

    def take_last(self, segments: int) -> None:
        """Lets no worker have so many of the last segments of the next micro-batch."""
        with self._lock:
            self._placement.take_last(segments)

    def _differences(
        self,
        worker: WorkerHandle,
        worker_session: WorkerSession,
        device: torch.device,
        *,
        computes_on_host: bool = False,
    ) -> Mapping[str, tuple[str, str]]:
        """Returns why a worker computes other bits than a local device, and logs it once; empty if it does not."""
        computes_on_host = computes_on_host and device.type != "cpu"  # which is the device otherwise
        key = worker_session.number, device, computes_on_host
        mismatch = worker.differences.get(key)
        if mismatch is None:
            mismatch = worker.differences[key] = differences(
                fingerprint_with_host(device),
                worker_session.fingerprint,
                computes_on_host=computes_on_host,
            )
            # A segment that also computes on a CPU which differs is refused, not compared within tolerances.
            if (
                mismatch
                and not computes_on_host
                and not mismatch.keys() & DECISIVE
                and self._config.numerics != "exact"
            ):
                logger.warning(
                    "Worker %s computes other bits than this trainer: %s. Its recomputations are compared within "
                    'tolerances; numerics="exact" keeps such segments on the trainer.',
                    worker.connection.name,
                    in_words(mismatch),
                    extra=about(self.journal.session),
                )
        return mismatch

    def _backward_reached(self, worker: WorkerHandle, number: int, site: CallSite) -> list[int]:
        with self._lock:
            if not self._is_accumulating:
                self._placement.backward()
            self._sites.keep(site)
            return worker.upcoming(number)


def _predecessors(
    segment: RecordedSegment,
    worker_session: WorkerSession,
    speculation: SpeculationHistory,
    derives: Callable[[Layout], bool],
) -> list[Predecessor]:
    """Returns the predecessors of a segment with whose backward the worker may continue.

    Args:
        segment: The segment as it was recorded in forward.
        worker_session: The worker session that gets the segment.
        speculation: The history of the segment's call site.
        derives: Whether the worker should compute a boundary of this layout from the segment before it.
    """
    predecessors = []
    for source, before, output in segment.predecessors:
        remote = before.remote
        # A worker can predict the gradient of a predecessor's output only if it has the predecessor.
        if not isinstance(remote, SavedSegment) or remote.worker_session is not worker_session:
            continue
        if speculation.should_speculate(source):
            layout = segment.call.recording.sources[source].layout
            derived = layout if derives(layout) else None
            predecessors.append(Predecessor(speculation, source, weakref.ref(remote), output, derived))
    return predecessors

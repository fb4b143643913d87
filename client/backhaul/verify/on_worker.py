"""Computes recorded calls again on a worker, over a session as trainers have."""

import itertools
import time
from collections.abc import Sequence

from torch import Tensor

from backhaul._config import Config
from backhaul._evidence.files import UnusableError
from backhaul._observe.call_log import CallLog
from backhaul._session import Session
from backhaul._worker_client.remote_segment import SavedSegment
from backhaul._worker_client.upload.segment_upload import SegmentUpload, SourceTensor
from backhaul.verify.recomputation import Fingerprints, Recomputation
from backhaul.verify.stored_calls import StoredBackward, StoredCall
from backhaul_runtime.errors import CompilingError
from backhaul_runtime.process.fingerprint import differences
from backhaul_runtime.program.codec import address_of_program
from backhaul_runtime.tensors.digest import content_digest, tensor_address
from backhaul_runtime.tensors.layout import Layout
from backhaul_runtime.tensors.staging import device_moments

_COMPILE_S = 600.0
_POLL_S = 1.0


class VerifyingSession(Session):
    """A session that computes calls again that other sessions have recorded. Close it afterwards.

    Args:
        config: The resolved settings of the session, with one worker.

    Raises:
        BackhaulError: The errors of `connect`.
    """

    def __init__(self, config: Config) -> None:
        self._numbers = itertools.count(1)
        super().__init__(config)

    def recompute(self, call: StoredCall, backward: StoredBackward | None) -> Recomputation:
        """See `Recomputer`. Waits while the worker compiles the program, for 10 minutes at most."""
        until_s = time.monotonic() + _COMPILE_S
        while True:
            try:
                return self._recomputed(call, backward)
            except CompilingError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(_POLL_S)

    def _recomputed(self, call: StoredCall, backward: StoredBackward | None) -> Recomputation:
        segment = self._saved(call)
        if backward is None:
            stream = segment.recompute({})
            stream.close()
            return Recomputation(stream.compared.digests)
        answer = segment.backward(backward.gradients, backward.state, backward.summed, call.due, {}, checks_bytes=True)
        return Recomputation(answer.compared.digests, answer.contributions)

    def _saved(self, call: StoredCall) -> SavedSegment:
        worker = next(iter(self._workers))
        if (worker_session := worker.up) is None:
            raise UnusableError(f"the worker {worker.connection.name} can't be reached: {worker.connection.why_down}")
        log = CallLog(self._dispatcher.journal.log(call.label))
        sources = [_named(*source) for source in call.sources]
        upload = SegmentUpload(
            worker_session=worker_session,
            segment=next(self._numbers),
            program=call.encoded,
            program_address=address_of_program(call.encoded),
            sources=sources,
            generator_states=call.generator_states,
            name=call.label,
            queued_bytes=sum(layout.span_bytes for _, layout in call.sources),
            count=lambda size_bytes: log.traffic(up_bytes=size_bytes),
            sent=log.uploaded,
            compares_outputs=call.compares_outputs,
            made=device_moments([tensor for tensor, layout in call.sources if layout.is_on_accelerator]),
        )
        accelerator = call.device if call.device.type == "cuda" else None
        segment = SavedSegment(
            worker.connection, worker.uploader, upload, log, lambda: None, _nothing, None, accelerator
        )
        worker.uploader.save(upload)
        return segment

    def differences(self, call: StoredCall) -> Fingerprints:
        """See `Recomputer`."""
        there = next(iter(self._workers)).up
        if there is None:
            return {}
        return differences(call.fingerprint, there.fingerprint, computes_on_host=call.computes_on_host)


def _nothing() -> Sequence[int]:
    return ()


def _named(tensor: Tensor, layout: Layout) -> SourceTensor:
    address = tensor_address(layout, content_digest(tensor, layout))
    return SourceTensor(address, layout, tensor, is_copy=True, is_transient=True)

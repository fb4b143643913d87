"""Sends a segment to a worker, with the program and the tensors that the worker lacks."""

import itertools
import logging
from collections.abc import Collection, Mapping
from functools import partial
from time import perf_counter

from backhaul._worker_client.connection.calls import call_unary
from backhaul._worker_client.connection.connection import Connection
from backhaul._worker_client.connection.deadlines import Liveness
from backhaul._worker_client.connection.exchange import decoded_error
from backhaul._worker_client.connection.shared_memory import sending
from backhaul._worker_client.upload.compression import Compression, TensorDifference
from backhaul._worker_client.upload.refused_programs import RefusedPrograms
from backhaul._worker_client.upload.segment_upload import SegmentUpload
from backhaul._worker_client.upload.stored_tensors import StoredTensors
from backhaul._worker_client.upload.tensor_sender import TensorSender
from backhaul_proto.v1 import program_pb2, segment_pb2
from backhaul_runtime.errors import CompilingError, ProgramError, TransferError, WorkerError, WorkerLostError
from backhaul_runtime.process.logs import about
from backhaul_runtime.process.threads import only_in
from backhaul_runtime.tensors.deferred_digest import read
from backhaul_runtime.tensors.digest import address_of
from backhaul_runtime.tensors.staging import Side, queued_aside
from backhaul_runtime.wire.layout_codec import encode_layout
from backhaul_runtime.wire.protocol import CHUNK_BYTES, MAX_MESSAGE_BYTES, MAX_NAME
from backhaul_runtime.wire.splicing import Batch
from backhaul_runtime.wire.tensor_batches import OutgoingTensor, batches, payload_bytes

logger = logging.getLogger("backhaul")
MAX_ATTEMPTS = 3
MEASURED_BYTES = 64 << 10
"""Sending fewer bytes takes no longer than a round trip, so it says nothing about the link's rate."""


class SegmentSender:
    """Sends segments, in the uploader's thread.

    Args:
        connection: The connection to the worker.
        tensors: Sends tensors that do not fit into the message of their segment.
        stored: What the worker stores.
        compression: Decides which tensors are sent as differences.
        watch: The signs of life of the worker during uploads.

    Attributes:
        bytes_per_s: The rate at which large tensors have been sent lately; 0 until one was sent.
        last_release: The number of the last release request that the uploader has sent; 0 before the first.
    """

    def __init__(
        self,
        connection: Connection,
        tensors: TensorSender,
        stored: StoredTensors,
        compression: Compression,
        watch: Liveness,
    ) -> None:
        self._connection = connection
        self._tensors = tensors
        self._stored = stored
        self._compression = compression
        self._watch = watch
        self._refused = RefusedPrograms()
        self.bytes_per_s = 0.0
        self.last_release = 0

    @only_in("backhaul-upload")
    def send(self, save: SegmentUpload) -> None:
        """Sends a segment with what the worker lacks of it, and waits until the worker has saved it.

        Raises:
            WorkerError: The worker rejected the segment.
            WorkerLostError: The worker was silent, the connection broke, or the worker evicted tensors as fast as they
                arrived.
        """
        worker_session = save.worker_session
        with queued_aside(Side.DIGESTS, save.made):
            # Forward does not wait for digests of an accelerator, so they may be missing even here. The worker hashes
            # tensors of the CPU as they arrive.
            addresses = [read(source.address) for source in save.sources]
            for index, source in enumerate(save.sources) if not all(addresses) else ():
                if not addresses[index] and source.layout.device != "cpu":
                    addresses[index] = address_of(source.to_read())
        request = segment_pb2.SaveRequest(
            key=segment_pb2.OperationKey(segment=save.segment),
            program=save.program_address,
            transient_sources=[i for i, source in enumerate(save.sources) if source.is_transient],
            generator_states=save.generator_states,
            name=save.name[:MAX_NAME],
            wants_projections=save.wants_projections,
            compares_outputs=save.compares_outputs,
            predecessors=[
                *(
                    segment_pb2.Predecessor(
                        source=predecessor.source,
                        segment=segment.number,
                        output=predecessor.output,
                        derived=None if predecessor.derived is None else encode_layout(predecessor.derived),
                    )
                    for predecessor in save.predecessors
                    if (segment := predecessor.segment()) is not None
                ),
                *(segment_pb2.Predecessor(source=source) for source in save.boundaries),
            ],
            predicted=save.is_predicted,
            superseded=save.superseded(),
            after_release=self.last_release,
        )
        derived = {before.source for before in request.predecessors if before.HasField("derived")}
        for _ in range(MAX_ATTEMPTS):
            if not self._stored.knows(worker_session, save.program_address):
                self._put_program(save)
            result = self._saved(save, request, addresses, derived)
            derived = set()  # a second attempt sends what the worker could not derive
            if not result.program_missing and not result.missing_tensors:
                self._stored.name_transient(save.segment, [addresses[index] for index in request.transient_sources])
                if worker_session.memory is not None and not save.is_predicted:
                    worker_session.memory.make_room()
                return
            # The worker has evicted them since it named them. What it no longer has must be sent again.
            self._stored.unlearn([*result.missing_tensors, *([save.program_address] if result.program_missing else [])])
        raise WorkerLostError(
            f"the worker evicted tensors of segment {save.name} as fast as they arrived: start it with more --memory",
            status="BUSY",
        )

    @only_in("backhaul-upload")
    def _saved(
        self,
        save: SegmentUpload,
        request: segment_pb2.SaveRequest,
        addresses: list[bytes],
        derived: Collection[int],
    ) -> segment_pb2.SaveResult:
        """Sends the request with what the worker lacks; once more, with whole tensors, if it may have been lost."""
        try:
            return self._sent(save, request, addresses, derived, may_differ=True)
        except (TransferError, WorkerLostError) as error:
            if not self._connection.may_repeat(save.worker_session, error):
                raise
            logger.debug("A segment is sent again: %r", error, extra=about(self._connection.run, save.name))
        return self._sent(save, request, addresses, derived, may_differ=False)

    @only_in("backhaul-upload")
    def _sent(
        self,
        save: SegmentUpload,
        request: segment_pb2.SaveRequest,
        addresses: list[bytes],
        derived: Collection[int],
        *,
        may_differ: bool,
    ) -> segment_pb2.SaveResult:
        """Sends missing tensors and the request. The worker computes the addresses of tensors without one."""
        worker_session = save.worker_session
        outgoing_tensors = self._missing_of(save, addresses, derived, may_differ=may_differ)
        differences = [
            outgoing.difference
            for outgoing in outgoing_tensors.values()
            if isinstance(outgoing.difference, TensorDifference)
        ]
        began = perf_counter()
        try:
            stored, result = self._send_batches(save, request, addresses, outgoing_tensors)
        except WorkerError as error:
            if not differences:
                raise
            self._compression.failed(error)
            raise TransferError(f"the worker did not take differences of tensors: {error}") from None
        for key, address in zip(outgoing_tensors, stored, strict=True):
            if isinstance(key, int):
                addresses[key] = address
        if outgoing_tensors:
            took_s = perf_counter() - began
            save.sent(took_s)
            spared_bytes = sum(difference.spared_bytes for difference in differences)
            save.spared(spared_bytes)
            sent_bytes = payload_bytes(outgoing_tensors.values()) - spared_bytes
            encoded_s = sum(difference.took_s for difference in differences)
            self._compression.sent(sent_bytes, took_s - encoded_s, has_differences=bool(differences))
            if sent_bytes >= MEASURED_BYTES:
                rate = sent_bytes / took_s
                self.bytes_per_s = (3 * self.bytes_per_s + rate) / 4 if self.bytes_per_s else rate
            self._stored.learn(worker_session, stored)
        if result is None:
            result = self._ask(save, request, addresses)
        if result.error:
            raise decoded_error(result.error)
        return result

    @only_in("backhaul-upload")
    def _send_batches(
        self,
        save: SegmentUpload,
        request: segment_pb2.SaveRequest,
        addresses: list[bytes],
        outgoing_tensors: Mapping[bytes | int, OutgoingTensor],
    ) -> tuple[list[bytes], segment_pb2.SaveResult | None]:
        """Sends tensors, together with the request if all fit into one message.

        Returns the addresses of the tensors, and the result if the request was sent.
        """
        result = None
        worker_session = save.worker_session
        with sending(worker_session.memory, save.count) as write:
            sent = batches(outgoing_tensors.values(), write)
            begin = list(itertools.islice(sent, 2))
            if not begin or (not begin[1:] and request.ByteSize() <= MAX_MESSAGE_BYTES - 2 * CHUNK_BYTES):
                result = self._ask(save, request, addresses, *begin)
                stored = list(result.stored)
                self._watch.sign()
            else:
                stored = self._tensors.put_batches(worker_session, itertools.chain(begin, sent), save.count)
            if len(stored) != len(outgoing_tensors):  # inside: shared memory is given up
                raise WorkerLostError(f"the worker has taken {len(stored)} tensors of {len(outgoing_tensors)}")
        return stored, result

    @only_in("backhaul-upload")
    def _ask(
        self, save: SegmentUpload, request: segment_pb2.SaveRequest, addresses: list[bytes], batch: Batch | None = None
    ) -> segment_pb2.SaveResult:
        request.sources[:] = addresses
        asked = segment_pb2.Request(session=save.worker_session.session, save=request)
        with self._connection.stubs(save.worker_session).exchange.ask(asked, batch) as pending:
            save.count(pending.sent_bytes)
            return pending.result().save

    @only_in("backhaul-upload")
    def _missing_of(
        self, save: SegmentUpload, addresses: list[bytes], derived: Collection[int], *, may_differ: bool
    ) -> dict[bytes | int, OutgoingTensor]:
        """Returns the sources that the worker lacks, by address or else by position.

        Args:
            save: The upload of the segment.
            addresses: The addresses of its sources. Those of differences are added.
            derived: The positions of sources that the worker computes itself.
            may_differ: Whether tensors may be sent as differences.
        """
        worker_session, outgoing_tensors = save.worker_session, dict[bytes | int, OutgoingTensor]()
        self._compression.begin()
        unknown = self._stored.unknown(worker_session, addresses)
        with queued_aside(Side.TO_HOST, save.made):
            for index, (address, source) in enumerate(zip(addresses, save.sources, strict=True)):
                if address not in unknown or index in derived or address in outgoing_tensors:
                    continue
                outgoing = OutgoingTensor(source.to_read(), source.layout, address)
                if may_differ and not source.is_copy and not source.is_transient:
                    outgoing = self._compression.outgoing(
                        outgoing,
                        partial(self._stored.knows, worker_session),
                        crosses_network=worker_session.crosses_network,
                    )
                    addresses[index] = outgoing.address
                outgoing_tensors[outgoing.address or index] = outgoing
        return outgoing_tensors

    @only_in("backhaul-upload")
    def _put_program(self, save: SegmentUpload) -> None:
        self._refused.check(save.worker_session, save.program_address)
        request = program_pb2.PutProgramRequest(session=save.worker_session.session, program=save.program)
        save.count(request.ByteSize())
        put = self._connection.stubs(save.worker_session).programs.PutProgram
        try:
            call_unary(put, request, self._connection.silence_s)
        except (CompilingError, ProgramError) as error:
            self._refused.note(save.worker_session, save.program_address, error)
            raise
        self._stored.learn(save.worker_session, [save.program_address])

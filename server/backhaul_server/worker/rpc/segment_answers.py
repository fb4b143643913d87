"""Encodes what runs gave as the answers that trainers get.

An answer is a message without tensors, which the first batch of tensors joins, and further messages with tensors.
"""

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from time import time
from typing import Any

from backhaul_proto.v1 import segment_pb2
from backhaul_runtime.program.codec import encode_state
from backhaul_runtime.sealing import sealed
from backhaul_runtime.tensors.staging import Side
from backhaul_runtime.wire.bundle import encode_view
from backhaul_runtime.wire.splicing import SPLICED_BYTES, Batch, encode, field_of
from backhaul_server.worker.engine.device_waits import DeviceWaits
from backhaul_server.worker.engine.executions import BackwardInputs, ExecutionResult
from backhaul_server.worker.engine.segment import Segment, SegmentRequest, result_of

_TENSORS = segment_pb2.Answer.TENSORS_FIELD_NUMBER


def recompute_answer(head: segment_pb2.Answer, segment: Segment, submitted: SegmentRequest) -> bytes:
    """Encodes the answer to a request for saved tensors, which has run, without its tensors."""
    recomputed = result_of(submitted.answer)
    result = segment_pb2.RecomputeResult(
        digests=recomputed.digests,
        views=[encode_view(view) for view in recomputed.bundle.views],
        saved_projections=_projections(recomputed),
        timing=_timing(segment, submitted.arrived_at_s, recomputed),
    )
    return _answer(head, recomputed, recompute=result)


def backward_answer(head: segment_pb2.Answer, segment: Segment, submitted: SegmentRequest) -> bytes:
    """Encodes the answer to a request for a backward, which has run, without its tensors."""
    result = result_of(submitted.answer)
    return _answer(head, result, backward=_backward_result(segment, result, submitted.arrived_at_s))


def pushed_answer(segment: Segment, inputs: BackwardInputs, result: ExecutionResult) -> bytes:
    """Encodes a pushed result without its tensors."""
    head = segment_pb2.Answer(key=segment_pb2.OperationKey(segment=segment.id), start=_encode_inputs(inputs))
    return _answer(head, result, backward=_backward_result(segment, result, time()))


def _answer(head: segment_pb2.Answer, result: ExecutionResult, **kind: Any) -> bytes:
    return segment_pb2.Answer(
        number=head.number, key=head.key, start=head.start, tensor_count=len(result.bundle.tensors), **kind
    ).SerializeToString()


async def message_of(
    batch: Batch | None,
    answer: bytes,
    waits: DeviceWaits,
    join: Callable[[Iterable[bytes | memoryview]], bytes] = sealed,
) -> bytes:
    """Encodes a message of an answer once its tensors are on the host.

    Args:
        batch: The tensors of the message; None for none.
        answer: The message without its tensors, encoded.
        waits: Waits for copies from the device.
        join: Joins the parts of the message, as for `encode`.
    """
    if batch is None:
        return join([answer])
    await waits.copied(Side.TO_HOST, batch.complete)
    return encode(batch, _TENSORS, answer, join)


async def messages_of(
    outgoing: Iterable[Batch], head: segment_pb2.Answer, answer: bytes, waits: DeviceWaits
) -> AsyncIterator[bytes]:
    """Yields the messages of an answer, see `message_of`. Each has the number and the key of `head`."""
    has_begun = False
    for batch in outgoing:
        yield await message_of(batch, head.SerializeToString() if has_begun else answer, waits)
        has_begun = True
    if not has_begun:
        yield await message_of(None, answer, waits)


async def joined(answers: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Joins short answers into sealed messages, because sending a message takes longer than a short answer is worth.

    Yields a message before it takes the next answer from the iterator: taking a result marks it as pushed, although
    the stream may end before the result is sent.
    """
    number, parts = segment_pb2.Answer.MORE_FIELD_NUMBER, list[bytes]()
    async for answer in answers:
        parts.append(field_of(number, answer) if parts else answer)
        if sum(map(len, parts)) >= SPLICED_BYTES:
            yield sealed(parts)
            parts = []
    if parts:
        yield sealed(parts)


def encode_contributions(result: ExecutionResult) -> list[segment_pb2.Contribution]:
    """Encodes the contributions of a backward, in their order."""
    contributions = [
        segment_pb2.Contribution(source=source, uncollected=position in result.uncollected)
        for position, source in enumerate(result.sources)
    ]
    for view in result.bundle.views:
        contributions[view.position].view.CopyFrom(encode_view(view))
    digests = result.contribution_digests  # none unless they were wanted
    for contribution, digest in zip(contributions, digests, strict=False):
        contribution.digest = digest
    return contributions


def _backward_result(segment: Segment, result: ExecutionResult, requested_at_s: float) -> segment_pb2.BackwardResult:
    return segment_pb2.BackwardResult(
        digests=result.digests,
        contributions=encode_contributions(result),
        tensor_digests=result.tensor_digests,
        saved_projections=_projections(result),
        timing=_timing(segment, requested_at_s, result),
        chained_gradients=[
            segment_pb2.SourceGradient(source=source, tensor=outgoing.address)
            for source, outgoing in result.chained.items()
        ],
        goes_on=segment.pushed_next(),
        outputs=result.outputs,
    )


def _encode_inputs(inputs: BackwardInputs) -> segment_pb2.Start:
    return segment_pb2.Start(
        gradients=[segment_pb2.OutputGradient(output=output, tensor=tensor) for output, tensor in inputs.addresses],
        ambient_state=encode_state(inputs.state),
        wants_digests=inputs.wants_digests,
        summed_sources=inputs.summed,
        wanted_outputs=inputs.outputs,
        wants_contribution_digests=inputs.wants_contribution_digests,
    )


def _projections(result: ExecutionResult) -> list[segment_pb2.Projection]:
    return [segment_pb2.Projection(numbers=numbers) for numbers in result.saved_projections]


def _timing(segment: Segment, requested_at_s: float, result: ExecutionResult) -> segment_pb2.Timing:
    was_speculative = result.recompute_at_s < requested_at_s
    return segment_pb2.Timing(
        queued_at_s=segment.queued_at_s if was_speculative else requested_at_s,
        recompute_at_s=result.recompute_at_s,
        recompute_s=result.recompute_s,
        requested_at_s=requested_at_s,
        backward_at_s=result.backward_at_s,
        backward_s=result.backward_s,
    )

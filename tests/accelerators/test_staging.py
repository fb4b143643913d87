"""Work beside the trainer's stream does not wait for it, and none of the two gets the other's memory too early."""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from backhaul_proto.v1 import tensor_pb2
from backhaul_runtime.tensors import staging
from backhaul_runtime.tensors.layout import layout_of
from backhaul_runtime.tensors.staging import (
    Side,
    device_moments,
    host_pieces,
    last_moment,
    queued_aside,
    use_here,
    wait_for,
)
from backhaul_runtime.wire.splicing import deserializer, encode_all
from backhaul_runtime.wire.tensor_batches import OutgoingTensor, batches
from backhaul_runtime.wire.tensor_receiver import TensorReceiver
from unit.test_framing import SHAPES

DEVICE = torch.device("cuda", 0)


def test_what_is_queued_aside_does_not_wait_for_later_work(simulation: object) -> None:
    """A lazy stream runs only what somebody waits for, so the later work has not run if it is in another stream."""
    x = torch.ones(1000, device=DEVICE)
    moments = device_moments([x])
    x * 2
    later = torch.cuda.Event()
    later.record()
    with queued_aside(Side.TO_HOST, moments):
        made = device_moments([x + 1])
    wait_for(made)
    assert not later.query()


def test_memory_of_another_stream_is_not_reused_before_it_was_read() -> None:
    x = torch.ones(1000, device=DEVICE)
    with queued_aside(Side.TO_DEVICE, device_moments([x])):
        arrived = x * 3
        made = device_moments([arrived])
    wait_for(made)
    use_here(arrived)
    read = arrived + 1  # queued in this stream, which has not got so far
    del arrived
    with queued_aside(Side.TO_DEVICE, last_moment(DEVICE)):
        torch.full((1000,), 7.0, device=DEVICE)  # the side stream would get the memory at once
        wait_for(device_moments([x]))
    assert torch.equal(read.cpu(), torch.full((1000,), 4.0, device="cpu"))


@pytest.mark.parametrize("other", [Side.TO_DEVICE, Side.DIGESTS])
def test_what_is_sent_waits_neither_for_what_arrives_nor_for_digests(simulation: object, other: Side) -> None:
    x = torch.ones(1000, device=DEVICE)
    with queued_aside(other, device_moments([x])):
        unrelated = device_moments([x * 2])
    ((piece, complete),) = host_pieces(x, layout_of(x), device_moments([x]))
    assert not any(moment.has_come for moment in complete)  # the thread that queues a copy does not wait for it
    wait_for(complete)
    assert torch.equal(piece.view(torch.float32), torch.ones(1000, device="cpu"))
    assert not any(moment.has_come for moment in unrelated)


def test_a_large_tensor_is_pinned_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PIECE_BYTES", 100)
    tensor, pieces = torch.randn(64, device=DEVICE), list[Tensor]()
    for piece, complete in host_pieces(tensor, layout_of(tensor), device_moments([tensor])):
        wait_for(complete)
        pieces.append(piece)
    assert [len(piece) for piece in pieces] == [100, 100, 56]
    assert torch.equal(torch.cat(pieces).view(torch.float32), tensor.cpu())


def test_a_message_keeps_the_tensor_whose_copy_is_queued() -> None:
    outgoing = OutgoingTensor.of(torch.zeros(4, device=DEVICE))
    tensor = weakref.ref(outgoing.tensor)
    (batch,) = batches([outgoing])
    del outgoing
    assert tensor() is not None
    del batch
    assert tensor() is None


def test_an_error_aside_leaves_the_threads_stream_as_it_was() -> None:
    before = torch.cuda.current_stream(DEVICE)
    x = torch.zeros(1, device=DEVICE)
    with pytest.raises(ValueError, match="in the block"), queued_aside(Side.DIGESTS, device_moments([x])):
        raise ValueError("in the block")
    assert torch.cuda.current_stream(DEVICE) == before


@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES)
def test_a_tensor_goes_from_device_to_device_with_its_layout(make: Callable[[], Tensor]) -> None:
    made = make().detach()
    memory = torch.empty(0, dtype=made.dtype, device="cpu").set_(made.untyped_storage())
    here, tensor = (m.as_strided(made.shape, made.stride(), made.storage_offset()) for m in (memory, memory.to(DEVICE)))
    read_message = deserializer(tensor_pb2.PutTensorsRequest)
    receiver = TensorReceiver(device=DEVICE)
    for message in encode_all(batches([OutgoingTensor.of(tensor)]), 2, tensor_pb2.PutTensorsRequest(session="s")):
        receiver.add(read_message(message).tensors)
    (arrived,) = receiver.tensors()
    assert torch.equal(arrived.cpu(), here)
    assert layout_of(arrived) == layout_of(tensor)

"""What an accelerator's streams are asked for. The device is a fake one; its tensors are the host's."""

import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from backhaul_proto.v1 import tensor_pb2
from backhaul_runtime.tensors import staging
from backhaul_runtime.tensors.layout import host_bytes, layout_of, payload
from backhaul_runtime.tensors.staging import Side, device_moments, host_pieces, queued_aside, wait_for
from backhaul_runtime.wire.splicing import Batch, Chunk, deserializer, encode, encode_all
from backhaul_runtime.wire.tensor_batches import OutgoingTensor, batches
from backhaul_runtime.wire.tensor_receiver import TensorReceiver
from conftest import wait_until
from support.streams import FakeCuda
from unit.test_framing import SHAPES

CPU = torch.device("cpu")
ONE_COPY = ["TO_HOST waits for trainer", "TO_HOST is marked"]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda.installed(monkeypatch)


def pieces_of(tensor: Tensor) -> list[Tensor]:
    pieces = []
    for piece, complete in host_pieces(tensor, layout_of(tensor), device_moments([tensor])):
        wait_for(complete)
        pieces.append(piece)
    return pieces


def test_a_tensor_is_read_beside_the_stream_that_made_it_and_after_it(cuda: FakeCuda) -> None:
    (piece,) = pieces_of(torch.arange(4))
    assert piece.tolist() == payload(torch.arange(4), layout_of(torch.arange(4))).tolist()
    assert cuda.log == ["trainer is marked", *ONE_COPY]


def test_the_thread_that_queues_a_copy_does_not_wait_for_it(cuda: FakeCuda) -> None:
    tensor = torch.zeros(4)
    made = device_moments([tensor])
    with queued_aside(Side.TO_HOST, made):
        side = cuda.current_stream(CPU)
    side.begin()  # with something that takes until `end`
    ((_, complete),) = host_pieces(tensor, layout_of(tensor), made)
    assert not any(moment.has_come for moment in complete)
    side.end()
    assert all(moment.has_come for moment in complete)
    assert not any(entry.startswith("the host waits") for entry in cuda.log)


def test_what_is_sent_waits_neither_for_what_arrives_nor_for_digests(cuda: FakeCuda) -> None:
    for side in (Side.TO_DEVICE, Side.DIGESTS):
        with queued_aside(side, device_moments([torch.zeros(1)])):
            cuda.current_stream(CPU).begin()
    ((_, complete),) = host_pieces(torch.zeros(4), layout_of(torch.zeros(4)), device_moments([torch.zeros(4)]))
    assert all(moment.has_come for moment in complete)


def test_a_large_tensor_is_pinned_in_pieces(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PIECE_BYTES", 100)
    tensor = torch.randn(64)
    pieces = pieces_of(tensor)
    assert [len(piece) for piece in pieces] == [100, 100, 56]
    assert torch.equal(torch.cat(pieces).view(torch.float32), tensor)


def test_a_message_keeps_the_tensor_whose_copy_is_queued(cuda: FakeCuda) -> None:
    outgoing = OutgoingTensor.of(torch.zeros(4))
    tensor = weakref.ref(outgoing.tensor)
    (batch,) = batches([outgoing])
    del outgoing
    assert tensor() is not None
    del batch
    assert tensor() is None


def test_only_the_reader_waits_while_the_trainers_stream_is_busy(cuda: FakeCuda) -> None:
    tensor = torch.zeros(4)
    cuda.trainer.begin()
    outgoing = OutgoingTensor.of(tensor)  # of what is still to be computed
    pieces: list[Tensor] = []
    reader = threading.Thread(
        target=lambda: pieces.extend(p for p, _ in host_pieces(tensor, outgoing.layout, outgoing.made))
    )
    reader.start()
    tensor.fill_(3)
    cuda.trainer.end()
    reader.join(60)
    assert pieces[0].view(torch.float32).tolist() == [3, 3, 3, 3]


def test_an_error_aside_leaves_the_threads_stream_as_it_was(cuda: FakeCuda) -> None:
    with pytest.raises(ValueError, match="in the block"), queued_aside(Side.DIGESTS, device_moments([torch.zeros(1)])):
        raise ValueError("in the block")
    assert cuda.current_stream(CPU) is cuda.trainer


def test_a_message_is_encoded_once_its_tensors_are_on_the_host(cuda: FakeCuda) -> None:
    tensor = torch.zeros(4)
    made = device_moments([tensor])
    with queued_aside(Side.TO_HOST, made):
        side = cuda.current_stream(CPU)
    side.begin()
    ((piece, complete),) = host_pieces(tensor, layout_of(tensor), made)
    batch = Batch(chunks=[Chunk(0, 0, host_bytes(piece))], held=[piece], complete=[*complete])
    encoder = threading.Thread(target=lambda: encode(batch, 2))
    encoder.start()
    wait_until(lambda: "the host waits for TO_HOST" in cuda.log, "the encoder waits")
    side.end()
    encoder.join(60)


@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES.keys())
def test_a_tensor_goes_from_device_to_device_with_its_layout(make: Callable[[], Tensor], cuda: FakeCuda) -> None:
    tensor = make()
    read_message = deserializer(tensor_pb2.PutTensorsRequest)
    messages = list(encode_all(batches([OutgoingTensor.of(tensor)]), 2, tensor_pb2.PutTensorsRequest(session="s")))
    cuda.log.clear()
    receiver = TensorReceiver(device=CPU)
    for message in messages:
        receiver.add(read_message(message).tensors)
    (arrived,) = receiver.tensors()
    assert torch.equal(arrived, tensor.detach())
    assert layout_of(arrived) == layout_of(tensor)
    assert cuda.log == []  # it is copied on the stream of whoever takes it in


def test_on_the_host_nothing_is_put_off() -> None:
    tensor = torch.ones(3)
    assert device_moments([tensor]) == []
    ((piece, complete),) = host_pieces(tensor, layout_of(tensor), [])
    assert complete == []
    assert piece.data_ptr() == tensor.data_ptr()

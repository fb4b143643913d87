"""What an accelerator's streams are asked for. The device is a fake one; its tensors are the host's."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from backhaul_proto.v1 import tensor_pb2
from backhaul_runtime.tensors import staging
from backhaul_runtime.tensors.layout import layout_of, payload
from backhaul_runtime.tensors.staging import device_moments, host_pieces, on_side_stream
from backhaul_runtime.wire.splicing import deserializer, encode_all
from backhaul_runtime.wire.tensor_batches import OutgoingTensor, batches
from backhaul_runtime.wire.tensor_receiver import TensorReceiver
from support.streams import FakeCuda
from unit.test_framing import SHAPES

CPU = torch.device("cpu")
ONE_READING = ["side waits for trainer", "side is marked", "the host waits for side"]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda.installed(monkeypatch)


def on_host(tensor: Tensor) -> Tensor:
    return torch.cat(list(host_pieces(tensor, layout_of(tensor), device_moments([tensor]))))


def test_a_tensor_is_read_beside_the_stream_that_made_it_and_after_it(cuda: FakeCuda) -> None:
    assert on_host(torch.arange(4)).tolist() == payload(torch.arange(4), layout_of(torch.arange(4))).tolist()
    assert cuda.log == ["trainer is marked", *ONE_READING]


def test_a_large_tensor_is_pinned_in_pieces(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PIECE_BYTES", 100)
    tensor = torch.randn(64)
    pieces = list(host_pieces(tensor, layout_of(tensor), device_moments([tensor])))
    assert [len(piece) for piece in pieces] == [100, 100, 56]
    assert torch.equal(torch.cat(pieces).view(torch.float32), tensor)


def test_only_the_reader_waits_while_the_trainers_stream_is_busy(cuda: FakeCuda) -> None:
    tensor = torch.zeros(4)
    cuda.trainer.begin()
    outgoing = OutgoingTensor.of(tensor)  # of what is still to be computed
    pieces: list[Tensor] = []
    reader = threading.Thread(target=lambda: pieces.extend(host_pieces(tensor, outgoing.layout, outgoing.made)))
    reader.start()
    tensor.fill_(3)
    cuda.trainer.end()
    reader.join(60)
    assert pieces[0].view(torch.float32).tolist() == [3, 3, 3, 3]


def test_what_is_aside_is_waited_for_also_after_an_error(cuda: FakeCuda) -> None:
    with pytest.raises(ValueError, match="in the block"), on_side_stream(device_moments([torch.zeros(1)])):
        raise ValueError("in the block")
    assert cuda.log[-1] == "the host waits for side"
    assert cuda.current_stream(CPU) is cuda.trainer


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
    (piece,) = host_pieces(tensor, layout_of(tensor), [])
    assert piece.data_ptr() == tensor.data_ptr()

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from backhaul import TransferError, UnsupportedTensorError
from backhaul_proto.v1 import tensor_pb2
from backhaul_runtime.tensors.digest import address_of, content_digest
from backhaul_runtime.tensors.layout import _DTYPES, _QUANTIZED, Layout, copy_exact, layout_of
from backhaul_runtime.wire.bundle import bundle, decode_view, encode_view, unbundle
from backhaul_runtime.wire.layout_codec import decode_layout, encode_layout
from backhaul_runtime.wire.protocol import CHUNK_BYTES
from backhaul_runtime.wire.splicing import deserializer, encode_all
from backhaul_runtime.wire.tensor_batches import OutgoingTensor, batches
from backhaul_runtime.wire.tensor_receiver import TensorReceiver
from support.wire import plain

SHAPES: dict[str, Callable[[], Tensor]] = {
    "rank 0": lambda: torch.tensor(3.5),
    "empty": lambda: torch.randn(3, 0, 2),
    "contiguous": lambda: torch.randn(3, 4),
    "transposed": lambda: torch.randn(3, 4).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    "every other": lambda: torch.randn(4, 6)[:, ::2],
    "one column of many": lambda: torch.randn(64, 64)[:, 3],
    "offset into its storage": lambda: torch.randn(5, 5)[2:],
    "overlapping windows": lambda: torch.randn(10).unfold(0, 4, 1),
    "one row with odd strides": lambda: torch.randn(6, 6).as_strided((1, 3), (100, 2)),
    "conjugate": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "negative bit": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "parameter": lambda: torch.nn.Parameter(torch.randn(3)),
    "larger than a chunk": lambda: torch.randn(CHUNK_BYTES // 4 + 7),
}


def sent(*tensors: Tensor) -> list[Tensor]:
    """Through bytes and back."""
    receiver = TensorReceiver()
    read = deserializer(tensor_pb2.PutTensorsRequest)
    for message in encode_all(batches(map(OutgoingTensor.of, tensors)), 2, tensor_pb2.PutTensorsRequest(session="s")):
        receiver.add(read(message).tensors)
    return receiver.tensors()


@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES.keys())
def test_a_tensor_arrives_with_its_layout(make: Callable[[], Tensor]) -> None:
    tensor = make()
    (arrived,) = sent(tensor)
    assert torch.equal(arrived, tensor.detach())
    assert layout_of(arrived) == layout_of(tensor)
    assert address_of(arrived) == address_of(tensor)


@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES.keys())
def test_an_exact_copy_is_one(make: Callable[[], Tensor]) -> None:
    tensor = make()
    copy = copy_exact(tensor)
    assert torch.equal(copy, tensor.detach())
    assert layout_of(copy) == layout_of(tensor)
    assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or not tensor.numel()


@pytest.mark.filterwarnings("ignore:.*support is experimental")
@pytest.mark.parametrize("dtype", [d for d in _DTYPES.values() if d not in _QUANTIZED], ids=str)
def test_every_dtype_of_torch_arrives(dtype: torch.dtype) -> None:
    raw = torch.arange(1, 12 * dtype.itemsize + 1, dtype=torch.uint8)
    tensor = torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 2, (3, 2), (3, 1))
    (arrived,) = sent(tensor)
    assert layout_of(arrived) == layout_of(tensor)
    assert content_digest(arrived, layout_of(arrived)) == content_digest(tensor, layout_of(tensor))


def test_small_tensors_share_a_message_and_large_ones_take_several() -> None:
    small = [torch.randn(10) for _ in range(50)]
    assert len(list(batches(map(OutgoingTensor.of, small)))) == 1
    large = torch.randn(3 * CHUNK_BYTES // 4)
    messages = list(batches([OutgoingTensor.of(large), *map(OutgoingTensor.of, small)]))
    assert [sum(len(chunk.data) for chunk in message.chunks) for message in messages] == [
        CHUNK_BYTES,
        CHUNK_BYTES,
        CHUNK_BYTES,
        50 * 40,
    ]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.tensor([1.0]), (2, 2)),
        torch.empty(2, device="meta"),
        torch._efficientzerotensor(2),
        torch.zeros(1).view((1,) * 33),
    ],
    ids=["sparse", "meta", "zero", "rank 33"],
)
def test_what_has_no_bytes_is_refused(tensor: Tensor) -> None:
    with pytest.raises(UnsupportedTensorError):
        layout_of(tensor)


def parts() -> tensor_pb2.TensorBatch:
    return plain(next(batches([OutgoingTensor.of(torch.arange(8, dtype=torch.float32))])))


def damaged(change: Callable[[tensor_pb2.TensorBatch], object]) -> tensor_pb2.TensorBatch:
    batch = parts()
    change(batch)
    return batch


BAD = {
    "byte too few": lambda b: setattr(b.chunks[0], "data", b.chunks[0].data[:-1]),
    "byte too many": lambda b: setattr(b.chunks[0], "data", b.chunks[0].data + b"\0"),
    "gap": lambda b: setattr(b.chunks[0], "offset_bytes", 4),
    "offset wraps": lambda b: setattr(b.chunks[0], "offset_bytes", (1 << 64) - 4),
    "twice": lambda b: b.chunks.append(b.chunks[0]),
    "undeclared tensor": lambda b: setattr(b.chunks[0], "tensor", 1),
    "other size declared": lambda b: setattr(b.declarations[0], "size_bytes", 31),
    "unknown dtype": lambda b: setattr(b.declarations[0].spec, "dtype", "float33"),
    "dtype is no dtype": lambda b: setattr(b.declarations[0].spec, "dtype", "nn"),
    "quantized dtype": lambda b: setattr(b.declarations[0].spec, "dtype", "quint8"),
    "negative size": lambda b: b.declarations[0].spec.shape.__setitem__(0, -8),
    "negative stride": lambda b: b.declarations[0].spec.strides.__setitem__(0, -1),
    "no stride": lambda b: b.declarations[0].spec.strides.pop(),
    "product overflows": lambda b: b.declarations[0].spec.CopyFrom(
        tensor_pb2.TensorSpec(dtype="float32", shape=[1 << 40] * 3, strides=[0, 0, 1])
    ),
    "rank 33": lambda b: b.declarations[0].spec.CopyFrom(
        tensor_pb2.TensorSpec(dtype="float32", shape=[1] * 33, strides=[1] * 33)
    ),
    "alignment off the dtype": lambda b: setattr(b.declarations[0].spec, "alignment_bytes", 2),
    "alignment of 64": lambda b: setattr(b.declarations[0].spec, "alignment_bytes", 64),
    "alignment of 256 on CUDA": lambda b: b.declarations[0].spec.MergeFrom(
        tensor_pb2.TensorSpec(device="cuda", alignment_bytes=256)
    ),
    "device that torch does not have": lambda b: setattr(b.declarations[0].spec, "device", "x" * 100_000),
    "conjugate reals": lambda b: setattr(b.declarations[0].spec, "conjugate", True),
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD.keys())
def test_what_contradicts_itself_is_refused(change: Callable[[tensor_pb2.TensorBatch], object]) -> None:
    with pytest.raises(TransferError):
        receiver = TensorReceiver()
        receiver.add(damaged(change))
        receiver.tensors()


def test_what_a_layout_holds_beside_it_is_not_kept() -> None:
    plain_spec = encode_layout(layout_of(torch.ones(2)))
    spec = tensor_pb2.TensorSpec.FromString(plain_spec.SerializeToString() + b"\xc2\x3e\x7d" + bytes(125))
    assert spec.ByteSize() > plain_spec.ByteSize() + 125
    decode_layout(spec)
    assert spec.SerializeToString() == plain_spec.SerializeToString()  # which is the key of a cache


def test_memory_is_asked_for_before_it_is_taken() -> None:
    asked: list[int] = []

    def admit(layout: Layout) -> None:
        asked.append(layout.span_bytes)
        raise TransferError("no room")

    huge = tensor_pb2.TensorDeclaration(
        spec=tensor_pb2.TensorSpec(dtype="uint8", shape=[1 << 40], strides=[1], device="cpu"), size_bytes=1 << 40
    )
    with pytest.raises(TransferError, match="no room"):
        TensorReceiver(admit).add(tensor_pb2.TensorBatch(declarations=[huge]))
    assert asked == [1 << 40]


def test_contents_must_have_their_address() -> None:
    tensor = torch.randn(4)
    receiver = TensorReceiver()
    for batch in batches([OutgoingTensor(tensor, layout_of(tensor), address_of(tensor + 1))]):
        receiver.add(batch)
    with pytest.raises(TransferError, match="it changed while it was read"):
        receiver.stored()


@given(st.binary(max_size=200))
def test_any_bytes_end_in_our_own_error(data: bytes) -> None:
    batch = parts()
    batch.chunks[0].data = data
    try:
        batch.declarations[0].spec.MergeFromString(data)
        receiver = TensorReceiver(_refuse_large)
        receiver.add(batch)
        receiver.tensors()
    except TransferError:
        pass
    except Exception as error:
        assert type(error).__name__ == "DecodeError"


def _refuse_large(layout: Layout) -> None:
    if layout.span_bytes > 1 << 20:
        raise TransferError("no room")


def test_views_of_one_storage_travel_once_and_share_it_again() -> None:
    base = torch.randn(4, 12)
    query, key, value = base.chunk(3, 1)
    other = torch.randn(5)
    positions = [(7, query), (3, key.t()), (5, value), (1, other), (2, other)]
    bundled = bundle(positions)
    assert len(bundled.tensors) == 2
    views = [decode_view(type(encode_view(v)).FromString(encode_view(v).SerializeToString())) for v in bundled.views]
    arrived = unbundle(sent(*(outgoing.tensor for outgoing in bundled.tensors)), views)
    for position, tensor in positions:
        assert torch.equal(arrived[position], tensor)
        assert layout_of(arrived[position]) == layout_of(tensor)
    assert arrived[7].untyped_storage().data_ptr() == arrived[5].untyped_storage().data_ptr()
    assert arrived[1] is arrived[2]


def test_a_view_outside_its_parcel_is_refused() -> None:
    bundled = bundle([(0, torch.randn(8)[:4]), (1, torch.randn(8)[4:])])
    base = torch.randn(16)
    views = bundle([(0, base[:8]), (1, base[8:])]).views
    with pytest.raises(TransferError, match="does not fit"):
        unbundle([outgoing.tensor for outgoing in bundled.tensors], views)
    with pytest.raises(TransferError, match="names tensor"):
        unbundle([], views)


def test_a_layout_is_encoded_whole() -> None:
    layout = layout_of(torch.randn(3, 4, dtype=torch.complex64)[1:].conj())
    spec = encode_layout(layout)
    assert (spec.dtype, list(spec.shape), list(spec.strides), spec.alignment_bytes, spec.conjugate, spec.device) == (
        "complex64",
        [2, 4],
        [4, 1],
        32,
        True,
        "cpu",
    )

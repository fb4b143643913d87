"""Hostile differences of tensors, sent to a real worker: each is refused by name, and nothing of it is kept."""

from collections.abc import Iterator

import grpc
import pytest
import torch
import zstandard
from torch import Tensor

from backhaul import BackhaulError, LimitError, TransferError
from backhaul._worker_client.connection.grpc_errors import error_of
from backhaul_proto.v1 import session_pb2, tensor_pb2
from backhaul_runtime.errors import TensorsMissingError
from backhaul_runtime.process.credentials import bearer, make_token, read_token
from backhaul_runtime.tensors.differences import BLOCK_BYTES, BlockEncoder
from backhaul_runtime.tensors.digest import address_of
from backhaul_runtime.tensors.layout import layout_of
from backhaul_runtime.wire.layout_codec import encode_layout
from backhaul_runtime.wire.protocol import PROTOCOL_VERSION
from backhaul_runtime.wire.tensor_batches import EXPANDED_BYTES, OutgoingTensor, batches
from support.processes import WorkerProcess
from support.wire import Services, plain

COUNT = BLOCK_BYTES // 4 + 1000
"""Elements of a tensor of two blocks."""


class Client:
    """A session that sends what a trainer never would."""

    def __init__(self, channel: grpc.Channel, token: str) -> None:
        self.services, self.metadata = Services(channel), bearer(token)
        request = session_pb2.OpenSessionRequest(protocol_version=PROTOCOL_VERSION)
        self.session = self.services.sessions.OpenSession(request, timeout=60, metadata=self.metadata).session

    def put(self, *messages: tensor_pb2.TensorBatch) -> list[bytes]:
        """Sends messages of one stream. Returns the addresses of what is stored."""
        requests = [tensor_pb2.PutTensorsRequest(session=self.session, tensors=message) for message in messages]
        answer = self.services.tensors.PutTensors(iter(requests), timeout=60, metadata=self.metadata)
        return list(answer.addresses)

    def refused(self, *messages: tensor_pb2.TensorBatch) -> BackhaulError:
        """Returns the error with which the worker refuses messages."""
        with pytest.raises(grpc.RpcError) as caught:
            self.put(*messages)
        return error_of(caught.value)

    def whole(self, tensor: Tensor) -> bytes:
        """Sends a whole tensor. Returns its address."""
        (address,) = self.put(*map(plain, batches([OutgoingTensor(tensor, layout_of(tensor), address_of(tensor))])))
        return address

    def close(self) -> None:
        """Closes the session."""
        request = session_pb2.CloseSessionRequest(session=self.session)
        self.services.sessions.CloseSession(request, timeout=60, metadata=self.metadata)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WorkerProcess, str, str]]:
    """A worker with two credentials, and their tokens."""
    directory = tmp_path_factory.mktemp("credentials")
    tables = []
    for name in ("alice", "bob"):
        make_token(directory / f"{name}.token")
        tables.append(f'[{name}]\ntoken_files = ["{name}.token"]\n')
    (directory / "credentials.toml").write_text("\n".join(tables))
    with WorkerProcess("--memory", "24MiB", "--credentials", str(directory / "credentials.toml")) as process:
        yield process, read_token(directory / "alice.token"), read_token(directory / "bob.token")


@pytest.fixture(scope="module")
def channel(guarded: tuple[WorkerProcess, str, str]) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(guarded[0].address) as channel:
        yield channel


@pytest.fixture
def client(channel: grpc.Channel, guarded: tuple[WorkerProcess, str, str]) -> Iterator[Client]:
    client = Client(channel, guarded[1])
    yield client
    client.close()


def versions(count: int = COUNT, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A tensor before and after a step."""
    before = torch.randn(count).to(dtype)
    return before, before + before.abs() * 2**-12


def frames(now: Tensor, before: Tensor) -> list[bytes]:
    """The frames of a difference."""
    new, old, encoder = (now.view(torch.uint8).numpy(), before.view(torch.uint8).numpy(), BlockEncoder())
    starts = range(0, len(new), BLOCK_BYTES)
    return [encoder.encode(new[at : at + BLOCK_BYTES], old[at : at + BLOCK_BYTES], now.element_size()) for at in starts]


def difference(now: Tensor, before: Tensor, encoded: list[bytes] | None = None) -> tensor_pb2.TensorBatch:
    """A message that declares a tensor as its difference from another one."""
    return tensor_pb2.TensorBatch(
        declarations=[
            tensor_pb2.TensorDeclaration(
                address=address_of(now),
                spec=encode_layout(layout_of(now)),
                size_bytes=now.nbytes,
                difference=tensor_pb2.Difference(base=address_of(before)),
            )
        ],
        chunks=[
            tensor_pb2.TensorChunk(tensor=0, offset_bytes=index * BLOCK_BYTES, data=frame)
            for index, frame in enumerate(frames(now, before) if encoded is None else encoded)
        ],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_difference_is_stored_as_the_whole_tensor(dtype: torch.dtype, client: Client) -> None:
    before, now = versions(dtype=dtype)
    client.whole(before)
    assert client.put(difference(now, before)) == [address_of(now)]
    assert client.whole(now) == address_of(now)  # the worker compares what two owners send under one address


def test_a_base_that_was_never_sent_is_missing(client: Client) -> None:
    before, now = versions()
    error = client.refused(difference(now, before))
    assert isinstance(error, TensorsMissingError)
    assert "send the whole tensor" in error.message


def test_a_base_of_another_credential_or_session_is_as_missing_as_one_that_is_nowhere(
    channel: grpc.Channel, guarded: tuple[WorkerProcess, str, str], client: Client
) -> None:
    before, now = versions()
    nowhere, _ = versions()
    client.whole(before)
    for token in guarded[1:]:
        other = Client(channel, token)
        error, absent = (other.refused(difference(now, base)) for base in (before, nowhere))
        assert isinstance(error, TensorsMissingError)
        assert error.message.replace(address_of(before).hex(), "") == absent.message.replace(
            address_of(nowhere).hex(), ""
        )
        other.whole(before)  # by sending the bytes a session shows that it has them
        assert other.put(difference(now, before)) == [address_of(now)]
        other.close()


def test_the_result_must_have_the_declared_digest(client: Client, guarded: tuple[WorkerProcess, str, str]) -> None:
    before, now = versions()
    other, _ = versions()
    client.whole(before)
    client.whole(other)
    held = guarded[0].telemetry(guarded[1]).memory.cached_bytes
    wrong_base = difference(now, other, frames(now, before))
    wrong_address = difference(now, before)
    wrong_address.declarations[0].address = address_of(before)
    empty = difference(now, before)
    empty.declarations[0].address = b""
    for batch in (wrong_base, wrong_address, empty):
        assert isinstance(client.refused(batch), TransferError)
    assert guarded[0].telemetry(guarded[1]).memory.cached_bytes == held
    assert client.put(difference(now, before)) == [address_of(now)]


def test_a_base_of_another_dtype_or_size_is_refused(client: Client) -> None:
    before, now = versions()
    for base in (before[:-1].clone(), before.view(torch.int32)):
        client.whole(base)
        assert isinstance(client.refused(difference(now, base, frames(now, before))), TransferError)
    gaps = torch.zeros(COUNT, 2)[:, 0]
    client.whole(gaps)
    assert isinstance(client.refused(difference(now, gaps, frames(now, before))), TransferError)


GOOD = zstandard.ZstdCompressor(write_content_size=True)
BAD_FRAMES = {
    "truncated": lambda frame: frame[:-1],
    "trailing": lambda frame: frame + b"x",
    "two frames": lambda frame: frame + frame,
    "skippable": lambda frame: b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" + frame,
    "dictionary": lambda _: zstandard.ZstdCompressor(
        dict_data=zstandard.train_dictionary(2_000, [bytes([seed % 256]) * 40 + b"abc" * 40 for seed in range(200)])
    ).compress(bytes(BLOCK_BYTES)),
    "a bomb": lambda _: GOOD.compress(bytes(256 << 20)),
    "one byte more": lambda _: GOOD.compress(bytes(BLOCK_BYTES + 1)),
    "one byte less": lambda _: GOOD.compress(bytes(BLOCK_BYTES - 1)),
    "not compressed": lambda _: bytes(BLOCK_BYTES),
    "empty": lambda _: b"",
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_a_frame_that_no_trainer_writes_is_refused(name: str, client: Client) -> None:
    before, now = versions()
    client.whole(before)
    first, *others = frames(now, before)
    assert isinstance(client.refused(difference(now, before, [BAD_FRAMES[name](first), *others])), TransferError)


def test_blocks_come_in_order_and_none_is_left_out_or_repeated(client: Client) -> None:
    before, now = versions()
    client.whole(before)
    good = frames(now, before)
    for encoded in (good[:1], good[::-1], [*good, good[-1]], [good[0], good[0], good[1]]):
        assert isinstance(client.refused(difference(now, before, encoded)), TransferError)
    for offset in (1, BLOCK_BYTES - 1, 1 << 62):
        batch = difference(now, before)
        batch.chunks[1].offset_bytes = offset
        assert isinstance(client.refused(batch), TransferError)


def test_a_message_cannot_make_the_worker_decompress_more_than_its_share(client: Client) -> None:
    before = torch.zeros(EXPANDED_BYTES // 4 + BLOCK_BYTES // 4)
    client.whole(before)
    encoded = frames(before, before)
    assert sum(map(len, encoded)) < 2_000
    assert isinstance(client.refused(difference(before, before, encoded)), LimitError)


def test_a_size_that_lies_is_refused_before_memory_is_taken(client: Client) -> None:
    before, now = versions()
    client.whole(before)
    batch = difference(now, before)
    batch.declarations[0].size_bytes += 4
    assert isinstance(client.refused(batch), TransferError)
    batch = difference(now, before)
    batch.declarations[0].spec.shape[0] = batch.declarations[0].size_bytes = 1 << 40
    assert isinstance(client.refused(batch), BackhaulError)
    batch = difference(now, before)
    batch.declarations[0].location.region = 1
    assert isinstance(client.refused(batch), TransferError)


def test_both_versions_are_charged_while_the_difference_arrives(
    client: Client, guarded: tuple[WorkerProcess, str, str]
) -> None:
    # 24 MiB have room for one of these and not for two, and the base is not evicted in favour of the result.
    before = torch.zeros(13 << 18)
    client.whole(before)
    batch = difference(before, before, [])
    batch.declarations[0].address = bytes(16)
    error = client.refused(batch)
    assert isinstance(error, BackhaulError)
    assert "has no room for a tensor" in error.message
    memory = guarded[0].telemetry(guarded[1]).memory
    assert before.nbytes <= memory.cached_bytes + memory.segment_bytes < before.nbytes + (1 << 20)
    assert client.whole(before) == address_of(before)


def test_the_session_may_end_while_a_difference_arrives(
    channel: grpc.Channel, guarded: tuple[WorkerProcess, str, str], client: Client
) -> None:
    leaving = Client(channel, guarded[1])
    before, now = versions()
    leaving.whole(before)
    batch = difference(now, before)

    def messages() -> Iterator[tensor_pb2.PutTensorsRequest]:
        first = tensor_pb2.TensorBatch(declarations=batch.declarations, chunks=batch.chunks[:1])
        yield tensor_pb2.PutTensorsRequest(session=leaving.session, tensors=first)
        leaving.close()
        yield tensor_pb2.PutTensorsRequest(tensors=tensor_pb2.TensorBatch(chunks=batch.chunks[1:]))

    with pytest.raises(grpc.RpcError):
        leaving.services.tensors.PutTensors(messages(), timeout=60, metadata=leaving.metadata)
    memory = guarded[0].telemetry(guarded[1]).memory
    assert memory.cached_bytes + memory.segment_bytes < before.nbytes
    client.whole(before)
    assert client.put(batch) == [address_of(now)]

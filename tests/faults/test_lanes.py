"""Lanes that break, stall or never join, and stripes that are missing, come twice or belong to somebody else."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from google.protobuf.message import Message
from torch import Tensor

import backhaul
from backhaul import BackhaulError, SessionUnknownError, TransferError
from backhaul._worker_client.connection import lanes
from backhaul._worker_client.connection.grpc_errors import error_of
from backhaul_lab.harness.link_proxy import LinkProxy
from backhaul_proto.v1 import session_pb2, tensor_pb2
from backhaul_runtime.process.credentials import make_token
from backhaul_runtime.tensors.digest import address_of
from backhaul_runtime.wire.protocol import CHUNK_BYTES, PROTOCOL_VERSION
from backhaul_runtime.wire.splicing import serialize
from backhaul_runtime.wire.tensor_batches import OutgoingTensor
from conftest import QUIET_S, quiet, wait_until
from support.bits import grad_of
from support.flips import Flips, on_every_channel
from support.lanes import OVER_TCP, LaneProxy, connected, connection_of, counted, joined
from support.processes import WorkerProcess
from support.wire import Services

PIECES = 3
TIMEOUT_S = 60.0
NUMBERS = iter(range(1, 1 << 20))
LARGE = torch.arange(2 << 20, dtype=torch.float32)


@pytest.fixture(scope="module")
def proxy(worker: WorkerProcess) -> Iterator[LaneProxy]:
    with LaneProxy(worker.address) as proxy:
        yield proxy


def there_and_back(session: Any, x: Tensor) -> None:
    """Sends a tensor to the worker, and gets a gradient of the same size, which must have the right bits."""
    x.grad = None
    session.checkpoint(torch.sin, x, returns="gradients").sum().backward()
    assert torch.equal(grad_of(x), x.detach().cos())


@pytest.mark.slow
@pytest.mark.parametrize("after_bytes", [0, 200_000, CHUNK_BYTES + 200_000])
@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_lane_that_is_cut_costs_one_repetition(direction: str, after_bytes: int, worker: WorkerProcess) -> None:
    x = LARGE.clone().requires_grad_()
    with LaneProxy(worker.address) as proxy, connected(proxy.address, 3) as session:
        proxy.arm(direction, after_bytes)
        there_and_back(session, x)
        assert proxy.broken == 1
        assert session.report().fallbacks == 0


@pytest.mark.slow
def test_a_lane_that_is_cut_while_activations_arrive_costs_one_repetition(worker: WorkerProcess) -> None:
    def saves_twice(x: Tensor) -> Tensor:
        return x.sin().exp()  # backward takes the last tensor first, and asks for the first one only then

    x = LARGE.clone().requires_grad_()
    (expected,) = torch.autograd.grad(saves_twice(x).sum(), x)

    def cut(direction: str, method: str, data: bytes) -> bytes:
        if (direction, method) == ("down", "GetStripes"):
            due.append(len(data))
            if len(due) == 2:
                proxy.arm("down", 0)
        return data

    due: list[int] = []
    with (
        LaneProxy(worker.address) as proxy,
        on_every_channel(cut),
        connected(proxy.address, 3) as session,
    ):
        session.checkpoint(saves_twice, x, returns="activations").sum().backward()
        assert torch.equal(grad_of(x), expected)
        assert proxy.broken == 1
        assert session.report().fallbacks == 0


@pytest.mark.slow
def test_the_other_lanes_are_used_again_once_each_has_answered(worker: WorkerProcess) -> None:
    with LaneProxy(worker.address) as proxy, counted() as passed, connected(proxy.address, 3) as session:
        proxy.arm("up", 200_000)
        there_and_back(session, LARGE.clone().requires_grad_())
        assert proxy.broken == 1
        wait_until(lambda: joined(session) == 1, "the other lane has answered")
        before = passed["GetStripes"]
        there_and_back(session, (LARGE + 1).requires_grad_())
        assert session.report().fallbacks == 0
        assert passed["GetStripes"] > before


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_lane_that_stalls_is_given_up_after_the_silence(direction: str, worker: WorkerProcess) -> None:
    x = LARGE.clone().requires_grad_()
    with LaneProxy(worker.address) as proxy, connected(proxy.address, 3, silence_s=1.0) as session:
        proxy.arm(direction, 200_000, stalls=True)
        began = time.monotonic()
        there_and_back(session, x)
        assert proxy.broken == 1
        assert session.report().fallbacks == 0
        assert 0.5 < time.monotonic() - began < QUIET_S / 2


class Tampering:
    """Changes the first message of a method with pieces, and seals it again.

    Attributes:
        done: How many messages it has changed.
    """

    def __init__(self, direction: str, change: Callable[[Any, list[Any]], None]) -> None:
        self._direction, self._change = direction, change
        self._seen: list[Any] = []
        self._lock = threading.Lock()  # guards the fields: each lane has its own thread
        self.done = 0

    def __call__(self, direction: str, method: str, data: bytes) -> bytes:
        with self._lock:
            return self._changed(direction, method, data)

    def _changed(self, direction: str, method: str, data: bytes) -> bytes:
        kinds: dict[str, type[Message]] = {
            "PutStripes": tensor_pb2.PutStripesRequest,
            "GetStripes": tensor_pb2.GetStripesResponse,
        }
        if direction != self._direction or method not in kinds or self.done:
            return data
        message: Any = kinds[method].FromString(data)
        if not message.tensors.chunks:
            return data
        before = message.SerializeToString()
        self._change(message, self._seen)
        self._seen.append(message)
        if message.SerializeToString() == before:
            return data
        self.done += 1
        message.ClearField("checksum")
        return serialize(message)


def is_early(message: Any, _: list[Any]) -> None:
    message.tensors.chunks[0].offset_bytes -= 1


def is_outside(message: Any, _: list[Any]) -> None:
    message.tensors.chunks[0].offset_bytes += 1 << 30


def is_of_no_tensor(message: Any, _: list[Any]) -> None:
    message.tensors.chunks[0].tensor = 99


def is_lost(message: Any, _: list[Any]) -> None:
    message.tensors.ClearField("chunks")


def comes_twice(message: Any, seen: list[Any]) -> None:
    if seen:
        message.tensors.CopyFrom(seen[-1].tensors)


def declares(message: Any, _: list[Any]) -> None:
    message.tensors.declarations.add(spec=tensor_pb2.TensorSpec(dtype="float32", shape=[0], strides=[1]))


TAMPERINGS = [is_early, is_outside, is_of_no_tensor, comes_twice, declares]


@pytest.mark.slow
@pytest.mark.parametrize("change", TAMPERINGS, ids=lambda change: change.__name__)
@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_wrong_stripe_is_refused_and_nothing_of_it_is_used(
    direction: str, change: Callable[[Any, list[Any]], None], proxy: LaneProxy
) -> None:
    tampering = Tampering(direction, change)
    with on_every_channel(tampering), connected(proxy.address, 3) as session:
        there_and_back(session, LARGE.clone().requires_grad_())
        assert tampering.done == 1
        assert session.report().fallbacks == 0


@pytest.mark.slow
def test_a_stripe_that_is_lost_on_its_way_back_is_missed(proxy: LaneProxy) -> None:
    tampering = Tampering("down", is_lost)
    with on_every_channel(tampering), connected(proxy.address, 3) as session:
        there_and_back(session, LARGE.clone().requires_grad_())
        assert tampering.done == 1
        assert session.report().fallbacks == 0


@pytest.mark.slow
@pytest.mark.parametrize("passed_before", [0, 1])
@pytest.mark.parametrize(("direction", "method"), [("up", "PutStripes"), ("down", "GetStripes")])
def test_a_flipped_bit_in_a_stripe_is_caught(direction: str, method: str, passed_before: int, proxy: LaneProxy) -> None:
    flips = Flips(random.Random(0))
    with on_every_channel(flips.on_its_way), connected(proxy.address, 3) as session:
        flips.arm((direction, method), passed_before)
        for number in range(5):  # all stripes of a transfer may come on one lane, and in one message
            there_and_back(session, (LARGE + number).requires_grad_())
            if flips.flipped:
                break
        assert flips.flipped.total() == 1
        assert session.report().fallbacks == 0


@pytest.mark.slow
@pytest.mark.parametrize(("direction", "method"), [("up", "PutStripes"), ("down", "GetStripes")])
def test_a_worker_that_is_lost_with_all_connections_is_noticed(
    direction: str, method: str, worker: WorkerProcess
) -> None:
    def cut(seen: str, name: str, data: bytes) -> bytes:
        if (seen, name) == (direction, method):
            slow_link.end()
        return data

    with LaneProxy(worker.address) as slow_link, on_every_channel(cut), connected(slow_link.address, 3) as session:
        up, began = connection_of(session).up, time.monotonic()
        there_and_back(session, LARGE.clone().requires_grad_())
        assert time.monotonic() - began < QUIET_S / 2  # the session would wait for QUIET_S
        assert session.report().fallbacks == 1
    assert up is not None
    with grpc.insecure_channel(worker.address) as channel:  # otherwise the session would stay until its lease ends
        request = session_pb2.CloseSessionRequest(session=up.session)
        Services(channel).sessions.CloseSession(request, timeout=TIMEOUT_S)


class Striping:
    """A session on two connections whose uploads are written by hand."""

    def __init__(self, address: str) -> None:
        self.channels = [grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) for _ in "ab"]
        self.main, self.lane = map(Services, self.channels)
        self.session = self.open()
        self.tensor = torch.randn(PIECES * CHUNK_BYTES // 4)
        self.data = self.tensor.numpy().tobytes()
        self.number = next(NUMBERS)

    def open(self) -> str:
        request = session_pb2.OpenSessionRequest(protocol_version=PROTOCOL_VERSION)
        return str(self.main.sessions.OpenSession(request, timeout=TIMEOUT_S).session)

    def piece(self, offset_bytes: int, size_bytes: int = CHUNK_BYTES, tensor: int = 0) -> tensor_pb2.TensorChunk:
        data = self.data[offset_bytes : offset_bytes + size_bytes].ljust(size_bytes, b"\0")
        return tensor_pb2.TensorChunk(tensor=tensor, offset_bytes=offset_bytes, data=data)

    def pieces(self, numbers: Sequence[float]) -> list[tensor_pb2.TensorBatch]:
        """Messages with one piece each, which begin at these MiB."""
        return [tensor_pb2.TensorBatch(chunks=[self.piece(int(number * CHUNK_BYTES))]) for number in numbers]

    def put(self, numbers: Sequence[float]) -> Any:
        """Declares the tensor, and sends some pieces on the main connection. Returns the call."""
        declared = OutgoingTensor.of(self.tensor).declaration()
        declared.address = address_of(self.tensor)
        first = tensor_pb2.PutTensorsRequest(
            session=self.session, stripes=self.number, tensors=tensor_pb2.TensorBatch(declarations=[declared])
        )
        more = [tensor_pb2.PutTensorsRequest(tensors=batch) for batch in self.pieces(numbers)]
        return self.main.tensors.PutTensors.future(iter([first, *more]), timeout=TIMEOUT_S)

    def stripes(self, numbers: Sequence[float], session: str = "", timeout_s: float = TIMEOUT_S) -> Any:
        """Sends pieces over the lane. Returns the call."""
        first, *more = self.pieces(numbers)
        requests = [
            tensor_pb2.PutStripesRequest(session=session or self.session, stripes=self.number, tensors=first),
            *(tensor_pb2.PutStripesRequest(tensors=batch) for batch in more),
        ]
        return self.lane.tensors.PutStripes.future(iter(requests), timeout=timeout_s)

    def close(self) -> None:
        for channel in self.channels:
            channel.close()


@pytest.fixture
def striping(worker: WorkerProcess) -> Iterator[Striping]:
    striping = Striping(worker.address)
    yield striping
    striping.main.sessions.CloseSession(session_pb2.CloseSessionRequest(session=striping.session), timeout=TIMEOUT_S)
    striping.close()
    wait_until(lambda: worker.telemetry().memory.cached_bytes == 0, "what was uploaded is freed")


def error(call: Any) -> BackhaulError | None:
    """The error with which a call ends."""
    try:
        call.result()
    except grpc.RpcError as ended:
        return error_of(ended)
    return None


@pytest.mark.parametrize(("main", "lane"), [([0, 1, 2], []), ([0], [1, 2]), ([2], [1, 0]), ([], [2, 0, 1])])
def test_every_order_of_pieces_is_the_tensor(main: list[int], lane: list[int], striping: Striping) -> None:
    upload = striping.put(main)
    joined_lane = striping.stripes(lane) if lane else None
    assert list(upload.result().addresses) == [address_of(striping.tensor)]
    assert joined_lane is None or error(joined_lane) is None


@pytest.mark.parametrize(
    ("main", "lane"),
    [([0], [1, 1]), ([0, 1], [1, 2]), ([0], [1.5, 1]), ([0], [2, 1.5]), ([0], [0.5]), ([0], [2.5]), ([1, 0.5], [2])],
)
def test_pieces_that_overlap_or_lie_outside_end_the_upload(
    main: list[float], lane: list[float], striping: Striping
) -> None:
    upload, joined_lane = striping.put(main), striping.stripes(lane)
    refused = error(upload)
    assert isinstance(refused, TransferError)
    assert "came where" in refused.message
    assert isinstance(error(joined_lane), (TransferError, type(None)))


def test_an_upload_waits_for_its_missing_pieces_and_stores_nothing_without_them(striping: Striping) -> None:
    upload = striping.put([0])
    assert error(striping.stripes([2])) is None
    time.sleep(0.1)
    assert not upload.done()
    upload.cancel()


def test_a_lane_may_come_before_its_upload(striping: Striping) -> None:
    lane = striping.stripes([2, 1])
    time.sleep(0.05)
    assert not lane.done()
    assert error(striping.put([0])) is None
    assert error(lane) is None


def test_a_lane_that_comes_after_its_upload_is_refused_at_once(striping: Striping) -> None:
    assert error(striping.put([0, 1, 2])) is None
    refused = error(striping.stripes([2]))
    assert isinstance(refused, TransferError)
    assert "has ended" in refused.message  # and not that it has waited too long


def test_a_lane_of_another_session_has_no_part_in_an_upload(striping: Striping) -> None:
    upload, other = striping.put([0, 1]), striping.open()
    assert getattr(error(striping.stripes([2], other, timeout_s=0.3)), "status", "") == "DEADLINE_EXCEEDED"
    assert isinstance(error(striping.stripes([2], "unknown")), SessionUnknownError)
    assert not upload.done()
    assert error(striping.stripes([2])) is None
    assert error(upload) is None
    striping.main.sessions.CloseSession(session_pb2.CloseSessionRequest(session=other), timeout=TIMEOUT_S)


def test_two_uploads_cannot_have_one_number(striping: Striping) -> None:
    upload = striping.put([0])
    assert isinstance(error(striping.put([0, 1, 2])), TransferError)
    assert error(striping.stripes([1, 2])) is None
    assert error(upload) is None


def test_an_answer_that_has_ended_has_no_pieces(striping: Striping) -> None:
    request = tensor_pb2.GetStripesRequest(session=striping.session, stripes=1)
    assert list(striping.lane.tensors.GetStripes(request, timeout=TIMEOUT_S)) == []


@pytest.mark.slow
def test_a_session_that_ends_takes_its_uploads_along(striping: Striping) -> None:
    upload = striping.put([0])
    time.sleep(0.1)
    striping.main.sessions.CloseSession(session_pb2.CloseSessionRequest(session=striping.session), timeout=TIMEOUT_S)
    assert isinstance(error(striping.stripes([1, 2])), SessionUnknownError)
    upload.cancel()


@pytest.mark.slow
def test_without_room_for_lanes_the_main_connection_sends_everything(tmp_path: Path) -> None:
    make_token(tmp_path / "token")
    (tmp_path / "credentials.toml").write_text('[alice]\ntoken_files = ["token"]\ninflight = "9MiB"\n')
    options = ["--memory", "512MiB", "--credentials", str(tmp_path / "credentials.toml")]
    with (
        WorkerProcess(*options) as process,
        LinkProxy(process.address, latency_s=0.002, window_bytes=256 << 10) as proxy,
        counted() as passed,
        connected(proxy.address, 8, token_file=str(tmp_path / "token")) as session,
    ):
        there_and_back(session, LARGE.clone().requires_grad_())
        assert session.report().fallbacks == 0
    assert passed["GetStripes"] > 0


@pytest.mark.slow
def test_lanes_that_cannot_join_are_not_waited_for(worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "JOIN_S", QUIET_S)

    class OneConnection(LaneProxy):
        """Takes a second connection, and never passes anything on."""

        def _pass_on(self, source: Any, sink: Any, is_up: bool) -> None:
            if self._sockets.index(source) > 2:
                self._over.wait(QUIET_S)
            super()._pass_on(source, sink, is_up)

    with (
        OneConnection(worker.address) as proxy,
        counted() as passed,
        backhaul.connect(proxy.address, settings=quiet(connections=4, **OVER_TCP)) as session,
    ):
        began = time.monotonic()
        there_and_back(session, LARGE.clone().requires_grad_())
        assert time.monotonic() - began < QUIET_S / 2
        assert session.report().fallbacks == 0
        assert joined(session) == 0
    assert passed["PutStripes"] == passed["GetStripes"] == 0

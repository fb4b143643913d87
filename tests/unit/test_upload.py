"""The sending side of a link, with a worker that answers when the test lets it."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from backhaul._observe.call_log import CallLog
from backhaul._observe.journal import SegmentLog
from backhaul._worker_client.connection.connection import Connection
from backhaul._worker_client.connection.grpc_errors import is_damage
from backhaul._worker_client.connection.worker_session import WorkerSession
from backhaul._worker_client.remote_segment import SavedSegment
from backhaul._worker_client.upload import uploader as uploader_module
from backhaul._worker_client.upload.segment_upload import SegmentUpload, SourceTensor
from backhaul._worker_client.upload.uploader import MOST_GATHERED, Uploader
from backhaul_proto.v1 import program_pb2, segment_pb2, tensor_pb2
from backhaul_runtime.errors import BackhaulError, BudgetError, TransferError, WorkerLostError
from backhaul_runtime.tensors.digest import address_of
from backhaul_runtime.tensors.layout import layout_of
from backhaul_runtime.tensors.staging import device_moments, last_moment
from backhaul_runtime.wire.tensor_receiver import TensorReceiver
from conftest import wait_until
from support.streams import FakeCuda

GENERATION = WorkerSession(1, "session", 1 << 30, {}, 30.0)


class Answer:
    """A method of a stub."""

    def __init__(self, log: list[str], name: str, answer: Any, gate: threading.Event) -> None:
        self.log, self.name, self.answer, self.gate = log, name, answer, gate

    def future(self, request: Any, **_: Any) -> "Future[Any]":
        if not hasattr(request, "SerializeToString"):
            request = list(request)
        pending: Future[Any] = Future()

        def run() -> None:
            self.gate.wait()
            self.log.append(self.name)
            pending.set_result(self.answer(request) if callable(self.answer) else self.answer)

        threading.Thread(target=run).start()
        return pending


def stored(sent: list[tensor_pb2.TensorBatch]) -> list[bytes]:
    """What a worker says of tensors that came."""
    receiver = TensorReceiver(is_for_store=True)
    for batch in sent:
        receiver.add(batch)
    return [address for address, _ in receiver.stored()]


class FakeLink:
    """Stands for a link that is up.

    Attributes:
        gate: Is set when the worker may answer.
    """

    silence_s = 10.0
    run = ""

    def __init__(self, is_open: bool = True) -> None:
        self.gate = threading.Event()
        if is_open:
            self.gate.set()
        self.log: list[str] = []
        self.up: WorkerSession | None = GENERATION
        self.troubles: list[str] = []
        self.why_down = "DOWN"
        self.released: list[tuple[int, list[int]]] = []  # the number of each release request, and its segments
        self.saved_after: list[int] = []  # the number of the last release request before each save
        self.missing: list[list[bytes]] = []
        self.sources: list[bytes] = []
        self.programs = self.tensors = self.exchange = self
        self.refusals: list[BackhaulError | segment_pb2.SaveResult] = []  # of the next saves
        self.PutProgram = Answer(self.log, "program", program_pb2.PutProgramResponse(), self.gate)
        self.PutTensors = Answer(self.log, "tensors", self._put, self.gate)

    def _put(self, messages: list[bytes]) -> tensor_pb2.PutTensorsResponse:
        sent = [tensor_pb2.PutTensorsRequest.FromString(message).tensors for message in messages]
        return tensor_pb2.PutTensorsResponse(addresses=stored(sent))

    def call(self, request: segment_pb2.Request) -> segment_pb2.Answer:
        self.gate.wait()
        self.log.append("release")
        self.released.append((request.release.number, [key.segment for key in request.release.keys]))
        return segment_pb2.Answer(release=segment_pb2.ReleaseResult())

    @contextmanager
    def ask(self, request: segment_pb2.Request, batch: Any = None) -> Iterator[SimpleNamespace]:
        def result() -> segment_pb2.Answer:
            self.gate.wait()
            self.log.append("save" if batch is None else "save with tensors")
            saved = self.refusals.pop(0) if self.refusals else self._saved(request.save, batch)
            if isinstance(saved, BackhaulError):
                raise saved
            return segment_pb2.Answer(save=saved)

        yield SimpleNamespace(result=result, sent_bytes=request.ByteSize())

    def _saved(self, save: segment_pb2.SaveRequest, batch: Any) -> segment_pb2.SaveResult:
        there = stored([] if batch is None else [batch])
        self.sources = [address or there[0] for address in save.sources]
        self.saved_after.append(save.after_release)
        return segment_pb2.SaveResult(missing_tensors=self.missing.pop(0) if self.missing else [], stored=there)

    def may_repeat(self, worker_session: WorkerSession, error: BackhaulError) -> bool:
        return is_damage(error)

    @property
    def link(self) -> Connection:
        """This fake, for the uploader."""
        return cast(Connection, self)

    def stubs(self, worker_session: WorkerSession) -> "FakeLink":
        if worker_session is not self.up:
            raise WorkerLostError("down", status=self.why_down)
        return self

    def trouble(self, worker_session: WorkerSession, error: WorkerLostError) -> None:
        self.troubles.append(error.status)


@contextmanager
def uploading(connection: FakeLink, inflight_bytes: int = 1 << 20, inflight_boundaries: int = 4) -> Iterator[Uploader]:
    uploader = Uploader(connection.link, inflight_bytes=inflight_bytes, inflight_boundaries=inflight_boundaries)
    try:
        yield uploader
    finally:
        connection.gate.set()
        uploader.close()


def failure_of(save: SegmentUpload) -> BaseException | None:
    assert save.saved.wait(10)
    return save.saved.error


def save_of(tensor: torch.Tensor, number: int = 1) -> SegmentUpload:
    layout = layout_of(tensor)
    source = SourceTensor(address_of(tensor), layout, tensor, is_copy=True, is_transient=True)
    nobody = lambda _: None  # noqa: E731
    return SegmentUpload(
        GENERATION, number, b"program", b"address", [source], [], "block", layout.span_bytes, nobody, nobody
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inflight_bytes", "inflight_boundaries", "most"),
    [(400, 4, 2), (1, 4, 2), (1199, 4, 2), (1200, 4, 3), (1200, 2, 2), (1200, 1, 1)],
)
def test_forward_waits_while_too_much_is_on_its_way(
    inflight_bytes: int, inflight_boundaries: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploader_module, "SMALL_BYTES", 0)
    connection = FakeLink(is_open=False)
    with uploading(connection, inflight_bytes=inflight_bytes, inflight_boundaries=inflight_boundaries) as uploader:
        for number in range(most):  # of 400 bytes each
            uploader.save(save_of(torch.zeros(100), number))
        one_more = save_of(torch.ones(100), most)
        thread = threading.Thread(target=uploader.save, args=(one_more,))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        connection.gate.set()
        thread.join(60)
        assert not thread.is_alive()
        one_more.saved.result(10)


def test_forward_does_not_wait_while_little_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader_module, "SMALL_BYTES", 64 * 400)
    connection = FakeLink(is_open=False)
    with uploading(connection) as uploader:
        saves = [save_of(torch.zeros(100), number) for number in range(64)]
        for save in saves:
            uploader.save(save)
        assert uploader._full(save_of(torch.ones(100), 64)) is not None
        connection.gate.set()
        for save in saves:
            save.saved.result(10)


def test_forward_does_not_wait_for_a_worker_that_is_gone() -> None:
    connection = FakeLink(is_open=False)
    with uploading(connection, inflight_bytes=1) as uploader:
        for number in (1, 2):
            uploader.save(save_of(torch.zeros(100), number))
        connection.up = None
        connection.gate.set()
        lost = save_of(torch.ones(100))
        uploader.save(lost)
        error = failure_of(lost)
        assert isinstance(error, WorkerLostError)
        assert error.status == "DOWN"


def saved_segment(connection: FakeLink, uploader: Uploader, save: SegmentUpload) -> SavedSegment:
    return SavedSegment(connection.link, uploader, save, CallLog(SegmentLog("block")), lambda: 0.0, list)


@pytest.mark.parametrize("moves", [True, False], ids=["bytes move", "the trainer's own device is at work"])
def test_backward_waits_for_an_upload_however_long_it_takes(moves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backhaul._worker_client.connection.deadlines.SHORTEST_EXECUTION_LIMIT_S", 0.2)
    connection = FakeLink(is_open=False)
    connection.silence_s = 0.2
    with uploading(connection, inflight_bytes=1) as uploader:
        save = save_of(torch.zeros(100))
        segment = saved_segment(connection, uploader, save)

        def send(save: SegmentUpload) -> None:
            for _ in range(10):
                threading.Event().wait(0.1)
                if moves:
                    uploader.watch.sign()

        monkeypatch.setattr(uploader.sender, "send", send)
        uploader.save(save)
        assert segment._repeated(lambda: "asked") == "asked"


def test_backward_does_not_wait_for_an_upload_to_a_worker_that_is_gone() -> None:
    connection = FakeLink(is_open=False)
    with uploading(connection, inflight_bytes=1) as uploader:
        save = save_of(torch.zeros(100))
        segment = saved_segment(connection, uploader, save)
        uploader.save(save)
        connection.up = None
        with pytest.raises(WorkerLostError) as caught:
            segment._repeated(lambda: "asked")
        assert caught.value.status == "DOWN"


@pytest.mark.parametrize(
    ("elements", "inflight_bytes", "saves", "given", "sent"),
    [
        (1000, 1, 1, {}, ["save with tensors"]),
        (10, 1 << 20, 2, {}, ["save with tensors", "save"]),
        (10, 1 << 20, 1, {"missing": [[address_of(torch.zeros(10))]]}, ["save with tensors"] * 2),
        (10, 1 << 20, 1, {"refusals": [TransferError("damaged")]}, ["save with tensors"] * 2),
        (10, 1 << 20, 1, {"refusals": [WorkerLostError("damaged", status="DAMAGED")]}, ["save with tensors"] * 2),
        (1 << 20, 1 << 30, 1, {}, ["tensors", "save"]),
    ],
    ids=[
        "a tensor that is larger than the bound goes alone",
        "a tensor that the worker has is not sent again",
        "a tensor that the worker gave up is sent again",
        "a damaged save is sent again",
        "a save with a damaged answer is sent again",
        "a tensor that does not fit one message goes first",
    ],
)
def test_what_is_sent(elements: int, inflight_bytes: int, saves: int, given: dict[str, Any], sent: list[str]) -> None:
    connection = FakeLink()
    vars(connection).update(given)
    with uploading(connection, inflight_bytes=inflight_bytes) as uploader:
        for number in range(saves):
            save = save_of(torch.zeros(elements), number)
            uploader.save(save)
            save.saved.result(10)
    assert connection.log == ["program", *sent]
    assert connection.sources == [address_of(torch.zeros(elements))]


def test_a_transient_tensor_is_sent_again_once_no_segment_names_it() -> None:
    connection = FakeLink()
    with uploading(connection) as uploader:

        def save(number: int) -> str:
            sent = save_of(torch.zeros(10), number)
            uploader.save(sent)
            sent.saved.result(10)
            return connection.log[-1]

        assert [save(1), save(2)] == ["save with tensors", "save"]
        uploader.release(GENERATION, 1)
        assert save(3) == "save"  # the second one names it, too
        uploader.release(GENERATION, 2)
        uploader.release(GENERATION, 3)
        assert save(4) == "save with tensors"


def test_tensors_of_a_refused_save_are_not_sent_again() -> None:
    connection, stored_there = FakeLink(), [address_of(torch.zeros(10))]
    connection.refusals = [segment_pb2.SaveResult(error=BudgetError("full").to_bytes(), stored=stored_there)]
    with uploading(connection) as uploader:
        refused, other = save_of(torch.zeros(10)), save_of(torch.zeros(10), 2)
        for save in (refused, other):
            uploader.save(save)
        assert isinstance(failure_of(refused), BudgetError)
        other.saved.result(10)
        assert connection.log == ["program", "save with tensors", "save"]


def test_a_segment_released_before_it_was_sent_is_not_sent() -> None:
    connection = FakeLink(is_open=False)
    with uploading(connection) as uploader:
        first, second = save_of(torch.zeros(10)), save_of(torch.ones(10), 2)
        owners = [nn.Identity(), nn.Identity()]
        for number, (owner, save) in enumerate(zip(owners, (first, second), strict=True), 1):
            save.owner = uploader.release_after(owner, GENERATION, number)
            uploader.save(save)
        assert uploader.segments() == [1, 2]
        del owner, owners[1]
        assert uploader.segments() == [1]
        connection.gate.set()
        first.saved.result(10)
        assert "released before it was sent" in str(failure_of(second))
        wait_until(lambda: "release" in connection.log, "the second is released")
        assert connection.log == ["program", "save with tensors", "release"]
        owners.clear()
        wait_until(lambda: connection.log.count("release") == 2, "the first is released")


def test_a_release_is_sent_until_the_worker_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader_module, "REPEAT_S", 0.01)
    connection, segments = FakeLink(), list(range(1, 2 * MOST_GATHERED))
    connection.up = None
    with uploading(connection) as uploader:
        for segment in segments:
            uploader.release(GENERATION, segment)
        wait_until(lambda: len(connection.troubles) > MOST_GATHERED, "it is tried again")
        connection.up = GENERATION
        wait_until(
            lambda: sum(len(released) for _, released in connection.released) == len(segments), "all are released"
        )
    assert connection.released == [(1, segments[:MOST_GATHERED]), (2, segments[MOST_GATHERED:])]


def test_a_release_ends_with_its_worker_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader_module, "REPEAT_S", 0.01)
    connection = FakeLink()
    connection.up, connection.why_down = None, "LOST"
    with uploading(connection) as uploader:
        uploader.release(GENERATION, 1)
        wait_until(lambda: connection.troubles == ["LOST"], "the session is found lost")
        connection.up = GENERATION
        save = save_of(torch.zeros(10))
        uploader.save(save)
        save.saved.result(10)
    assert (connection.released, connection.troubles) == ([], ["LOST"])


def test_a_save_names_the_last_release_before_it() -> None:
    connection = FakeLink()
    with uploading(connection) as uploader:
        for number in (1, 2, 3):
            save = save_of(torch.full((10,), float(number)), number)
            uploader.save(save)
            save.saved.result(10)
            uploader.release(GENERATION, number)
        wait_until(lambda: len(connection.released) == 3, "all are released")
    assert connection.released == [(1, [1]), (2, [2]), (3, [3])]
    assert connection.saved_after == [0, 1, 2]


def test_what_an_accelerator_has_yet_to_compute_is_sent_once_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, connection, tensor = FakeCuda.installed(monkeypatch), FakeLink(), torch.zeros(100)
    cuda.trainer.begin()
    save = save_of(tensor)
    save.made = device_moments([tensor])
    save.sources = [save.sources[0]._replace(address=b"")]  # of what is there when it is sent
    with uploading(connection) as uploader:
        uploader.save(save)
        wait_until(lambda: "DIGESTS waits for trainer" in cuda.log, "the thread that sends waits")
        tensor.fill_(3)
        cuda.trainer.end()
        save.saved.result(10)
        assert connection.sources == [address_of(torch.full((100,), 3.0))]


def test_nothing_waits_for_what_an_accelerator_is_given_next(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, connection, tensor = FakeCuda.installed(monkeypatch), FakeLink(), torch.ones(100)
    cuda.others = cuda.trainer
    save = save_of(tensor)
    save.made = device_moments([tensor])
    cuda.trainer.begin()
    with uploading(connection) as uploader:
        uploader.save(save)
        assert save.saved.result(5) is None


def test_an_accelerator_that_fails_costs_the_segment_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, connection, tensor = FakeCuda.installed(monkeypatch), FakeLink(), torch.zeros(100)
    lost, other = save_of(tensor), save_of(torch.ones(100))
    lost.made = last_moment(tensor.device)
    with uploading(connection) as uploader:
        with monkeypatch.context() as patch:
            patch.setattr(cuda, "Event", lambda **_: 1 / 0)
            uploader.save(lost)
            assert isinstance(failure_of(lost), WorkerLostError)
        uploader.save(other)
        assert other.saved.result(10) is None


def test_a_prediction_that_could_not_be_sent_holds_nothing() -> None:
    connection = FakeLink(is_open=False)
    with uploading(connection, inflight_bytes=600) as uploader:
        predicted = save_of(torch.zeros(100))
        predicted.is_predicted = True
        connection.up = None
        uploader.save(predicted)
        assert isinstance(failure_of(predicted), WorkerLostError)
    assert predicted.sources == ()

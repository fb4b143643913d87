"""Which tensors are sent as differences: a link, a worker and costs that the test determines."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from backhaul._worker_client.upload import compression
from backhaul._worker_client.upload.compression import (
    FEWEST_RATES,
    LINK_BYTES,
    RESTING,
    WARNED_FAILURES,
    Compression,
    CopyMemory,
    TensorDifference,
)
from backhaul_runtime.tensors.digest import address_of
from backhaul_runtime.tensors.layout import layout_of
from backhaul_runtime.wire.tensor_batches import OutgoingTensor, batches
from backhaul_runtime.wire.tensor_receiver import TensorReceiver

COUNT = 4096
SIZE = 4 * COUNT
THIN, FAST = 12.5e6, 2e9


class Sender:
    """Sends versions of tensors to a receiver that keeps all of them, as far as it is allowed to.

    Attributes:
        held: The tensors of the receiver, by address.
        crosses_network: Whether there is a network between both.
        refuses: Whether the receiver refuses all differences, so that the tensors are sent whole.
    """

    def __init__(self, mode: str = "on", limit_bytes: int = 1 << 30, rate: float = 0.0) -> None:
        self.memory = CopyMemory(limit_bytes)
        self.compression = Compression(mode, self.memory)
        for _ in range(FEWEST_RATES if rate else 0):
            self.compression.sent(LINK_BYTES, LINK_BYTES / rate)
        self.held: dict[bytes, Tensor] = {}
        self.crosses_network = True
        self.refuses = False

    def send(self, *tensors: Tensor) -> int:
        """Sends tensors in one upload. Returns how many of them went as differences."""
        self.compression.begin()
        outgoing = [
            self.compression.outgoing(
                OutgoingTensor(tensor, layout_of(tensor)),
                self.held.__contains__,
                crosses_network=self.crosses_network,
            )
            for tensor in tensors
        ]
        if self.refuses and any(one.difference is not None for one in outgoing):
            self.compression.failed(ValueError("no"))
            outgoing = [OutgoingTensor(tensor, layout_of(tensor)) for tensor in tensors]
        receiver = TensorReceiver(base=self.held.__getitem__, is_for_store=True)
        for batch in batches(outgoing):
            receiver.add(batch)
        for (address, received), tensor in zip(receiver.stored(), tensors, strict=True):
            assert address == address_of(tensor)
            assert torch.equal(received, tensor)
            self.held[address] = received
        differences = sum(isinstance(one.difference, TensorDifference) for one in outgoing)
        self.compression.sent(0, 1.0, has_differences=differences > 0)
        return differences

    def step(self, *tensors: Tensor) -> int:
        """Changes tensors a little, and sends them in one upload."""
        for tensor in tensors:
            tensor.mul_(1 + 2**-12)
        return self.send(*tensors)


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(COUNT)


def test_the_third_version_is_the_first_that_goes_as_a_difference(weight: Tensor) -> None:
    sender = Sender()
    assert [sender.step(weight) for _ in range(4)] == [0, 0, 1, 1]
    assert sender.memory.used_bytes == SIZE
    sender.compression.close()
    assert sender.memory.used_bytes == 0


def test_of_too_many_tensors_the_longest_unused_loses_its_copy(weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "MOST_NOTED", 2)
    sender = Sender()
    for _ in range(2):
        sender.step(weight)
    assert sender.memory.used_bytes == SIZE
    sender.send(torch.randn(COUNT), torch.randn(COUNT))
    assert sender.memory.used_bytes == 0


def test_what_never_changes_is_never_copied(weight: Tensor) -> None:
    sender = Sender()
    sender.send(weight)
    assert sender.memory.used_bytes == 0


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(COUNT, 2)[:, 0], torch.randn(100), torch.zeros(1).expand(COUNT), torch.zeros(0)],
    ids=["gaps", "small", "expanded", "empty"],
)
def test_tensors_with_gaps_and_small_ones_go_whole(tensor: Tensor) -> None:
    sender = Sender()
    assert [sender.send(tensor) for _ in range(4)] == [0, 0, 0, 0]
    assert sender.memory.used_bytes == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64, torch.int8, torch.bool], ids=str)
def test_any_dtype_arrives(dtype: torch.dtype) -> None:
    sender, tensor = Sender(), torch.ones(9 * COUNT).to(dtype)
    assert [sender.send(tensor), sender.send(tensor)] == [0, 0]
    for step in range(3):
        tensor.view(torch.uint8)[step :: 7 + step] ^= 1
        assert sender.send(tensor) == 1


def test_a_transposed_tensor_and_large_ones_arrive() -> None:
    sender, tensors = Sender(), (torch.randn(64, 1000).t(), torch.randn(5 << 18))
    assert [sender.step(*tensors) for _ in range(4)] == [0, 0, 2, 2]


def test_one_tensor_with_two_sources_in_an_upload_goes_as_one_difference(weight: Tensor) -> None:
    sender = Sender()
    assert [sender.step(weight), sender.step(weight)] == [0, 0]
    assert [sender.send(weight.mul_(1.5), weight), sender.step(weight)] == [1, 1]


def test_a_base_that_the_receiver_lacks_is_not_used(weight: Tensor) -> None:
    sender = Sender()
    assert [sender.step(weight) for _ in range(3)] == [0, 0, 1]
    sender.held.clear()
    assert [sender.step(weight) for _ in range(2)] == [0, 1]


def test_an_upload_that_breaks_off_leaves_no_base(weight: Tensor) -> None:
    large, sender = torch.randn(1 << 18), Sender()
    assert [sender.step(large), sender.step(large)] == [0, 0]
    sender.compression.begin()
    outgoing = sender.compression.outgoing(
        OutgoingTensor(large.mul_(1.5), layout_of(large)), sender.held.__contains__, crosses_network=True
    )
    assert outgoing.difference is not None
    next(iter(outgoing.difference.frames()))
    assert [sender.step(large) for _ in range(2)] == [0, 1]


def test_a_tensor_that_is_written_to_while_it_is_sent_has_not_its_declared_digest(weight: Tensor) -> None:
    sender = Sender()
    assert [sender.step(weight), sender.step(weight)] == [0, 0]
    sender.compression.begin()
    outgoing = sender.compression.outgoing(
        OutgoingTensor(weight, layout_of(weight)), sender.held.__contains__, crosses_network=True
    )
    weight.add_(1)
    receiver = TensorReceiver(base=sender.held.__getitem__, is_for_store=True)
    for batch in batches([outgoing]):
        receiver.add(batch)
    with pytest.raises(Exception, match="it changed while it was read"):
        receiver.stored()


def test_without_room_for_a_copy_a_tensor_goes_whole(weight: Tensor) -> None:
    sender, other = Sender(limit_bytes=SIZE), torch.randn(COUNT)
    assert [sender.step(weight, other) for _ in range(4)] == [0, 0, 1, 1]
    assert sender.memory.used_bytes == SIZE


def test_copies_of_tensors_that_are_no_longer_sent_make_room(weight: Tensor) -> None:
    sender, other = Sender(limit_bytes=SIZE), torch.randn(COUNT)
    assert [sender.step(weight) for _ in range(3)] == [0, 0, 1]
    assert [sender.step(other) for _ in range(3)] == [0, 0, 1]
    assert sender.memory.used_bytes == SIZE


def test_copies_are_dropped_while_the_machine_is_short_of_memory(
    weight: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = Sender()
    assert [sender.step(weight) for _ in range(3)] == [0, 0, 1]
    monkeypatch.setattr(compression, "available_memory", lambda: 0.01)
    monkeypatch.setattr(compression, "_CHECK_S", 0.0)
    assert sender.step(weight) == 0
    assert sender.memory.used_bytes == 0


def test_a_receiver_that_refuses_again_and_again_gets_whole_tensors(
    weight: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    sender = Sender()
    assert [sender.step(weight) for _ in range(3)] == [0, 0, 1]
    sender.refuses, tried = True, []
    for _ in range(20):
        failures = sender.compression._failures
        assert sender.step(weight) == 0
        tried.append(sender.compression._failures - failures)
    # After n refusals in a row it is tried again 2**n uploads later.
    assert [upload for upload, is_tried in enumerate(tried) if is_tried] == [0, 3, 8, 17]
    assert f"refused compressed parameters {WARNED_FAILURES} times in a row: no. They are sent whole" in caplog.text
    sender.refuses = False
    assert sum(sender.step(weight) for _ in range(20)) == 20 - (16 - 2)


@pytest.fixture
def known_costs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets encoding and decoding take 2 ns per byte each, however busy the machine is."""
    now_s = iter(range(1 << 30))
    monkeypatch.setattr(compression, "thread_time", lambda: next(now_s) * 2e-9 * SIZE)
    yield


@pytest.mark.usefixtures("known_costs")
@pytest.mark.parametrize(
    ("rate", "crosses_network", "expected"),
    [(THIN, True, [0, 0, 1, 1]), (THIN, False, [0] * 4), (FAST, True, [0] * 4), (0.0, True, [0] * 4)],
    ids=["thin", "same machine", "fast", "unknown"],
)
def test_auto_sends_differences_over_thin_links(
    rate: float, crosses_network: bool, expected: list[int], weight: Tensor
) -> None:
    sender = Sender("auto", rate=rate)
    sender.crosses_network = crosses_network
    assert [sender.step(weight) for _ in range(4)] == expected
    assert sender.memory.used_bytes == (SIZE if any(expected) else 0)


@pytest.mark.usefixtures("known_costs")
def test_auto_leaves_tensors_alone_that_change_altogether(weight: Tensor) -> None:
    sender = Sender("auto", rate=THIN)
    random = torch.randint(-(1 << 31), 1 << 31, (COUNT,)).int()
    sender.send(random)
    sender.send(random.random_())
    assert sender.memory.used_bytes == SIZE
    assert [sender.send(random.random_()) for _ in range(3)] == [0, 0, 0]
    assert sender.memory.used_bytes == 0
    for _ in range(RESTING - 2):
        assert sender.send(random.add_(1)) == 0
    assert [sender.send(random.add_(1)), sender.send(random.add_(1))] == [0, 1]


@pytest.mark.usefixtures("known_costs")
def test_auto_sends_whole_tensors_where_the_link_outruns_the_processor(weight: Tensor) -> None:
    # At 140 MB/s a byte takes 7.1 ns, and a difference spares at most that: less than twice its 4 ns.
    sender = Sender("auto", rate=140e6)
    assert [sender.step(weight) for _ in range(4)] == [0, 0, 0, 0]


def test_the_fastest_of_the_last_uploads_tells_the_rate_of_a_link() -> None:
    sender = Sender("auto")
    for rate in (1e6, 5e6):
        sender.compression.sent(LINK_BYTES, LINK_BYTES / rate)
    assert sender.compression.bytes_per_s == 0
    sender.compression.sent(LINK_BYTES - 1, 1e-6)
    assert sender.compression.bytes_per_s == 0
    sender.compression.sent(LINK_BYTES, LINK_BYTES / 2e6)
    assert sender.compression.bytes_per_s == pytest.approx(5e6)


def test_off_keeps_nothing(weight: Tensor) -> None:
    sender = Sender("off", rate=THIN)
    assert [sender.step(weight) for _ in range(4)] == [0, 0, 0, 0]
    assert sender.memory.used_bytes == 0

"""How many connections a trainer uses, given what it has measured."""

import torch

from backhaul._worker_client.connection.connection_count import COMPARED_BYTES, SAMPLES, ConnectionCount
from backhaul._worker_client.connection.lanes import Lanes
from backhaul_runtime.tensors.layout import Layout
from backhaul_runtime.wire.tensor_batches import OutgoingTensor

SIZE_BYTES = 2 * COMPARED_BYTES


def settled(choice: ConnectionCount, rate_of: dict[int, float], size_bytes: int = SIZE_BYTES) -> int:
    """The count after many uploads, each with the rate that so many connections reach."""
    for _ in range(10 * SAMPLES):
        choice.sent(choice.count, size_bytes, size_bytes / rate_of[choice.count])
    return choice.count


def test_more_connections_are_used_while_they_bring_something() -> None:
    assert settled(ConnectionCount(), {1: 50e6, 2: 99e6, 4: 190e6, 8: 200e6}) == 4
    assert settled(ConnectionCount(), {1: 50e6, 2: 99e6, 4: 190e6, 8: 380e6}) == 8


def test_a_link_that_one_connection_fills_keeps_one() -> None:
    choice = ConnectionCount()
    assert settled(choice, {1: 110e6, 2: 112e6}) == 1
    assert choice.is_settled
    assert settled(choice, {1: 1.0, 2: 1e9}) == 1


def test_a_given_number_stays() -> None:
    assert settled(ConnectionCount(3), {3: 1.0}) == 3


def test_a_worker_on_this_machine_gets_one_whatever_is_measured() -> None:
    choice = ConnectionCount()
    settled(choice, {1: 1e6, 2: 2e6, 4: 4e6, 8: 8e6})
    assert choice.count == 8
    for count in (1, 2):
        choice = ConnectionCount()
        for _ in range(SAMPLES * (count - 1)):
            choice.sent(1, SIZE_BYTES, 1.0)
        assert choice.count == count
        choice.settle()
        assert settled(choice, {1: 1.0}) == 1


def test_uploads_of_other_sizes_and_numbers_of_connections_are_not_compared() -> None:
    choice = ConnectionCount()
    for _ in range(SAMPLES):
        choice.sent(1, SIZE_BYTES, 1.0)
    assert choice.count == 2
    for _ in range(SAMPLES):
        choice.sent(2, 8 * SIZE_BYTES, 0.001)  # no upload of this size was sent over one connection
        choice.sent(1, SIZE_BYTES, 0.001)  # before the lane has joined
        choice.sent(2, COMPARED_BYTES - 1, 0.001)
    assert (choice.count, choice.is_settled) == (2, False)


def test_only_tensors_of_an_accelerator_are_measured_to_a_worker_on_this_machine() -> None:
    def send(device: str) -> None:
        layout = Layout(torch.uint8, (SIZE_BYTES,), (1,), device=device)
        for _ in range(SAMPLES):
            lanes.settle()  # each keep-alive does so
            lanes.sent(1, [OutgoingTensor(torch.empty(0), layout)], 1.0)

    lanes = Lanes()
    send("cpu")
    assert lanes.choice.count == 1
    send("cuda")
    assert lanes.choice.count == 2
    lanes.settle()
    assert (lanes.choice.count, lanes.choice.is_settled) == (2, False)

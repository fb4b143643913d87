"""Tensors whose pieces come in any order: each byte is accepted once, and none is left out."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from backhaul import TransferError
from backhaul_runtime.tensors.digest import address_of
from backhaul_runtime.wire import tensor_receiver
from backhaul_runtime.wire.splicing import Batch, Chunk
from backhaul_runtime.wire.stripes import InTurns, can_stripe, stripes
from backhaul_runtime.wire.tensor_batches import OutgoingTensor
from backhaul_runtime.wire.tensor_receiver import TensorReceiver
from backhaul_server.worker.rpc import stripes as transfers_module
from backhaul_server.worker.rpc.stripes import StripedTransfers

PIECES = 8
SIZE_BYTES = 1 << 10
TENSOR = torch.randn(PIECES * SIZE_BYTES // 4)


def receiver_of(*tensors: Tensor, is_for_store: bool = False) -> TensorReceiver:
    """A receiver to which the tensors of a striped transfer were declared."""
    receiver = TensorReceiver(is_for_store=is_for_store)
    receiver.is_striped = True
    receiver.add(stripes([OutgoingTensor.of(tensor) for tensor in tensors])[0])
    return receiver


def piece(begin: int, end: int) -> Batch:
    data = TENSOR.numpy().tobytes()
    return Batch(chunks=[Chunk(0, begin, data[begin:end])])


def test_a_difference_is_refused_because_its_blocks_come_in_order() -> None:
    receiver = TensorReceiver(base=lambda address: TENSOR)
    receiver.is_striped = True
    declared = OutgoingTensor.of(TENSOR).declaration()
    declared.difference.base = address_of(TENSOR)
    with pytest.raises(TransferError, match="of a striped transfer is declared as a difference"):
        receiver.add(Batch(declarations=[declared]))


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_any_pieces_is_the_tensor(seed: int) -> None:
    chooser, tensors = random.Random(seed), [torch.randn(700), torch.randn(40, 30).t(), torch.randn(0), torch.randn(9)]
    declaring, pieces = stripes([OutgoingTensor.of(tensor) for tensor in tensors])
    receiver = TensorReceiver(is_for_store=seed % 2 == 0)
    receiver.is_striped = True
    receiver.add(declaring)
    chunks = [
        Chunk(chunk.tensor, chunk.offset_bytes + begin, chunk.data[begin : begin + 64])
        for batch in pieces
        for chunk in batch.chunks
        for begin in range(0, len(chunk.data), 64)
    ]
    chooser.shuffle(chunks)
    for number, chunk in enumerate(chunks):
        assert receiver.are_complete is (number == len(chunks))
        receiver.add(Batch(chunks=[chunk]))
    assert receiver.are_complete
    assert all(map(torch.equal, receiver.tensors(), tensors))
    if seed % 2 == 0:
        assert [address for address, _ in receiver.stored()] == [address_of(tensor) for tensor in tensors]


@pytest.mark.parametrize("seed", range(20))
def test_no_byte_is_accepted_twice(seed: int) -> None:
    chooser, receiver, accepted = random.Random(seed), receiver_of(TENSOR), set[int]()
    for _ in range(60):
        begin = 4 * chooser.randrange(TENSOR.nbytes // 4)
        end = begin + 4 * chooser.randrange(1, 100)
        is_new = end <= TENSOR.nbytes and not accepted & set(range(begin, end))
        if is_new:
            receiver.add(piece(begin, end))
            accepted |= set(range(begin, end))
        else:
            with pytest.raises(TransferError, match="came where"):
                receiver.add(Batch(chunks=[Chunk(0, begin, bytes(end - begin))]))
    assert not receiver.are_complete
    with pytest.raises(TransferError, match=f"{len(accepted)} bytes came of the {TENSOR.nbytes} declared"):
        receiver.tensors()


def test_a_transfer_that_is_not_striped_wants_its_pieces_in_order() -> None:
    receiver = TensorReceiver()
    receiver.add(stripes([OutgoingTensor.of(TENSOR)])[0])
    with pytest.raises(TransferError, match="came where"):
        receiver.add(piece(SIZE_BYTES, 2 * SIZE_BYTES))


def test_tensors_are_declared_once() -> None:
    receiver = receiver_of(TENSOR)
    with pytest.raises(TransferError, match="declares tensors after its first message"):
        receiver.add(stripes([OutgoingTensor.of(torch.ones(1))])[0])


def test_the_number_of_gaps_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_receiver, "MOST_RANGES", 3)
    receiver = receiver_of(TENSOR)
    for number in (2, 4, 6):
        receiver.add(piece(number * 100, number * 100 + 4))
    with pytest.raises(TransferError, match="more than 3 gaps"):
        receiver.add(piece(1000, 1004))
    receiver.add(piece(0, 200))
    receiver.add(piece(1000, 1004))


def test_only_large_transfers_are_striped() -> None:
    large, small = OutgoingTensor.of(torch.empty(1 << 19)), OutgoingTensor.of(torch.empty(1))
    assert can_stripe([large])
    assert not can_stripe([small] * 100)
    assert not can_stripe([large, *[small] * 1024])


def test_an_item_goes_to_one_of_the_threads() -> None:
    items = InTurns(iter(range(3)))
    assert [next(items), *items] == [0, 1, 2]


class Received:
    """Stands for the tensors of an upload."""

    are_complete = False

    def __init__(self) -> None:
        self.added: list[Any] = []

    async def add(self, carried: Any) -> None:
        self.added.append(carried)


def run(steps: Any) -> None:
    asyncio.run(asyncio.wait_for(steps, 10))


def test_an_upload_whose_pieces_stay_away_ends_in_time() -> None:
    async def steps() -> None:
        transfers, received = StripedTransfers(), Received()
        with transfers.uploading("session", 1, received) as upload:  # type: ignore[arg-type]
            with pytest.raises(TransferError, match="were missing for 0.01 s"):
                await upload.completed(0.01)
            received.are_complete = True
            await upload.completed(0.01)

    run(steps())


def test_a_lane_waits_only_for_an_upload_that_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers_module, "JOIN_S", 0.05)

    async def steps() -> None:
        transfers, received = StripedTransfers(), Received()
        with pytest.raises(TransferError, match="has ended or was never declared"):
            await transfers.upload("session", 1)
        waiting = asyncio.ensure_future(transfers.upload("session", 1))
        await asyncio.sleep(0)
        with transfers.uploading("session", 1, received) as upload:  # type: ignore[arg-type]
            assert await waiting is upload
            with pytest.raises(TransferError):
                await transfers.upload("other", 1)
            await upload.add(SimpleNamespace())  # type: ignore[arg-type]
        with pytest.raises(TransferError, match="has ended"):
            await upload.add(SimpleNamespace())  # type: ignore[arg-type]
        monkeypatch.setattr(transfers_module, "JOIN_S", 60.0)
        with pytest.raises(TransferError, match="has ended"):
            await transfers.upload("session", 1)
        assert len(received.added) == 1
        assert not transfers._declared

    run(steps())


def test_lanes_take_nothing_of_an_answer_that_has_ended() -> None:
    def taken(pieces: Any) -> Sequence[Batch]:
        return list(pieces)

    transfers, outgoing = StripedTransfers(), [OutgoingTensor.of(torch.ones(1 << 20))]
    assert taken(transfers.answer("session", 1)) == []
    with suppress(ZeroDivisionError), transfers.answering("session", 1, outgoing) as striped:
        assert striped is not None
        assert len(striped[0].declarations) == 1
        pieces = transfers.answer("session", 1)
        next(pieces)
        assert taken(transfers.answer("other", 1)) == []
        raise ZeroDivisionError
    assert taken(pieces) == []
    with transfers.answering("session", 0, outgoing) as striped:
        assert striped is None

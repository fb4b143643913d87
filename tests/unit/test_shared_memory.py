"""Regions of shared memory: who may write where, and what a hostile sender can say of it."""

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from backhaul import TransferError
from backhaul_proto.v1 import tensor_pb2
from backhaul_runtime.tensors.digest import address_of
from backhaul_runtime.tensors.layout import Layout, layout_of
from backhaul_runtime.wire.layout_codec import encode_layout
from backhaul_runtime.wire.shared_memory import LEAST_BYTES, FreeList, Outbox, Region, Slot, make_memory, shared_bytes
from backhaul_runtime.wire.tensor_batches import OutgoingTensor, batches
from backhaul_runtime.wire.tensor_receiver import TensorReceiver

SIZE = 4 * LEAST_BYTES + (64 << 10)


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = make_memory(SIZE)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def ends(memory: int) -> tuple[Outbox, Region]:
    """A region as its sender has it, and as its receiver does."""
    outbox = Outbox()
    outbox.add(Region(1, memory))
    return outbox, Region(1, memory)


def large(mebibytes: int = 1) -> Tensor:
    return torch.randn(mebibytes * LEAST_BYTES // 4)


def put(outbox: Outbox, tensor: Tensor) -> tensor_pb2.Location:
    slot = outbox.put(OutgoingTensor.of(tensor))
    assert slot is not None
    return slot.location(layout_of(tensor))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
def test_room_is_nobody_elses_and_comes_back_whole(steps: list[tuple[bool, int]]) -> None:
    room, taken = FreeList(10, 110), dict[int, int]()
    for takes, number in steps:
        if takes:
            begin = room.take(number)
            if begin is not None:
                assert 10 <= begin <= 110 - number
                assert all(begin + number <= other or other + size <= begin for other, size in taken.items())
                taken[begin] = number
            else:
                assert room.free_bytes < number or taken
        elif taken:
            begin = sorted(taken)[number % len(taken)]
            room.give(begin, taken.pop(begin))
        assert room.free_bytes == 100 - sum(taken.values())
    for begin, size in taken.items():
        room.give(begin, size)
    assert room.take(100) == 10


def test_a_region_can_not_be_shrunk(memory: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(memory, 0)


def test_memory_that_is_not_sealed_is_refused() -> None:
    descriptor = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SIZE)
    with pytest.raises(TransferError, match="not sealed"):
        Region(1, descriptor)
    os.close(descriptor)


@pytest.mark.parametrize(
    "make",
    [
        large,
        lambda: large().view(512, -1).t(),
        lambda: torch.randn(LEAST_BYTES // 4 + 3)[3:],
        lambda: torch.randn(LEAST_BYTES // 8, dtype=torch.complex64).conj(),
    ],
    ids=["plain", "transposed", "not aligned", "conjugate"],
)
def test_a_tensor_is_used_in_place_with_its_layout(make: Callable[[], Tensor], ends: tuple[Outbox, Region]) -> None:
    outbox, region = ends
    tensor = make()
    location, layout = put(outbox, tensor), layout_of(tensor)
    region.check(location, layout)
    used = region.use(location, layout)
    assert region.holds(used)
    assert torch.equal(used, tensor)
    assert layout_of(used) == layout
    assert address_of(used) == address_of(tensor)


def test_a_slot_comes_back_with_the_last_view_of_its_tensor(ends: tuple[Outbox, Region]) -> None:
    outbox, region = ends
    tensor = large(4)
    location = put(outbox, tensor)
    view = region.use(location, layout_of(tensor))[5:]
    assert outbox.put(OutgoingTensor.of(tensor)) is None
    del view
    assert outbox.put(OutgoingTensor.of(tensor)) is not None


def test_an_answer_that_has_ended_leaves_what_is_used_in_place(ends: tuple[Outbox, Region]) -> None:
    outbox, region = ends
    tensor, layout = large(2), layout_of(large(2))
    places = [outbox.put(OutgoingTensor.of(tensor)), outbox.put(OutgoingTensor.of(tensor))]
    assert isinstance(places[0], Slot)
    assert isinstance(places[1], Slot)
    used = region.use(places[0].location(layout), layout)
    outbox.end([slot for slot in places if slot is not None])
    put(outbox, torch.zeros_like(tensor))
    assert outbox.put(OutgoingTensor.of(tensor)) is None
    assert torch.equal(used, tensor)
    del used
    put(outbox, tensor)


def test_a_copy_is_the_trainers_own(ends: tuple[Outbox, Region]) -> None:
    outbox, region = ends
    tensor = large(4)
    copied = region.copy(put(outbox, tensor), layout_of(tensor))
    put(outbox, torch.zeros_like(tensor))  # where it was
    assert torch.equal(copied, tensor)
    assert copied.resize_(8 * LEAST_BYTES).numel() == 8 * LEAST_BYTES


def test_a_tensor_in_use_keeps_its_region(memory: int) -> None:
    outbox = Outbox()
    outbox.add(Region(1, memory))
    tensor = large()
    used = Region(1, memory).use(put(outbox, tensor), layout_of(tensor))
    del outbox
    assert torch.equal(used, tensor)


def test_who_lets_go_late_frees_nothing_of_the_next(ends: tuple[Outbox, Region]) -> None:
    outbox, region = ends
    tensor = large(4)
    slot = outbox.put(OutgoingTensor.of(tensor))
    assert isinstance(slot, Slot)
    first = slot.location(layout_of(tensor))
    late = region.use(first, layout_of(tensor))
    region.free_slot(first.slot, first.ticket)
    outbox.withdraw([slot])
    second = put(outbox, tensor)
    region.check(second, layout_of(tensor))
    kept = region.use(second, layout_of(tensor))
    del late
    assert outbox.put(OutgoingTensor.of(tensor)) is None
    assert torch.equal(kept, tensor)


HOSTILE: dict[str, Callable[[tensor_pb2.Location], object]] = {
    "before the region's bytes": lambda location: setattr(location, "offset_bytes", 0),
    "past its end": lambda location: setattr(location, "offset_bytes", SIZE - 64),
    "far past its end": lambda location: setattr(location, "offset_bytes", (1 << 64) - 64),
    "not aligned as declared": lambda location: setattr(location, "offset_bytes", location.offset_bytes + 4),
    "no such slot": lambda location: setattr(location, "slot", 1 << 31),
    "another slot": lambda location: setattr(location, "slot", location.slot + 1),
    "a ticket of before": lambda location: setattr(location, "ticket", location.ticket - 1),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_place_where_no_tensor_can_be(
    change: Callable[[tensor_pb2.Location], object], ends: tuple[Outbox, Region]
) -> None:
    outbox, region = ends
    location = put(outbox, large())
    change(location)
    with pytest.raises(TransferError, match="of region 1"):
        region.check(location, layout_of(large()))


def test_a_place_is_declared_once_and_overlaps_no_other(ends: tuple[Outbox, Region]) -> None:
    outbox, region = ends
    tensor, layout = large(2), layout_of(large(2))
    first, second = put(outbox, tensor), put(outbox, tensor)
    kept = region.use(first, layout)
    for offset in (first.offset_bytes, first.offset_bytes + LEAST_BYTES):
        second.offset_bytes = offset
        with pytest.raises(TransferError, match="overlaps"):
            region.check(second, layout)
    with pytest.raises(TransferError, match="overlaps"):
        region.check(first, layout)
    del kept
    with pytest.raises(TransferError, match="is not what slot"):
        region.check(first, layout)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(torch.float32, (16,), (1,)),
        Layout(torch.float32, (LEAST_BYTES,), (2,)),
        Layout(torch.float32, (LEAST_BYTES,), (1,), device="cuda"),
    ],
    ids=["small", "gaps", "device"],
)
def test_some_tensors_always_go_as_chunks(layout: Layout, ends: tuple[Outbox, Region]) -> None:
    outbox, region = ends
    assert not Outbox.takes(layout)
    with pytest.raises(TransferError, match="can't be in shared memory"):
        region.check(put(outbox, large()), layout)


def test_a_stream_has_chunks_and_places(ends: tuple[Outbox, Region]) -> None:
    outbox, region = ends
    tensors = [torch.randn(7), large(3), large(3), torch.randn(7)]

    def location_of(outgoing: OutgoingTensor) -> tensor_pb2.Location | None:
        slot = outbox.put(outgoing) if Outbox.takes(outgoing.layout) else None
        return slot.location(outgoing.layout) if slot is not None else None

    def locate(location: tensor_pb2.Location, layout: Layout) -> Callable[[], Tensor]:
        region.check(location, layout)
        return lambda: region.copy(location, layout)

    receiver, shared = TensorReceiver(locate=locate, is_for_store=True), 0
    for batch in batches(map(OutgoingTensor.of, tensors), location_of):
        receiver.add(batch)
        shared += shared_bytes(batch)
    assert all(map(torch.equal, receiver.tensors(), tensors))
    assert shared == 3 * LEAST_BYTES
    # One was written elsewhere, for it found no room.
    assert [address for address, _ in receiver.stored()] == [address_of(tensor) for tensor in tensors]


def test_what_is_stored_has_the_address_that_was_said_or_is_refused(ends: tuple[Outbox, Region]) -> None:
    outbox, region = ends
    tensor = large()
    spec = encode_layout(layout_of(tensor))
    location = put(outbox, tensor)
    for said in (b"", address_of(tensor), address_of(tensor + 1)):
        declaration = tensor_pb2.TensorDeclaration(address=said, spec=spec, size_bytes=tensor.nbytes, location=location)
        receiver = TensorReceiver(locate=lambda location, layout: lambda: in_place(region, location), is_for_store=True)
        receiver.add(tensor_pb2.TensorBatch(declarations=[declaration]))
        if said in (b"", address_of(tensor)):
            assert [address for address, _ in receiver.stored()] == [address_of(tensor)]
        else:
            with pytest.raises(TransferError, match="it changed while it was read"):
                receiver.stored()


def in_place(region: Region, location: tensor_pb2.Location) -> Tensor:
    raw = region.raw(location.offset_bytes, LEAST_BYTES)
    return torch.from_numpy(raw).view(torch.float32)


def test_without_shared_memory_no_place_is_taken() -> None:
    spec = next(batches([OutgoingTensor.of(torch.randn(7))])).declarations[0].spec
    declaration = tensor_pb2.TensorDeclaration(spec=spec, size_bytes=28, location=tensor_pb2.Location(region=1))
    with pytest.raises(TransferError, match="no memory is shared"):
        TensorReceiver().add(tensor_pb2.TensorBatch(declarations=[declaration]))

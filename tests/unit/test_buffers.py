import torch

from backhaul_runtime.tensors.buffer_pool import BufferPool

PAGES = 1 << 20


def test_the_memory_of_a_tensor_that_died_is_used_again() -> None:
    buffers = BufferPool(idle_bytes=2 * PAGES)
    first = buffers.take(PAGES - 10)
    pointer = first.data_ptr()
    view = first[5:].view(torch.uint8)
    del first
    assert buffers.take(PAGES).data_ptr() != pointer  # a view is left
    del view
    again = buffers.take(PAGES - 20)
    assert again.data_ptr() == pointer
    assert again.numel() == PAGES - 20
    assert pointer % 64 == 0


def test_idle_memory_is_bounded() -> None:
    buffers = BufferPool(idle_bytes=2 * PAGES)
    held = [buffers.take(PAGES) for _ in range(5)]
    assert buffers.idle_bytes == 2 * PAGES
    del held
    assert sum(map(len, buffers._idle)) == 2 * PAGES


def test_one_larger_than_the_bound_is_not_kept() -> None:
    buffers = BufferPool(idle_bytes=PAGES)
    buffers.take(2 * PAGES)
    assert not buffers._idle


def test_buffers_of_a_size_that_nobody_takes_any_more_make_room() -> None:
    buffers = BufferPool(idle_bytes=2 * PAGES)
    del (held := [buffers.take(PAGES) for _ in range(2)])[:]
    assert not held
    buffers.take(2 * PAGES)
    assert list(map(len, buffers._idle)) == [2 * PAGES]
    buffers.take(3 * PAGES)
    assert list(map(len, buffers._idle)) == [2 * PAGES]

"""Work beside the trainer's stream does not wait for it, and none of the two gets the other's memory too early."""

import torch

from backhaul_runtime.tensors.staging import Side, device_moments, last_moment, queued_aside, use_here, wait_for

DEVICE = torch.device("cuda", 0)


def test_what_is_queued_aside_does_not_wait_for_later_work(simulation: object) -> None:
    """A lazy stream runs only what somebody waits for, so the later work has not run if it is in another stream."""
    x = torch.ones(1000, device=DEVICE)
    moments = device_moments([x])
    x * 2
    later = torch.cuda.Event()
    later.record()
    with queued_aside(Side.TO_HOST, moments):
        made = device_moments([x + 1])
    wait_for(made)
    assert not later.query()


def test_memory_of_another_stream_is_not_reused_before_it_was_read() -> None:
    x = torch.ones(1000, device=DEVICE)
    with queued_aside(Side.TO_DEVICE, device_moments([x])):
        arrived = x * 3
        made = device_moments([arrived])
    wait_for(made)
    use_here(arrived)
    read = arrived + 1  # queued in this stream, which has not got so far
    del arrived
    with queued_aside(Side.TO_DEVICE, last_moment(DEVICE)):
        torch.full((1000,), 7.0, device=DEVICE)  # the side stream would get the memory at once
        wait_for(device_moments([x]))
    assert torch.equal(read.cpu(), torch.full((1000,), 4.0, device="cpu"))

"""A step's peak activation memory, counted from torch's own allocations."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def live_bytes(step: Callable[[], object]) -> list[tuple[int, int]]:
    """Bytes allocated during a step and not before it: (nanoseconds, bytes) at each change.

    From the memory events of torch's profiler, which slow the step down: run one that is not timed. Gradients must be
    there already, or they count too. The events are of the calling thread and of autograd's; see docs/architecture.md
    for what the threads of a session hold beside them.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    live, found = 0, []
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        found.append((event.start_ns(), live))
    return found


def peak_live_bytes(step: Callable[[], object]) -> int:
    """Most bytes that were allocated at once during a step and not before it."""
    return max((live for _, live in live_bytes(step)), default=0)

"""The peak activation memory of a step, computed from torch's own allocations."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def live_bytes(step: Callable[[], object]) -> list[tuple[int, int]]:
    """Returns how many bytes are live that were allocated during a step, as (nanoseconds, bytes) at each change.

    The numbers come from the memory events of torch's profiler, which slow the step down, so do not time this step.
    Gradients that the step allocates are counted as well. Only the calling thread and autograd's threads
    are covered; docs/architecture.md says what the threads of a session hold in addition.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    live, changes = 0, []
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        changes.append((event.start_ns(), live))
    return changes


def peak_live_bytes(step: Callable[[], object]) -> int:
    """Returns the peak number of live bytes that were allocated during a step."""
    return max((live for _, live in live_bytes(step)), default=0)

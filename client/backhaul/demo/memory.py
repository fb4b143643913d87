"""A step's peak activation memory, counted from torch's own allocations."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_live_bytes(step: Callable[[], object]) -> int:
    """Most bytes that were allocated at once during a step and not before it.

    From the memory events of torch's profiler, which slow the step down: run one that is not timed. Gradients must be
    there already, or they count too. The events are of the calling thread and of autograd's; see docs/architecture.md
    for what the threads of a session hold beside them.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak

"""The figures of `backhaul simulate-fleet`. Imports no torch."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from math import log10

from backhaul.simulate.costs import Costs
from backhaul.simulate.fleet.dashboard_costs import DashboardCosts
from backhaul.simulate.fleet.events import simulate
from backhaul.simulate.fleet.figure import FigurePanel, draw_figure
from backhaul.simulate.fleet.flow import enough_workers, flow, torch_step_s
from backhaul.simulate.fleet.outcome import SimulatedFleet
from backhaul.simulate.fleet.setup import FleetSetup

_LINKS = [
    10e6 / 8 * 10 ** (exponent / 10) for exponent in range(41)
]  # from 10 Mbit/s to 100 Gbit/s, in bytes per second
_SMALL_SESSIONS = 400
_INTERVALS = 40


def draw_charts(
    costs: Costs, setup: FleetSetup, simulated: SimulatedFleet | None, dashboard: DashboardCosts | None
) -> str:
    """Draws what binds the fleet over its workers and links, and, if they are known, a loss and a dashboard's load.

    Args:
        costs: Costs of one segment with one micro-batch.
        setup: The fleet with its lost racks.
        simulated: The simulated fleet, if it was simulated.
        dashboard: Costs of a dashboard, if they were measured.
    """
    panels = [_over_workers(costs, setup), _over_links(costs, setup)]
    if simulated is not None and simulated.lost_at_s is not None:
        panels.append(_over_time(costs, setup, simulated))
    if dashboard is not None:
        panels.append(_of_dashboard(setup, dashboard))
    return draw_figure(panels, f"{setup.sessions:,} sessions on {setup.workers:,} workers: what binds the fleet")


def _counts(setup: FleetSetup, most: int) -> list[int]:
    """Returns numbers of workers that are equally far apart on a logarithmic axis."""
    first = max(setup.workers_per_session, most // 10_000)
    numbers = {round(first * (most / first) ** (i / 60)) for i in range(61)}
    return sorted(number for number in numbers if number >= setup.workers_per_session)


def _over_workers(costs: Costs, setup: FleetSetup) -> FigurePanel:
    most = max(4 * enough_workers(costs, setup), 4 * setup.workers)
    counts = _counts(setup, most)
    flows = [(count, flow(costs, setup, workers=count)) for count in counts]
    torch_s = torch_step_s(costs, setup)
    lines = {
        "with Backhaul (balance of flows)": [(count, one.step_s) for count, one in flows],
        "torch's checkpoint, without workers": [(count, torch_s) for count in counts],
    }
    return FigurePanel(
        f"Step over workers, {setup.sessions:,} sessions",
        "workers",
        "step (s)",
        lines,
        {"simulated, with fewer sessions": _simulated_points(costs, setup, counts)},
    )


def _simulated_points(costs: Costs, setup: FleetSetup, counts: Sequence[int]) -> list[tuple[float, float]]:
    """Simulates fleets that are smaller, with the same number of sessions for each worker."""
    points = []
    for count in counts[:: max(1, len(counts) // 9)]:
        ratio = setup.sessions / count
        sessions = max(1, min(setup.sessions, max(_SMALL_SESSIONS, round(ratio))))
        workers = max(setup.workers_per_session, round(sessions / ratio))
        if sessions / workers > 2 * _SMALL_SESSIONS:
            continue  # a step of so many sessions takes long to simulate and is exactly the balance of flows
        # A rack of the same bandwidth for each of its workers, of which there may be less than a rackful.
        small = replace(setup, sessions=sessions, workers=workers, racks_lost=0, placement="even")
        if setup.rack_link_bytes_per_s and workers < setup.rack_size:
            rack_link = setup.rack_link_bytes_per_s * workers / setup.rack_size
            small = replace(small, rack_size=workers, rack_link_bytes_per_s=rack_link)
        points.append((float(count), simulate(costs, small).step_s))
    return points


def _over_links(costs: Costs, setup: FleetSetup) -> FigurePanel:
    names = {
        "worker compute": "workers' cores",
        "worker link up": "workers' links, up",
        "worker link down": "workers' links, down",
        "trainer compute": "a trainer's core",
        "trainer link up": "a trainer's link, up",
    }
    flows = [
        (link * 8, flow(costs, replace(setup, worker_link_bytes_per_s=link, trainer_link_bytes_per_s=link)))
        for link in _LINKS
    ]
    lines = {"step": [(bits, one.step_s) for bits, one in flows]}
    for resource, name in names.items():
        lines[f"what {name} need{'s' if name.startswith('a ') else ''}"] = [
            (bits, one.needs_s[resource]) for bits, one in flows
        ]
    high = max(one.step_s for _, one in flows) * 1.3
    low = min(one.step_s for _, one in flows) / 1_000
    return FigurePanel(
        f"What binds over links, {setup.workers:,} workers",
        "links of workers and trainers (bit/s)",
        "seconds for one step of all sessions",
        lines,
        low=low,
        high=high,
    )


def _over_time(costs: Costs, setup: FleetSetup, simulated: SimulatedFleet) -> FigurePanel:
    """Draws steps per second before and after the loss, in intervals of equal length."""
    lost_at_s = simulated.lost_at_s or 0.0
    first_s = lost_at_s / 2
    interval_s = (simulated.until_s - first_s) / _INTERVALS
    rates = []
    for number in range(_INTERVALS):
        begin_s = first_s + number * interval_s
        ended = bisect_left(simulated.ends_s, begin_s + interval_s) - bisect_left(simulated.ends_s, begin_s)
        rates.append((begin_s + interval_s / 2 - lost_at_s, ended / interval_s))
    before = setup.sessions / flow(costs, setup).step_s
    after_s = (
        flow(costs, setup, workers=setup.workers - setup.workers_lost).step_s
        if (setup.workers > setup.workers_lost)
        else torch_step_s(costs, setup)
    )
    ends = [rates[0][0], 0.0, 0.0, rates[-1][0]]
    levels = [before, before, setup.sessions / after_s, setup.sessions / after_s]
    return FigurePanel(
        f"Loss of {setup.racks_lost:,} of {setup.racks:,} racks",
        "seconds since the loss",
        "steps per second of the fleet",
        {"simulated": rates, "balance of flows": list(zip(ends, levels, strict=True))},
        has_log_x=False,
        has_log_y=False,
        low=0.0,
        high=max(rate for _, rate in rates) * 1.1,
    )


def _of_dashboard(setup: FleetSetup, dashboard: DashboardCosts) -> FigurePanel:
    decades = max(3.0, log10(setup.workers) - 1)
    counts = [10 ** (1 + decades * i / 45) for i in range(46)]
    ratios = sorted({1.0, setup.sessions / setup.workers})
    lines = {
        f"{ratio:g} session{'s' if ratio != 1 else ''} for each worker": [
            (count, dashboard.cores(round(count), round(ratio * count))) for count in counts
        ]
        for ratio in ratios
    }
    lines["one core: the dashboard falls behind above it"] = [(count, 1.0) for count in counts]
    return FigurePanel("Load of the dashboard", "workers", "cores", lines)

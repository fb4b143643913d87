"""What `backhaul simulate-fleet` prints and writes. Imports no torch."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from backhaul.simulate.costs import Costs
from backhaul.simulate.fleet.dashboard_costs import DashboardCosts
from backhaul.simulate.fleet.flow import Flow, break_even_workers, enough_workers, flow, torch_step_s
from backhaul.simulate.fleet.loss import LossOfRacks, loss_of_racks
from backhaul.simulate.fleet.outcome import SimulatedFleet
from backhaul.simulate.fleet.setup import FleetSetup

MOST_SESSIONS, MOST_SEGMENTS = 1_024, 32_768
"""What one worker accepts: docs/limits.md."""


@dataclass(frozen=True, slots=True)
class FleetPrediction:
    """All that is predicted of a fleet.

    Attributes:
        setup: The fleet that is predicted.
        balance: The balance of its flows.
        torch_s: Duration of a step with torch's checkpoint, in seconds.
        enough: Number of workers beyond which further ones do not help.
        break_even: Number of workers from which on a step is shorter than with torch's checkpoint; infinity if none is.
        loss: The costs of the lost racks; None if none is lost.
        simulated: The simulated fleet; None if only the balance of flows was computed.
        dashboard: Costs of a dashboard; None if they are unknown.
    """

    setup: FleetSetup
    balance: Flow
    torch_s: float
    enough: int
    break_even: float
    loss: LossOfRacks | None
    simulated: SimulatedFleet | None
    dashboard: DashboardCosts | None


def predict_fleet(
    costs: Costs, setup: FleetSetup, simulated: SimulatedFleet | None, dashboard: DashboardCosts | None
) -> FleetPrediction:
    """Predicts a fleet."""
    return FleetPrediction(
        setup,
        flow(costs, setup),
        torch_step_s(costs, setup),
        enough_workers(costs, setup),
        break_even_workers(costs, setup),
        loss_of_racks(costs, setup) if setup.racks_lost else None,
        simulated,
        dashboard,
    )


def as_text(prediction: FleetPrediction) -> str:
    """Formats a prediction for people."""
    setup, balance, simulated = prediction.setup, prediction.balance, prediction.simulated
    asked, calls = balance.demand, setup.segments * setup.micro_batches
    lines = [
        f"{setup.sessions:,} sessions on {setup.workers:,} workers in {setup.racks:,} racks",
        "",
        f"{'step, balance of flows':<36}{_seconds(balance.step_s)}",
    ]
    if simulated is not None:
        middle, high = _seconds(simulated.percentile_s(50)).strip(), _seconds(simulated.percentile_s(99)).strip()
        spread = f"   median {middle}, 1 % above {high}"
        lines.append(f"{'step, simulated':<36}{_seconds(simulated.step_s)}{spread}")
    lines += [
        f"{'step, torch checkpoint, no workers':<36}{_seconds(prediction.torch_s)}",
        f"{'segments computed by workers':<36}{asked.remote_calls * balance.kept:>10,.1f} of {calls:,}",
        f"{'bytes up and down in a step':<36}{asked.up_bytes / 1e6:>10.1f} and {asked.down_bytes / 1e6:.1f} MB",
        f"{'  of which parameters':<36}{asked.parameter_bytes / (asked.up_bytes + asked.down_bytes or 1):>10.1%}",
        f"{'memory of a worker':<36}{asked.held_bytes * setup.sessions / setup.workers / 1e9:>10.1f} GB at least",
        f"{'further workers help up to':<36}{prediction.enough:>10,} workers",
        f"{'faster than torch checkpoint from':<36}{_workers(prediction.break_even)}",
        "",
        f"{'resource':<22}{'needs':>12}{'in use':>10}{'simulated':>12}",
        "-" * 56,
    ]
    for name, needs_s in balance.needs_s.items():
        used = "" if simulated is None or name not in simulated.utilization else f"{simulated.utilization[name]:>12.1%}"
        mark = "  binds" if name == balance.binds else ""
        lines.append(f"{name:<22}{_seconds(needs_s):>12}{balance.utilization(name):>10.1%}{used}{mark}")
    if balance.binds not in balance.needs_s:
        name, needs_s = max(balance.needs_s.items(), key=lambda item: item[1])
        lines.append(
            f"No resource is always in use. The {balance.binds} binds: each session waits for one part of its step "
            f"after the other, longest for the {name} ({needs_s / balance.step_s:.0%} of the step)."
        )
    lines += _warnings(setup)
    if prediction.loss is not None:
        lines += ["", *_loss(setup, prediction.loss, simulated)]
    if prediction.dashboard is not None:
        lines += ["", *_of_dashboard(setup, prediction.dashboard)]
    return "\n".join(lines)


def _warnings(setup: FleetSetup) -> list[str]:
    """Returns what a worker would refuse."""
    sessions = math.ceil(setup.sessions_per_worker)
    held = setup.micro_batches if setup.is_deferred else 1
    segments = sessions * math.ceil(setup.segments / setup.workers_per_session) * held
    lines = []
    if sessions > MOST_SESSIONS:
        lines.append(f"A worker accepts {MOST_SESSIONS:,} sessions, not {sessions:,}: trainers compute for the others.")
    if segments > MOST_SEGMENTS:
        lines.append(f"A worker accepts {MOST_SEGMENTS:,} segments, not {segments:,}: trainers compute the others.")
    return lines


def _loss(setup: FleetSetup, loss: LossOfRacks, simulated: SimulatedFleet | None) -> list[str]:
    lines = [
        f"loss of {setup.racks_lost:,} racks with {loss.workers:,} workers and segments of {loss.sessions:,} sessions",
        f"{'  each of these, once, at most':<36}{_seconds(loss.recomputed_s)}",
        f"{'  frozen parameters sent again':<36}{loss.resent_bytes / 1e9:>10.1f} GB",
        f"{'  for which the links need':<36}{_seconds(loss.resending_s)}",
        f"{'  a step from then on':<36}{_seconds(loss.after_s)}   {loss.after_s / loss.before_s - 1:+.1%}",
    ]
    if simulated is not None:
        recomputed = f"{simulated.recomputed_calls:>10,.0f} by trainers, simulated"
        lines.append(f"{'  segments recomputed':<36}{recomputed}")
    return lines


def _of_dashboard(setup: FleetSetup, dashboard: DashboardCosts) -> list[str]:
    cores = dashboard.cores(setup.workers, setup.sessions)
    verdict = "it falls behind" if cores > 1 else "it keeps up"
    page = dashboard.page_bytes_per_s(setup.workers, setup.sessions)
    most = dashboard.most_workers(setup.sessions / setup.workers)
    return [
        f"{'dashboard (costs of ' + dashboard.date + ')':<36}{cores:>10.2f} cores, of which it can use 1: {verdict}",
        f"{'  one dashboard suffices for':<36}{most:>10,.0f} workers with as many sessions each",
        f"{'  to each open page':<36}{page / 1e6:>10.2f} MB/s",
    ]


def _seconds(value: float) -> str:
    """Returns a duration with three digits, in twelve characters."""
    if value < 1e-3:  # noqa: PLR2004
        return f"{value * 1e6:>9.0f} us"
    return f"{value * 1e3:>9.1f} ms" if value < 1 else f"{value:>9.2f} s "


def _workers(count: float) -> str:
    return f"{count:>10,.0f} workers" if math.isfinite(count) else f"{'no number':>10} of workers"


def as_json(prediction: FleetPrediction) -> dict[str, Any]:
    """Returns a prediction as JSON. Infinite numbers become None."""
    simulated = prediction.simulated
    content: dict[str, Any] = {
        "setup": asdict(prediction.setup),
        "step_s": prediction.balance.step_s,
        "binds": prediction.balance.binds,
        "needs_s": dict(prediction.balance.needs_s),
        "torch_s": prediction.torch_s,
        "enough_workers": prediction.enough,
        "break_even_workers": prediction.break_even if math.isfinite(prediction.break_even) else None,
        "loss": None if prediction.loss is None else asdict(prediction.loss),
        "simulated": None,
    }
    if simulated is not None:
        names = ("step_s", "lost_at_s", "recomputed_calls", "busy_calls", "resent_bytes", "events")
        content["simulated"] = {name: getattr(simulated, name) for name in names}
        content["simulated"] |= {f"p{percent}_s": simulated.percentile_s(percent) for percent in (50, 99)}
        content["simulated"]["utilization"] = dict(simulated.utilization)
    if prediction.dashboard is not None:
        setup = prediction.setup
        content["dashboard_cores"] = prediction.dashboard.cores(setup.workers, setup.sessions)
    return content

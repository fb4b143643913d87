"""The output of `backhaul top`: a headline, problems, workers and trainers. Tables fit into 80 columns."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from backhaul_server.dashboard.collect.percentages import in_percent
from backhaul_server.dashboard.collect.training_runs import TrainerRun
from backhaul_server.dashboard.collect.watch import Watch
from backhaul_server.dashboard.collect.watched import Watched
from backhaul_server.dashboard.metrics.alerts import MOST_MEMORY, Alerts
from backhaul_server.dashboard.views.overview import overview
from backhaul_server.dashboard.views.runs import run_summary
from backhaul_server.dashboard.views.workers import worker_status

RECENT_S = 60.0
"""Seconds for which silent trainers and past errors are shown."""

_COLOURS = {
    "serving": "green",
    "running": "green",
    "draining": "yellow",
    "silent": "yellow",
    "unreachable": "bold red",
    "critical": "bold red",
    "warning": "yellow",
}
_THOUSAND = 999.5  # larger numbers would be shown with four digits


def view(watch: Watch, now_s: float) -> RenderableType:
    """Returns the whole output for the current state."""
    parts: list[RenderableType] = [_headline(watch, now_s), *_trouble(watch, now_s), Text(""), _workers(watch)]
    runs = [run for run in watch.trainers if run.heard_at_s >= now_s - RECENT_S]
    if runs:
        parts += [Text(""), _trainers(sorted(runs, key=lambda run: run.heard_at_s, reverse=True), now_s)]
    return Group(*parts)


def _headline(watch: Watch, now_s: float) -> Text:
    headline = overview(watch, now_s, "")
    parts = [f"{headline.healthy_workers} of {headline.workers} workers serve"]
    if headline.steps_per_s is not None:
        parts.append(f"{headline.steps_per_s:.3g} steps/s")
    if headline.saved_bytes is not None:
        parts.append(f"{_size(headline.saved_bytes)} saved")
    if headline.added_ms_per_step is not None:
        parts.append(f"{headline.added_ms_per_step:+.3g} ms per step")
    if headline.remote_share is not None:
        parts.append(f"{in_percent(headline.remote_share)} recomputed on workers")
    if headline.fallbacks is not None:
        parts.append(f"{headline.fallbacks:,} fallbacks in 5 min")
    return Text(" · ".join(parts), "bold" if headline.healthy_workers == headline.workers else "bold red")


def _workers(watch: Watch) -> Table:
    table = _table("worker", "state", ">memory", ">sessions", ">segments", ">queue")
    for worker in watch.workers:
        table.add_row(Text(worker.address.text), Text(worker.state, _COLOURS[worker.state]), *_numbers(worker))
    return table


def _numbers(worker: Watched) -> list[Text]:
    """Returns the numbers of a worker; none if it does not answer, because they would be outdated."""
    if worker.telemetry is None or worker.state == "unreachable":
        return []
    shown = worker_status(worker)
    segments = sum(session.segments for session in worker.sessions())
    return [
        Text(
            f"{in_percent(shown.memory_share)} of {_size(shown.memory.budget_bytes)}",
            _COLOURS["warning"] if shown.memory_share > MOST_MEMORY else "",
        ),
        *[Text(f"{number:,}") for number in (shown.sessions, segments, shown.queued_requests)],
    ]


def _trainers(runs: list[TrainerRun], now_s: float) -> Table:
    table = _table("trainer", "state", ">step", ">ms", ">wait ms", ">fallbacks", ">saved", ">loss")
    for run in runs:
        shown, recent = run_summary(run, now_s), run.recent.since(now_s - RECENT_S)
        table.add_row(
            Text(shown.trainer),
            Text(shown.state, _COLOURS.get(shown.state, "")),
            Text(f"{shown.last_step:,}"),
            Text(_number(shown.median_step_ms)),
            Text(_number(recent.per_step_ms(recent.wait_s))),
            Text(f"{shown.fallbacks:,}", _COLOURS["warning"] if shown.fallbacks else ""),
            Text(_size(run.last_step.saved_bytes)),
            Text(_number(shown.last_loss)),
        )
    return table


def _trouble(watch: Watch, now_s: float) -> Iterator[Text]:
    """Yields why workers do not answer, their recent errors, and the remaining alerts."""
    silent = {worker.address.text for worker in watch.workers if worker.state == "unreachable"}
    for worker in watch.workers:
        if worker.address.text in silent:
            yield Text(f"{worker.address.text}: {worker.error.rpartition('last error: ')[2]}", _COLOURS["unreachable"])
        elif worker.telemetry is not None and now_s - worker.telemetry.last_error_at_s <= RECENT_S:
            yield Text(f"{worker.address.text}: {worker.telemetry.last_error}", _COLOURS["warning"])
    alerts = Alerts(watch).evaluate(now_s)
    for alert in alerts:
        if alert.subject not in silent:
            yield Text(f"{alert.name}: {alert.summary}", _COLOURS[alert.severity])


def _table(*columns: str) -> Table:
    """Returns a table with these columns. A name that begins with ">" marks a column of numbers."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in columns:
        is_number = name.startswith(">")
        table.add_column(name.lstrip(">"), justify="right" if is_number else "left", no_wrap=True)
    return table


def _number(value: float | None) -> str:
    """Formats a number with three digits, or with all digits before the point."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= _THOUSAND else f"{value:.3g}"


def _size(value: float) -> str:
    """Formats bytes in a unit that leaves at most three digits before the point."""
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if value < _THOUSAND:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"

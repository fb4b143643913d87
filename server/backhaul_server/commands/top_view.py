"""The output of `backhaul top`: a headline, problems, workers and trainers. Tables fit into 80 columns.

In a narrower terminal they have fewer columns.
"""

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from backhaul_runtime.process.units import size_text
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
    "lost": "bold red",
    "unreachable": "bold red",
    "critical": "bold red",
    "warning": "yellow",
}
_DISPENSABLE = ("loss", "queue", "wait ms", "segments", "ms", "saved", "sessions", "step", "memory")
"""The titles of columns that a narrow terminal does not show, the least important first."""
_WIDEST = 1_000
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
        parts.append(f"{size_text(headline.saved_bytes)} saved")
    if headline.added_ms_per_step is not None:
        parts.append(f"{headline.added_ms_per_step:+.3g} ms per step")
    if headline.remote_share is not None:
        parts.append(f"{in_percent(headline.remote_share)} recomputed on workers")
    if headline.fallbacks is not None:
        parts.append(f"{headline.fallbacks:,} fallbacks in 5 min")
    return Text(" · ".join(parts), "bold" if headline.healthy_workers == headline.workers else "bold red")


class _Fitted:
    """A table without those dispensable columns for which the terminal is too narrow.

    Args:
        titles: The titles of the columns. One that begins with ">" marks a column of numbers.
    """

    def __init__(self, *titles: str) -> None:
        self._titles = titles
        self._rows: list[tuple[Text, ...]] = []

    def add_row(self, *cells: Text) -> None:
        """Adds a row, which may have fewer cells than there are columns."""
        self._rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        hidden: set[str] = set()
        for title in (*_DISPENSABLE, ""):
            table = self._table(hidden)
            if Measurement.get(console, options.update(max_width=_WIDEST), table).maximum <= options.max_width:
                break
            hidden.add(title)
        yield table

    def _table(self, hidden: set[str]) -> Table:
        shown = [index for index, title in enumerate(self._titles) if title.lstrip(">") not in hidden]
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        for index in shown:
            title = self._titles[index]
            table.add_column(title.lstrip(">"), justify="right" if title.startswith(">") else "left", no_wrap=True)
        for row in self._rows:
            table.add_row(*[row[index] for index in shown if index < len(row)])
        return table


def _workers(watch: Watch) -> _Fitted:
    table = _Fitted("worker", "state", ">memory", ">sessions", ">segments", ">queue")
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
            f"{in_percent(shown.memory_share)} of {size_text(shown.memory.budget_bytes)}",
            _COLOURS["warning"] if shown.memory_share > MOST_MEMORY else "",
        ),
        *[Text(f"{number:,}") for number in (shown.sessions, segments, shown.queued_requests)],
    ]


def _trainers(runs: list[TrainerRun], now_s: float) -> _Fitted:
    table = _Fitted("trainer", "state", ">step", ">ms", ">wait ms", ">fallbacks", ">saved", ">loss")
    for run in runs:
        shown, recent = run_summary(run, now_s), run.recent.since(now_s - RECENT_S)
        table.add_row(
            Text(shown.trainer),
            Text(shown.state, _COLOURS.get(shown.state, "")),
            Text(f"{shown.last_step:,}"),
            Text(_number(shown.median_step_ms)),
            Text(_number(recent.per_step_ms(recent.wait_s))),
            Text(f"{shown.fallbacks:,}", _COLOURS["warning"] if shown.fallbacks else ""),
            Text(size_text(run.last_step.saved_bytes)),
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


def _number(value: float | None) -> str:
    """Formats a number with three digits, or with all digits before the point."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= _THOUSAND else f"{value:.3g}"

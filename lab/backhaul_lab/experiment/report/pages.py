"""Writes the report of an experiment: one self-contained HTML file, and Markdown with SVG files beside it. Pure."""

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from backhaul_lab.experiment.plan.axes import AXES
from backhaul_lab.experiment.report.charts import ReportChart, figures
from backhaul_lab.experiment.report.results import USED, CellResult, results
from backhaul_lab.harness.chart import draw

_STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; color: #111827; background: #fff; max-width: 880px; margin: 2rem auto;
  padding: 0 1rem; }
h1 { line-height: 1.2; } h2 { margin-top: 2.5rem; } figure { margin: 1rem 0 2rem; }
figure svg { width: 100%; height: auto; border: 1px solid #e5e7eb; border-radius: 6px; }
figcaption { margin-top: .5rem; }
.scroll { overflow-x: auto; margin: 0 calc((100% - min(100vw - 2rem, 1500px)) / 2); }
@media (max-width: 912px) { .scroll { margin: 0; } }
table { border-collapse: collapse; font-size: 13px; } th, td { padding: .3rem .5rem; text-align: right;
  border-bottom: 1px solid #e5e7eb; white-space: nowrap; }
  th { white-space: normal; vertical-align: bottom; } th:first-child, td:first-child { text-align: left; }
pre { background: #f3f4f6; padding: .8rem; overflow-x: auto; font-size: 13px; } .bad { color: #b91c1c; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; } dt { color: #4b5563; } dd { margin: 0; }
"""
_FOREIGN = 0.2
"""Part of the machine above which other programs make the numbers of an experiment hints."""
_HOW = (
    "Activation checkpointing saves memory: it discards what a segment of a model computes in forward, and computes it "
    "again in backward. torch.utils.checkpoint computes it again on the trainer itself; Backhaul lets another machine, "
    "a worker, do that. A step without checkpointing is the fastest and takes the most memory, so all times below are "
    "relative to it. Below the line of torch.utils.checkpoint, which is the break-even line, Backhaul is the faster of "
    "the two ways to save memory."
)


def write_report(experiment: Mapping[str, Any], visits: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Writes NAME.html, NAME.md and an SVG file for each chart. Returns the paths of the first two. Raises OSError.

    Args:
        experiment: The record of the experiment.
        visits: The records of its visits.
        folder: Directory for the files, which is created if it is missing.
    """
    settings = experiment["settings"]
    name = settings["name"]
    cells = results(experiment, visits)
    charts = figures(cells, settings["varied"], settings["events"], settings["charts"])
    folder.mkdir(parents=True, exist_ok=True)
    for figure in charts:
        (folder / f"{name}-{figure.key}.svg").write_text(draw([figure.chart]), encoding="utf-8")
    page, markdown = folder / f"{name}.html", folder / f"{name}.md"
    page.write_text(as_html(experiment, cells, charts, visits), encoding="utf-8")
    markdown.write_text(as_markdown(experiment, cells, charts, visits), encoding="utf-8")
    return [page, markdown]


def as_html(
    experiment: Mapping[str, Any],
    cells: Sequence[CellResult],
    charts: Sequence[ReportChart],
    visits: Sequence[Mapping[str, Any]],
) -> str:
    """Returns the report as one HTML document that loads nothing."""
    settings = experiment["settings"]
    head, *rows = _table(cells, settings["varied"])
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(settings['title'])}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
        f"<h1>{escape(settings['title'])}</h1>",
        f"<p><strong>{escape(summary(cells))}</strong></p>",
        *(f'<p class="bad"><strong>{escape(text)}</strong></p>' for text in _warnings(cells, visits)),
        *(f"<p>{escape(text)}</p>" for text in (settings["description"], _HOW) if text),
    ]
    for figure in charts:
        parts.append(f"<h2>{escape(figure.heading)}</h2>")
        parts.append(f"<figure>{draw([figure.chart])}<figcaption>{escape(figure.sentence)}</figcaption></figure>")
    parts.append("<h2>All cells</h2>")
    parts += [f"<p>{escape(text)}</p>" for text in _notes(cells, settings)]
    parts.append('<div class="scroll"><table><thead><tr>')
    parts += [f"<th>{escape(text)}</th>" for text in head]
    parts.append("</tr></thead><tbody>")
    parts += ["<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows]
    parts.append("</tbody></table></div>")
    for result in cells:
        if result.log:
            parts.append(f"<h3>End of the log of cell {result.cell.number}</h3><pre>{escape(result.log)}</pre>")
    parts.append("<h2>How it was measured</h2><dl>")
    parts += [f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in _method(experiment, visits)]
    return "\n".join([*parts, "</dl>\n</body>\n</html>"]) + "\n"


def as_markdown(
    experiment: Mapping[str, Any],
    cells: Sequence[CellResult],
    charts: Sequence[ReportChart],
    visits: Sequence[Mapping[str, Any]],
) -> str:
    """Returns the report as Markdown, with its charts as files beside it."""
    settings = experiment["settings"]
    head, *rows = _table(cells, settings["varied"])
    parts = [f"# {settings['title']}", *(f"**{text}**" for text in (summary(cells), *_warnings(cells, visits)))]
    parts += filter(None, (settings["description"], _HOW))
    for figure in charts:
        image = f"![{figure.chart.title}]({settings['name']}-{figure.key}.svg)"
        parts += [f"## {figure.heading}", image, figure.sentence]
    parts += ["## All cells", *_notes(cells, settings)]
    table = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    parts.append("\n".join(f"| {' | '.join(text.replace('|', '/') for text in row)} |" for row in table))
    for result in cells:
        if result.log:
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", result.log)), default=0))
            parts.append(f"End of the log of cell {result.cell.number}:\n\n{fence}\n{result.log}\n{fence}")
    parts.append("## How it was measured")
    parts.append("\n".join(f"- {key}: {value}" for key, value in _method(experiment, visits)))
    return "\n\n".join(parts) + "\n"


def summary(cells: Sequence[CellResult]) -> str:
    """Returns what the experiment has shown, in a sentence: the time of steps and the memory, over all cells."""
    ratios = [cell.over_torch.value for cell in cells if cell.over_torch is not None and not cell.is_core_bound]
    peaks = [cell.peak_bytes for cell in cells if cell.peak_bytes is not None]
    if not ratios:
        return "No cell has a measurement of which anything can be concluded."
    saved = [1 - peak["backhaul"] / peak["none"] for peak in peaks]
    faster = sum(ratio < 1 for ratio in ratios)
    text = (
        f"A step with Backhaul took {_range(ratios, '.2f')} times as long as one with torch.utils.checkpoint, and was "
        f"faster in {faster} of {len(ratios)} cells; its peak of activations and gradients was {_range(saved, '.0%')} "
        "below that without checkpointing."
    )
    return f"{text} Other programs disturbed it, so this is a hint." if any(cell.disturbed for cell in cells) else text


def _range(values: Sequence[float], format_: str) -> str:
    low, high = format(min(values), format_), format(max(values), format_)
    return low if low == high else f"{low} to {high}"


def _table(cells: Sequence[CellResult], varied: Sequence[str]) -> list[list[str]]:
    """Returns a table of all cells, its head first."""
    has_rates = any(result.workers_bytes_per_s or result.cell["bandwidth"] for result in cells)
    head = ["cell", *varied, "without", "torch", "Backhaul", "Backhaul / without", "Backhaul / torch"]
    head += [
        "peak",
        "peak of torch",
        "bytes of a step",
        "trainer busy",
        "workers busy",
        *(["carried"] if has_rates else []),
        "marks",
    ]
    rows = [head]
    for result in cells:
        row = [str(result.cell.number), *(AXES[name].show(result.cell[name]) for name in varied)]
        if result.step_s is None or result.over_none is None or result.over_torch is None or result.peak_bytes is None:
            rows.append([*row, *[""] * (len(head) - len(row) - 1), _marks(result)])
            continue
        row += [f"{result.step_s[variant] * 1e3:.0f} ms" for variant in ("none", "torch", "backhaul")]
        row.append(f"{result.over_none.value:.2f} ({result.over_none.low:.2f} to {result.over_none.high:.2f})")
        row.append(f"{result.over_torch.value:.2f}")
        row += [f"{result.peak_bytes[variant] / 1e6:.1f} MB" for variant in ("backhaul", "torch")]
        row += [f"{result.step_bytes / 1e6:.1f} MB", f"{result.trainer_busy:.0%}", f"{result.worker_busy:.0%}"]
        row += [f"{(result.workers_bytes_per_s or result.carried_bytes_per_s) / 1e6:.1f} MB/s"] if has_rates else []
        row.append(_marks(result))
        rows.append(row)
    return rows


def _marks(result: CellResult) -> str:
    marks = [] if result.state == "ok" else [result.state]
    marks += ["core-bound"] if result.is_core_bound else []
    marks += [f"{result.disturbed} of {result.visits} disturbed"] if result.disturbed else []
    marks += [f"{result.fallbacks} segments on the trainer"] if result.fallbacks else []
    return ", ".join(marks)


def _warnings(cells: Sequence[CellResult], visits: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns what a reader must know before any chart."""
    texts = []
    foreign = [share for visit in visits if (share := visit.get("foreign_share")) is not None]
    if foreign and median(foreign) > _FOREIGN:
        texts.append(
            f"Other programs used {min(foreign):.0%} to {max(foreign):.0%} of the machine while this experiment ran, "
            "so its numbers are hints rather than results."
        )
    for result in cells:
        if result.state == "unequal":
            texts.append(f"UNEQUAL GRADIENTS in cell {result.cell.number}: {result.why}.")
        if result.state == "failed":
            texts.append(f"Cell {result.cell.number} failed: {result.why}. The others were run.")
    missing = sum(result.state == "missing" for result in cells)
    if missing:
        texts.append(f"{missing} of {len(cells)} cells have not run yet.")
    return texts


def _notes(cells: Sequence[CellResult], settings: Mapping[str, Any]) -> list[str]:
    """Returns what the marks in the table and in the charts mean."""
    texts = [
        "Times are medians of timed steps on nodes that have only a share of a core, so compare ratios, not "
        "milliseconds. Ratios are medians over rounds; the quartiles are in brackets, and charts show them as bars. "
        "Gradients and weights of all three variants were compared bit by bit in every round. A node is busy for "
        "the part of its share of a core that it uses while steps with Backhaul run."
    ]
    if any(result.is_core_bound for result in cells):
        texts.append(
            "Core-bound: the nodes were not held to their shares of a core, so together they needed more than the "
            "machine has. Such cells are left out of every sentence about scaling."
        )
    if any(result.disturbed for result in cells):
        texts.append(
            f"Disturbed: other programs ran, and while trainers only computed they got less than {USED:.0%} of their "
            "share. Variants take turns, so ratios suffer less than times."
        )
    if settings["model"]["function"] != "demo":
        texts.append(f"The model is {settings['model']['function']}.")
    return texts


def _method(experiment: Mapping[str, Any], visits: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Returns hardware, versions, seeds and settings, each with its name."""
    settings, machine = experiment["settings"], experiment["machine"]
    hardware, model, nodes = machine["hardware"], settings["model"], settings["nodes"]
    kinds = {
        "process": "processes of one machine, with proxies as links",
        "namespace": "processes in network namespaces of one machine, connected by veth pairs",
        "ray": "trainers on one machine, workers on the hosts of a Ray cluster",
    }
    rows = [
        ("Date", machine["date"]),
        ("Machine", f"{hardware['cpu']}, {hardware['usable_cores']} cores, {hardware['memory_bytes'] / 2**30:.0f} GiB"),
        ("Versions", ", ".join(f"{name} {number}" for name, number in machine["versions"].items())),
        ("Nodes", kinds[nodes["kind"]]),
    ]
    hows = sorted({visit["throttled_by"] for visit in visits if "throttled_by" in visit})
    if hows:
        rows.append(("Throttled by", ", ".join(hows)))
    used = [visit["trainer_used"] / visit["shares"]["trainer"] for visit in visits if "trainer_used" in visit]
    foreign = [share for visit in visits if (share := visit.get("foreign_share")) is not None]
    if used:
        rows.append(("Share that trainers got", f"{min(used):.0%} to {max(used):.0%} of what they should get"))
    if foreign:
        rows.append(("Other programs", f"used {min(foreign):.0%} to {max(foreign):.0%} of the machine meanwhile"))
    size = f"{model['layers']} layers"
    if model["function"] == "demo":
        size += f" of width {model['width']}, rows of {model['context']} bytes"
    fixed = {
        name: AXES[name].show(value)
        for name, value in settings["cells"][0].items()
        if name not in settings["varied"] and value != AXES[name].default
    }
    rows += [
        ("Model", f"{'the demo' if model['function'] == 'demo' else model['function']}, {size}"),
        ("Fixed", ", ".join(f"{name} {value}" for name, value in fixed.items()) or "all other axes at their defaults"),
        (
            "Schedule",
            f"repeats of all cells, in turns: {settings['repeats']}; steps of warm-up: {settings['warm_up']}; "
            f"rounds in a repeat: {settings['rounds']}; steps of a variant in a round: {settings['steps']}, "
            "the first not timed",
        ),
        ("Seed", str(settings["seed"])),
    ]
    return rows

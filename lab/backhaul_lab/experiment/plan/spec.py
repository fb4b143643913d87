"""The file of an experiment, read and checked before anything starts. Pure."""

import hashlib
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from backhaul_lab.experiment.plan.cells import Matrix, SpecError, expand

Kind = Literal["process", "namespace", "ray"]
KINDS: tuple[str, ...] = ("process", "namespace", "ray")
DEMO = "demo"
VARIANTS = NONE, TORCH, BACKHAUL = "none", "torch", "backhaul"
"""Names of the variants that take turns: without checkpointing, `torch.utils.checkpoint`, and Backhaul."""
CHARTS = ("carried", "step_time", "peak")
"""Kinds of charts: bytes carried, step time beside the baselines, and peak memory of the trainer."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The model that every trainer of an experiment trains."""

    function: str = DEMO
    """`demo`, or "module:function" of the user's own installation, which returns an `ChainModel`."""

    layers: int = 8
    """Number of layers, which are divided into segments."""

    width: int = 128
    """Width of the demo's model, a multiple of 32."""

    context: int = 64
    """Number of bytes of text in a row, for the demo's model."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the user's own function, beside `layers`, `batch` and `seed`."""


@dataclass(frozen=True, slots=True)
class NodesSpec:
    """Where trainers and workers run."""

    kind: Kind = "process"
    """`process`, `namespace` (a network namespace for each node) or `ray` (workers on the hosts of a Ray cluster)."""

    throttle: bool = True
    """Whether nodes are held to their shares of a core."""

    start_timeout_s: float = 60.0
    """Seconds within which a node must be ready."""

    step_timeout_s: float = 120.0
    """Seconds within which trainers must finish what the runner lets them do at once."""

    worker_options: Sequence[str] = ()
    """Further options of `backhaul worker`."""

    session: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `backhaul.connect`. The fields of `Settings` are in a table of their own, "settings"."""

    ray_address: str = "auto"
    """The Ray cluster, for the kind `ray`."""

    token_file: str = ""
    """File with a token that workers on other hosts require; it must exist on all of them, for the kind `ray`."""

    one_worker_each: bool = False
    """Whether each trainer uses one worker, the next one for the next trainer, instead of all of them."""

    window_kib: int = 4096
    """Bytes that one connection may have on their way over a link with latency, in KiB."""


@dataclass(frozen=True, slots=True)
class EventSpec:
    """Something that happens while Backhaul's steps are measured."""

    kill_worker: int
    """Number of the worker whose serving process is killed, from 0."""

    at_step: int
    """The timed step, counted from 0 within a repeat, in whose middle it happens."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """A checked experiment.

    Attributes:
        name: Name of the experiment, which its results have.
        title: One line that says what the experiment shows.
        description: A paragraph for the report.
        repeats: How many times each cell is run, in turns with the others.
        warm_up: Steps of each variant before the timed ones, in each repeat.
        rounds: Rounds in a repeat, in each of which every variant takes its turn.
        steps: Steps of a turn. The first is not timed, so that uploads of one turn do not burden another.
        seed: Seed of weights, data and dropout.
        charts: Kinds of charts that the report has, of `CHARTS`.
        model: The model that every trainer trains.
        nodes: Where trainers and workers run.
        events: What happens while steps are measured.
        matrix: The cells that are run.
        digest: Digest of the file's content, by which an interrupted run is recognized.
    """

    name: str
    title: str
    description: str
    repeats: int
    warm_up: int
    rounds: int
    steps: int
    seed: int
    charts: tuple[str, ...]
    model: ModelSpec
    nodes: NodesSpec
    events: tuple[EventSpec, ...]
    matrix: Matrix
    digest: str

    def settings(self) -> dict[str, Any]:
        """Returns what a record says of the experiment, as JSON."""
        return {
            **{name: getattr(self, name) for name in ("name", "title", "description", "repeats", "warm_up", "rounds")},
            **{name: getattr(self, name) for name in ("steps", "seed", "digest")},
            "model": asdict(self.model),
            "nodes": asdict(self.nodes),
            "events": [asdict(event) for event in self.events],
            "charts": list(self.charts),
            "varied": list(self.matrix.varied),
            "cells": [dict(cell.values) for cell in self.matrix.cells],
        }


_TABLES = ("model", "nodes", "matrix", "events")
_COUNTS = {"repeats": 3, "warm_up": 3, "rounds": 3, "steps": 3, "seed": 0}
_MOST_TURNS = 10_000
_LARGEST_SEED = 2**62
_LONGEST_S = 86_400.0
_SETTINGS_OF_RUNS = frozenset({"worker", "token_file", "run", "tags", "notes"})
_SETTINGS_OF_CELLS = frozenset({"returns", "boundaries"})
_MODEL = [field.name for field in fields(ModelSpec)]
_NODES = [field.name for field in fields(NodesSpec)]


def read(path: Path) -> Experiment:
    """Reads the file of an experiment.

    Raises:
        SpecError: The file cannot be read, or holds something that cannot be run.
    """
    try:
        content = path.read_bytes()
        table = tomllib.loads(content.decode())
    except OSError as error:
        raise SpecError(f"it cannot be read: {error.strerror}") from None
    except RecursionError:
        raise SpecError("it is not TOML: it is nested too deeply") from None
    except ValueError as error:  # TOML's own errors, text that is not UTF-8, and numbers that Python does not read
        raise SpecError(f"it is not TOML: {error}") from None
    return parse(table, path.stem)


def parse(table: Mapping[str, Any], name: str) -> Experiment:
    """Checks the tables of a file. Raises SpecError.

    Args:
        table: The content of the file.
        name: Name of the experiment if the file has none.
    """
    _check_keys("", table, ("name", "title", "description", "charts", *_COUNTS, *_TABLES))
    for key in _TABLES:
        if not isinstance(table.get(key, {}), list if key == "events" else dict) and key in table:
            raise SpecError(f"{key}: write it as [{key}]" if key != "events" else "events: write each as [[events]]")
    counts = {
        key: _number(key, table.get(key, default), int, 1, _MOST_TURNS)
        for key, default in _COUNTS.items()
        if key != "seed"
    }
    counts["seed"] = _number("seed", table.get("seed", _COUNTS["seed"]), int, 0, _LARGEST_SEED)
    if counts["steps"] < 2:  # noqa: PLR2004
        raise SpecError("steps: a turn needs at least 2 steps, of which the first is not timed")
    model, nodes = _model(table.get("model", {})), _nodes(table.get("nodes", {}))
    matrix = expand(table.get("matrix", {}), model.layers)
    _check_kind(matrix, nodes)
    if nodes.kind == "ray" and table.get("events"):
        raise SpecError('events: workers on a Ray cluster cannot be killed; use nodes.kind = "process" or "namespace"')
    name = _name(_text("name", table, name))
    timed = counts["rounds"] * (counts["steps"] - 1)
    return Experiment(
        name=name,
        title=" ".join(_text("title", table, name).split()) or name,
        charts=_charts(table.get("charts", list(CHARTS))),
        description=" ".join(_text("description", table, "").split()),
        model=model,
        nodes=nodes,
        events=tuple(_event(event, matrix, timed) for event in table.get("events", [])),
        matrix=matrix,
        digest=hashlib.sha256(json.dumps(table, sort_keys=True, default=str).encode()).hexdigest()[:16],
        **counts,
    )


def _charts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(kind in CHARTS for kind in value):
        raise SpecError(f"charts: {value!r} is not a list of some of {', '.join(CHARTS)}")
    return tuple(value)


def _model(table: Mapping[str, Any]) -> ModelSpec:
    _check_keys("model.", table, _MODEL)
    function = table.get("function", DEMO)
    parts = str(function).split(":")
    if function != DEMO and (len(parts) != 2 or not all(part.replace(".", "_").isidentifier() for part in parts)):  # noqa: PLR2004
        raise SpecError(f'model.function: "{function}" is neither "{DEMO}" nor "module:function"')
    width = _number("model.width", table.get("width", ModelSpec().width), int, 1, 65_536)
    if width % 32:
        raise SpecError(f"model.width: {width} is not a multiple of 32")
    arguments = table.get("arguments", {})
    if not isinstance(arguments, dict) or (arguments and function == DEMO):
        raise SpecError('model.arguments: write a table, for a model.function of your own; "demo" takes none')
    return ModelSpec(
        str(function),
        _number("model.layers", table.get("layers", ModelSpec().layers), int, 1, 10_000),
        width,
        _number("model.context", table.get("context", ModelSpec().context), int, 1, 1_000_000),
        arguments,
    )


def _nodes(table: Mapping[str, Any]) -> NodesSpec:
    _check_keys("nodes.", table, _NODES)
    usual = NodesSpec()
    if table.get("kind", usual.kind) not in KINDS:
        raise SpecError(f"nodes.kind: {table['kind']!r} is not one of {', '.join(KINDS)}")
    options, session = table.get("worker_options", []), table.get("session", {})
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        raise SpecError('nodes.worker_options: write a list of texts, as in ["--memory", "1GiB"]')
    for option in options:
        if option.partition("=")[0] in {"--listen", "--token-file"}:
            raise SpecError(f"nodes.worker_options: leave out {option}, which every worker gets from the experiment")
    settings = session.get("settings", {}) if isinstance(session, dict) else None
    if not isinstance(settings, dict) or _SETTINGS_OF_RUNS & {*session, *settings}:
        raise SpecError(
            "nodes.session: write a table of arguments of connect(), without worker, token_file or run. Its table "
            '"settings" has fields of Settings, without tags and notes'
        )
    for key in (*session, *settings):
        if key in _SETTINGS_OF_CELLS:
            raise SpecError(f"nodes.session: {key} is an axis, so set it in [matrix], by which cells are named")
    switches = {key: table.get(key, getattr(usual, key)) for key in ("throttle", "one_worker_each")}
    for key, value in switches.items():
        if not isinstance(value, bool):
            raise SpecError(f"nodes.{key}: {value!r} is neither true nor false")
    return NodesSpec(
        kind=table.get("kind", usual.kind),
        start_timeout_s=_number("nodes.start_timeout_s", table.get("start_timeout_s", 60.0), float, 0.001, _LONGEST_S),
        step_timeout_s=_number("nodes.step_timeout_s", table.get("step_timeout_s", 120.0), float, 0.001, _LONGEST_S),
        worker_options=tuple(options),
        session=session,
        ray_address=_text("ray_address", table, usual.ray_address, "nodes."),
        token_file=_text("token_file", table, usual.token_file, "nodes."),
        window_kib=_number("nodes.window_kib", table.get("window_kib", usual.window_kib), int, 1, 1 << 22),
        **switches,
    )


def _check_kind(matrix: Matrix, nodes: NodesSpec) -> None:
    """Raises SpecError for cells whose nodes cannot have what the cell asks for."""
    if nodes.kind != "ray":
        return
    cells = [cell for cell in matrix.cells if cell["bandwidth"] or cell["latency"] or cell["worker_speed"] != 1]
    if cells:
        raise SpecError(
            f"matrix: {len(cells)} of {len(matrix.cells)} cells set bandwidth, latency or worker_speed, which hosts of "
            'a Ray cluster have of their own. Leave these axes out, or use nodes.kind = "namespace"'
        )


def _event(table: Any, matrix: Matrix, timed: int) -> EventSpec:
    if not isinstance(table, dict):
        raise SpecError("events: write each as a table [[events]]")
    _check_keys("events.", table, ("kill_worker", "at_step"))
    worker = _number("events.kill_worker", table.get("kill_worker", 0), int, 0)
    fewest = min(cell["workers"] for cell in matrix.cells)
    if worker >= fewest:
        raise SpecError(f"events.kill_worker: there is no worker {worker} in a cell with {fewest}; they count from 0")
    at_step = table.get("at_step", 0)
    if isinstance(at_step, int) and at_step >= timed:
        raise SpecError(
            f"events.at_step: a repeat has {timed} timed step{'s' if timed != 1 else ''}, which count from 0: "
            f"{at_step} would never come"
        )
    return EventSpec(worker, _number("events.at_step", at_step, int, 0))


def _check_keys(prefix: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in table:
        if key not in known:
            near = get_close_matches(key, known, 1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else f": there are {', '.join(known)}"
            raise SpecError(f'"{prefix}{key}" is not a key of an experiment{hint}')


def _number(key: str, value: Any, kind: Callable[[Any], Any], least: float, most: float = math.inf) -> Any:
    is_number = isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
    if not is_number or not value >= least:  # a NaN is not
        what = "number" if kind is float else "whole number"
        raise SpecError(f"{key}: {value!r} is not a {what} of at least {least:g}")
    if value > most:
        raise SpecError(f"{key}: at most {most:,.0f} is possible")
    return kind(value)


def _text(key: str, table: Mapping[str, Any], default: str, prefix: str = "") -> str:
    value = table.get(key, default)
    if not isinstance(value, str):
        raise SpecError(f"{prefix}{key}: {value!r} is not a text")
    return value


def _name(name: str) -> str:
    if not name or not all(part.isalnum() for part in name.replace("_", "-").split("-")) or len(name) > 60:  # noqa: PLR2004
        raise SpecError(f'name: "{name}" is longer than 60 or has other characters than letters, digits, single dashes')
    return name

"""Runs the parts, each in a process of its own and within its time, and prints what they found."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

PARTS = {
    "imports": 60,
    "settings": 40,
    "undefined": 60,
    "digest": 60,
    "staging": 40,
    "durations": 40,
    "gradients": 90,
    "attention": 90,
    "recurrent": 75,
    "blocks": 60,
    "waits": 60,
    "devices": 60,
    "compiled": 150,
    "layer": 120,
    "rates": 60,
    "depth": 60,
    "demo": 60,
    "tests": 120,
}
"""The most seconds of each part, in the order in which they run. A budget above `BUDGET_S` lengthens them all."""

BUDGET_S = 470.0

REPEATABLE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""What cuBLAS needs to give the same bits in each run."""

LEAST_S = 8
"""A part that would get less is not started."""

TOY = ["--layers", "2", "--width", "64", "--context", "64", "--batch", "2", "--steps", "2"]
"""Options of the demo where there is no GPU."""

PYTEST = ["-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib", "-o", "filterwarnings=default"]
"""The project's own options need plugins, and an unknown option of a missing one is an error there."""


def command_of(part: str, device: str, repository: Path) -> list[str]:
    """The command of a part."""
    if part == "demo":
        return [sys.executable, "-m", "backhaul", "demo", *(["--device", "cuda"] if device == "cuda" else TOY)]
    if part == "tests":
        tests = ["tests/accelerators"] if device == "cuda" else ["tests/unit/test_undefined_saves.py"]
        return [sys.executable, "-m", "pytest", *PYTEST, "--rootdir", str(repository), *tests]
    return [sys.executable, "-m", "gpu_check.part", part]


def run_part(part: str, limit_s: float, arguments: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Runs a part. Ends it and the processes that it has started when its time is over."""
    began, hung = time.monotonic(), False
    with (out / f"{part}.txt").open("w") as log:
        process = subprocess.Popen(
            command_of(part, arguments.device, arguments.repo),
            cwd=arguments.repo,
            env={**os.environ, "GPU_CHECK_DEVICE": arguments.device, **REPEATABLE},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            hung = True
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also workers that a part has left behind
        code = process.wait()
    row = {
        "part": part,
        "what": "ran to its end",
        "ok": code == 0 and not hung,
        "took_s": round(time.monotonic() - began, 1),
    }
    if not row["ok"]:
        tail = (out / f"{part}.txt").read_text(errors="replace")[-1500:]
        row |= {"code": code, "tail": f"ended after {limit_s:.0f} s: {tail}" if hung else tail}
    return row


def rows_of(results: Path) -> list[dict[str, Any]]:
    """All findings so far."""
    return [json.loads(line) for line in results.read_text().splitlines()]


def line_of(row: dict[str, Any]) -> str:
    """A finding on one line."""
    mark = {True: "ok  ", False: "FAIL", None: "    "}[row["ok"]]
    rest = ", ".join(f"{name}={value}" for name, value in row.items() if name not in {"part", "what", "ok", "tail"})
    return f"{mark} {row['part']}: {row['what']}{': ' if rest else ''}{rest}"


def summary_of(rows: list[dict[str, Any]]) -> str:
    """What failed, then all figures, then the numbers of both."""
    failed = [row for row in rows if row["ok"] is False]
    figures = [row for row in rows if row["ok"] is None]
    good = len(rows) - len(failed) - len(figures)
    tails = [f"     {row['part']}:\n{row['tail']}" for row in failed if row.get("tail")]
    counts = f"{good} ok, {len(failed)} failed, {len(figures)} figures"
    return "\n".join([*map(line_of, figures), *tails, *map(line_of, failed), counts])


def main() -> int:
    """Returns the status of the command: 1 if a finding failed."""
    parser = argparse.ArgumentParser(prog="gpu-check.sh", description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--budget", type=float, default=BUDGET_S)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--repo", type=Path, required=True)
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    if unknown := set(wanted) - PARTS.keys():
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    out = Path(os.environ["OUT"])
    results = out / "results.jsonl"
    results.write_text("")
    began = time.monotonic()
    for part in (part for part in PARTS if part in wanted):
        most_s = PARTS[part] * max(1.0, arguments.budget / BUDGET_S)
        limit_s = min(most_s, arguments.budget - (time.monotonic() - began))
        row = {"part": part, "what": "ran to its end", "ok": False, "tail": "no time was left"}
        seen = len(rows_of(results))
        if limit_s >= LEAST_S:
            row = run_part(part, limit_s, arguments, out)
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(*map(line_of, rows_of(results)[seen:]), sep="\n", flush=True)
    summary = summary_of(rows_of(results))
    (out / "summary.txt").write_text(summary + "\n")
    print("\n== summary", summary, sep="\n")
    return int(any(row["ok"] is False for row in rows_of(results)))


sys.exit(main())

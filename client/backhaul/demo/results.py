"""The results of the demo as a table and as JSON."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from backhaul.demo.variants import DemoSettings, Variant
from backhaul_runtime.process.units import size_text


def as_json(settings: DemoSettings, variants: Sequence[Variant]) -> dict[str, Any]:
    """Returns all measurements as JSON. Values of keys that contain "equal" are booleans."""
    return {
        "settings": asdict(settings),
        "all_equal": all(variant.losses_equal and variant.gradients_equal for variant in variants),
        "variants": [_variant(variant) for variant in variants],
    }


def _variant(variant: Variant) -> dict[str, Any]:
    report = variant.session.report() if variant.session is not None else None
    return {
        "name": variant.name,
        "losses": variant.losses,
        "losses_equal": variant.losses_equal,
        "gradients_equal": variant.gradients_equal,
        # The first step is left out: it opens connections and sends programs and weights.
        "median_step_s": statistics.median(variant.step_s[1:] or variant.step_s),
        "peak_bytes": variant.peak_bytes,
        "up_bytes": report.up_bytes if report else 0,
        "down_bytes": report.down_bytes if report else 0,
        "segments_remote": report.remote if report else 0,
        "fallbacks": report.fallbacks if report else 0,
    }


def as_table(results: dict[str, Any]) -> str:
    """Formats the comparison as a text table."""
    head = (
        f"{'':<22}{'last loss':>10}{'equal':>7}{'step':>10}{'peak':>11}{'up':>11}{'down':>11}"
        f"{'remote':>8}{'fallbacks':>11}"
    )
    lines = [head, "-" * len(head)]
    for row in results["variants"]:
        equal = "yes" if row["losses_equal"] and row["gradients_equal"] else "NO"
        lines.append(
            f"{row['name']:<22}{row['losses'][-1]:>10.4f}{equal:>7}{row['median_step_s'] * 1e3:>7.0f} ms"
            f"{size_text(row['peak_bytes']):>11}{size_text(row['up_bytes']):>11}{size_text(row['down_bytes']):>11}"
            f"{row['segments_remote']:>8}{row['fallbacks']:>11}"
        )
    return "\n".join(lines)


def verdict(results: dict[str, Any]) -> str:
    """Returns what the comparison has shown, in a sentence."""
    rows = {row["name"]: row for row in results["variants"]}
    torchs, ours, deferred = (rows[name] for name in ("torch checkpoint", "backhaul gradients", "backhaul deferred"))
    if not results["all_equal"]:
        return "NOT EQUAL: losses or gradients differ, see the table"
    fallbacks = sum(row["fallbacks"] for row in results["variants"])
    note = f" ({fallbacks} segments were meant for a worker and ran on the trainer)" if fallbacks else ""
    memory = ours["peak_bytes"] / torchs["peak_bytes"] - 1
    time, deferred_time = (row["median_step_s"] / torchs["median_step_s"] - 1 for row in (ours, deferred))
    changed = f"Backhaul takes {_percent(memory)} {'less' if memory < 0 else 'more'} memory"
    return (
        f"Beside torch's checkpoint, {changed}, for steps that are {_length(time)}, or {_length(deferred_time)} if "
        "micro-batches are deferred; every loss and every gradient of every step is bitwise equal in all "
        f"five{note}."
    )


def _length(relative: float) -> str:
    if relative >= 1:
        return f"{1 + relative:.1f} times as long"
    return f"{_percent(relative)} {'shorter' if relative < 0 else 'longer'}"


def _percent(relative: float) -> str:
    return f"{100 * abs(relative):.0f} %"

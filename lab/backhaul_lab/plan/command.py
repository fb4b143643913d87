"""`backhaul plan`."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backhaul._cli.environment_options import obstacle_to
from backhaul.doctor.profile.model_options import add_model_options, config_of, divide_cores, say_part, target_of
from backhaul_lab.harness.processes import interrupt_on_sigterm
from backhaul_runtime.errors import BackhaulError, SettingError
from backhaul_runtime.process.units import parse_amount, parse_count, parse_size, size_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backhaul._config import Config
    from backhaul.doctor.profile.target import Target
    from backhaul_lab.plan.search import PredictedPlan

HELP = "choose the settings with which a model trains fastest within a budget of memory"
EXAMPLES = (
    "backhaul plan --budget 24GiB --model mytraining:example --worker gpu-box:50051",
    "backhaul plan --budget 8GiB --model mytraining:example --micro-batches 8 --output plan.toml",
)
OPTIMIZER_BYTES = 8
"""What AdamW keeps for each trained parameter, in float32."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `backhaul plan` to its parser."""
    parser.add_argument(
        "--budget", type=parse_size, metavar="SIZE", required=True, help="memory of the trainer's device, as in 24GiB"
    )
    add_model_options(parser, is_required=True)
    parser.add_argument(
        "--micro-batches",
        type=parse_count,
        default=1,
        metavar="COUNT",
        help="micro-batches of an optimizer step, each as large as the example batch (default: %(default)s)",
    )
    parser.add_argument(
        "--optimizer-bytes",
        type=parse_amount,
        default=OPTIMIZER_BYTES,
        metavar="BYTES",
        help="what the optimizer keeps for each trained parameter (default: %(default)s, for AdamW)",
    )
    parser.add_argument(
        "--rounds", type=parse_count, default=5, help="measured steps of each kind (default: %(default)s)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("plan.toml"),
        metavar="FILE",
        help="the file that connect(plan=...) takes (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all predictions to a file")


def run(arguments: argparse.Namespace) -> int:
    """Measures the model, predicts plans, prints them and writes the best one.

    Returns:
        The exit code: 0, 1 if nothing fits, 2 if an option cannot be used or no segment can travel, 130 after Ctrl-C.
    """
    for option in ("output", "json"):
        path = getattr(arguments, option)
        if obstacle := obstacle_to(path):
            print(f"backhaul plan: --{option} {path}: {obstacle}", file=sys.stderr)
            return 2
    interrupt_on_sigterm()
    try:
        config = config_of(arguments)
        target = target_of(arguments)
        divide_cores(config)
        return _plan(arguments, config, target)
    except BackhaulError as error:
        print(f"backhaul plan: {error.message}", file=sys.stderr)
        return 2


def _plan(arguments: argparse.Namespace, config: "Config", target: "Target") -> int:
    from backhaul.doctor.advice import machine_check
    from backhaul.doctor.profile.measurement import measure_model
    from backhaul_lab.plan import text
    from backhaul_lab.plan.search import search
    from backhaul_lab.plan.workers import planned_workers
    from backhaul_lab.simulate.layer_costs import layer_costs

    kinds = " and ".join(kind.__name__ for kind in target.kinds)
    print(f"measuring {len(target.layers)} layers of the class {kinds}", flush=True)
    measured = measure_model(target, config, arguments.rounds, on_part=say_part)
    plain, workers = measured.plain, planned_workers(measured)
    fixed_bytes = plain.model_bytes + arguments.optimizer_bytes * plain.trained_parameters
    room_bytes = arguments.budget - fixed_bytes
    if not workers:
        reasons = {reason for worker in measured.workers for times in worker.segment_times for reason in times.reasons}
        why = "; ".join(sorted(reasons)) or "no worker returned gradients"
        raise SettingError(f"no segment of {target.name} can run on a worker: {why}. `backhaul doctor` says more")
    costs = layer_costs(measured)
    best, plans = search(costs, workers, arguments.micro_batches, room_bytes)
    print(text.model_text(target.name, plain, fixed_bytes))
    print("\n".join(map(text.worker_text, workers)) + "\n")
    print(text.table(plans, best, fixed_bytes, room_bytes) + "\n")
    if best is not None:
        print(text.memory_text(plans, best, fixed_bytes), flush=True)
    if (machine := machine_check(measured.disturbed)).state == "note":
        print(machine)
    code = _write(arguments, best, plans, target, fixed_bytes)
    written: dict[str, Any] = {"budget_bytes": arguments.budget, "micro_batches": arguments.micro_batches}
    written |= {"plans": [text.as_row(plan, fixed_bytes, room_bytes) for plan in plans]}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(written, indent=2) + "\n")
    return code


def _write(
    arguments: argparse.Namespace,
    best: "PredictedPlan | None",
    plans: "Sequence[PredictedPlan]",
    target: "Target",
    fixed_bytes: float,
) -> int:
    """Writes the best plan, or says why there is none. Returns the exit code."""
    from backhaul_lab.plan import text

    if best is None:
        lowest = text.leanest(plans)
        need = fixed_bytes + max(lowest.peak.trainer_bytes, lowest.peak.lost_bytes)
        print(
            f"Nothing fits into {size_text(arguments.budget)}. What needs least, {lowest.candidate}, needs "
            f"{size_text(need)}. Use smaller micro-batches, or a budget of at least that."
        )
        return 1
    if not best.candidate.is_remote:
        print(f"Best is {best.candidate}. It fits, and no worker makes training faster. No plan was written.")
        return 0
    made_for = {
        "model": arguments.model,
        "layers": len(target.layers),
        "budget_bytes": arguments.budget,
        "micro_batches": arguments.micro_batches,
    }
    text.write(arguments.output, best, made_for, fixed_bytes)
    print(f"Wrote {arguments.output}: {best.candidate}. {text.advice(best, arguments.output, target)}")
    return 0

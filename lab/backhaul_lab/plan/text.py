"""A plan as text for people, as JSON, and as a file. Imports no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backhaul._plan_file import write_plan
from backhaul.doctor.profile.costs import PlainProfile
from backhaul_lab.plan.search import PredictedPlan
from backhaul_lab.plan.workers import PlannedWorker
from backhaul_runtime.process.units import size_text

if TYPE_CHECKING:
    from backhaul.doctor.profile.target import Target

_SHOWN = 8


def model_text(name: str, plain: PlainProfile, fixed_bytes: float) -> str:
    """Describes the measured model in two sentences.

    Args:
        name: What was given as --model, "module:function".
        plain: What it costs without a worker.
        fixed_bytes: Size of its parameters and of the optimizer's state, in bytes.
    """
    return (
        f"{name} has {plain.layers} layers. The forward of a layer takes {plain.forward_s * 1e3:.1f} ms and its "
        f"backward {plain.backward_s * 1e3:.1f} ms, autograd saves {size_text(plain.saved_bytes)} of it, and its input "
        f"has {size_text(plain.boundary_bytes)}. Parameters and the optimizer's state take {size_text(fixed_bytes)}."
    )


def worker_text(worker: PlannedWorker) -> str:
    """Describes a worker in a sentence."""
    name = worker.address or "The worker on this machine"
    link = f", over a link of {worker.bytes_per_s * 8 / 1e9:.2g} Gbit/s" if worker.bytes_per_s else ""
    return f"{name} computes {worker.speed:.2f} times as fast as this trainer{link}."


def table(plans: Sequence[PredictedPlan], chosen: PredictedPlan | None, fixed_bytes: float, room_bytes: float) -> str:
    """Formats the best plans, those without a worker and the chosen one as a table, the fastest first."""
    fitting = [plan for plan in plans if plan.fits(room_bytes)]
    shown = {id(plan) for plan in fitting[:_SHOWN]} | {id(chosen), id(leanest(plans))}
    for kind in ("plain", "torch", "blocking", "deferred"):
        of_kind = [plan for plan in plans if plan.candidate.kind == kind]
        shown |= {id(plan) for plan in of_kind[:1]}
    head = f"{'':<2}{'plan':<66}{'step':>11}{'peak':>12}{'worker lost':>13}{'on worker':>12}"
    lines = [head, "-" * len(head)]
    for plan in plans:
        if id(plan) not in shown:
            continue
        lost, there = plan.peak.lost_bytes, plan.peak.worker_bytes
        mark = "*" if plan is chosen else ""
        lines.append(
            f"{mark:<2}{plan.candidate!s:<66}{plan.step_s * 1e3:>8.0f} ms"
            f"{size_text(fixed_bytes + plan.peak.trainer_bytes):>12}"
            f"{size_text(fixed_bytes + lost) if lost else '':>13}{size_text(there) if there else '':>12}"
            f"{'' if plan.fits(room_bytes) else '  does not fit'}"
        )
    return "\n".join(lines)


def leanest(plans: Sequence[PredictedPlan]) -> PredictedPlan:
    """Returns the plan that takes the least memory of the trainer, also if a worker is lost."""
    return min(plans, key=lambda plan: max(plan.peak.trainer_bytes, plan.peak.lost_bytes))


def memory_text(plans: Sequence[PredictedPlan], chosen: PredictedPlan, fixed_bytes: float) -> str:
    """Compares the memory of the chosen plan with that without checkpointing, and with that of the leanest plan."""

    def peak_bytes(plan: PredictedPlan) -> float:
        return fixed_bytes + plan.peak.trainer_bytes

    alone = next(plan for plan in plans if plan.candidate.kind == "plain")
    more_bytes, lean = peak_bytes(chosen) - peak_bytes(alone), leanest(plans)
    beside = f"{size_text(abs(more_bytes))} {'more' if more_bytes > 0 else 'less'} than without checkpointing"
    text = f"The chosen plan takes {size_text(peak_bytes(chosen))}"
    if chosen is not alone:
        text += f", {beside} ({size_text(peak_bytes(alone))})"
    if chosen is lean:
        return f"{text}. No plan takes less."
    return (
        f"{text}. The leanest plan, {lean.candidate}, takes {size_text(peak_bytes(lean))} and {lean.step_s * 1e3:,.0f} "
        f"ms for a step instead of {chosen.step_s * 1e3:,.0f} ms."
    )


def as_row(plan: PredictedPlan, fixed_bytes: float, room_bytes: float) -> dict[str, Any]:
    """Returns a plan as JSON."""
    return {
        "name": str(plan.candidate),
        "kind": plan.candidate.kind,
        "settings": plan.candidate.settings,
        "step_s": plan.step_s,
        "peak_bytes": int(fixed_bytes + plan.peak.trainer_bytes),
        "lost_peak_bytes": int(fixed_bytes + plan.peak.lost_bytes) if plan.peak.lost_bytes else None,
        "worker_bytes": plan.peak.worker_bytes or None,
        "fits": plan.fits(room_bytes),
    }


def write(path: Path, plan: PredictedPlan, made_for: Mapping[str, Any], fixed_bytes: float) -> None:
    """Writes the file that `connect(plan=...)` reads.

    Args:
        path: The file to write.
        plan: A plan with a worker.
        made_for: What the plan was made for, such as the model and the budget.
        fixed_bytes: Size of the model's parameters and of the optimizer's state, in bytes.

    Raises:
        OSError: The file cannot be written.
    """
    prediction = {
        "step_s": plan.step_s,
        "peak_bytes": int(fixed_bytes + plan.peak.trainer_bytes),
        "lost_peak_bytes": int(fixed_bytes + plan.peak.lost_bytes),
        "worker_bytes": plan.peak.worker_bytes,
    }
    training = {**made_for, "accumulates": plan.candidate.kind == "deferred"}
    write_plan(path, plan.candidate.settings, {"training": training, "prediction": prediction})


def advice(plan: PredictedPlan, path: Path, target: "Target") -> str:
    """Says what to write in the training program for a plan with a worker for a model."""
    names = ", ".join(kind.__name__ for kind in target.kinds)
    layers = names if len(target.kinds) == 1 else f"({names})"
    lines = [
        "Use it with",
        "",
        f'    session = backhaul.connect(plan="{path}")',
        f"    session.wrap(model, {layers})",
    ]
    if plan.candidate.kind == "deferred":
        lines.append("    with session.accumulate() as step:  # around the micro-batches, with step.backward(loss)")
    return "\n".join(lines)

"""What `session.report()` returns: what ran where, why, and at what cost."""

import math
from dataclasses import dataclass, field
from enum import Enum

from backhaul_runtime.process.units import size_text

TRAINERS_SHARE = "its share of an accumulation block"
"""The reason for segments that the trainer computes by choice, although a worker could."""

UNREACHABLE = "no worker can be reached"
"""How the reason begins for segments that found no worker. It says nothing about the segments themselves."""


class Decision(Enum):
    """How a segment was recomputed."""

    GRADIENTS = "gradients"
    """A worker ran its backward and returned gradients."""

    ACTIVATIONS = "activations"
    """A worker recomputed it and returned what autograd had saved."""

    TRAINER = "trainer"
    """The trainer recomputed it."""

    KEPT = "kept"
    """Its activations stayed on the trainer, as without checkpointing, because no program can express all of it."""


_COLUMNS = (
    ("calls", 7),
    ("gradients", 11),
    ("activations", 13),
    ("trainer", 9),
    ("kept", 6),
    ("wait", 10),
    ("up", 11),
    ("down", 11),
)


@dataclass(frozen=True, slots=True)
class SegmentReport:
    """All calls with the same name.

    Attributes:
        name: The name of the checkpointed function or module.
        calls: The number of forward calls.
        decisions: Number of recomputations by decision, and of calls whose activations were kept.
        wait_s: Seconds for which backward waited for these segments. On an accelerator, seconds for which they held up
            the device: while it still does work that was queued before, nothing waits.
        fallbacks: Number of segments that were meant for a worker but ran on the trainer.
        reasons: Why the trainer recomputed segments, with counts.
        kept: Why activations were kept, with counts.
        inside: Why workers returned activations although gradients were allowed, with counts.
        up_bytes: Bytes sent for these calls.
        down_bytes: Bytes received for these calls.
        drift: The largest relative difference between the numbers of a worker and of forward; 0 if all bits are equal.
        blocked: Why micro-batches of accumulation blocks waited for their backward, with counts.
        spared_bytes: Bytes that were not sent because only the differences of parameters were.
        known: Number of calls whose program was known from an earlier call, so that they were not recorded.
        recorded: Why calls that were compiled, or should have been, were recorded all the same, with counts.
        programs: Number of different programs that workers got.
        compilations: How often torch.compile has captured a graph, or made kernels for one.
        compile_s: Seconds that it took for these.
        recompiled: The guards that no longer held when it captured another graph, with counts.
        rechecked: Number of gradients from workers that the trainer has computed as well, and found equal.
        not_rechecked: Why gradients that were drawn for that could not be computed a second time, with counts.
        whole: Number of micro-batches that workers got whole, see `AccumulationBlock.run`.
        losses_read: Number of their losses that were read before the block ended, which waits for a worker.
        not_whole: Why the trainer computed micro-batches itself that workers should have got whole, with counts.
    """

    name: str
    calls: int
    decisions: dict[Decision, int]
    wait_s: float
    fallbacks: int
    reasons: dict[str, int]
    kept: dict[str, int]
    inside: dict[str, int]
    up_bytes: int
    down_bytes: int
    drift: float
    blocked: dict[str, int] = field(default_factory=dict)
    spared_bytes: int = 0
    known: int = 0
    recorded: dict[str, int] = field(default_factory=dict)
    programs: int = 0
    compilations: int = 0
    compile_s: float = 0.0
    recompiled: dict[str, int] = field(default_factory=dict)
    rechecked: int = 0
    not_rechecked: dict[str, int] = field(default_factory=dict)
    whole: int = 0
    losses_read: int = 0
    not_whole: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Helper:
    """What one machine has computed in an accumulation block.

    Attributes:
        segments: The number of segments that it has computed.
        segment_s: Mean seconds for a segment: of its recomputation and backward on the trainer, and from the request to
            the answer on a worker.
    """

    segments: int
    segment_s: float


@dataclass(frozen=True, slots=True)
class BlockReport:
    """The last accumulation block.

    Attributes:
        micro_batches: The number of its micro-batches.
        took_s: Seconds from its beginning to its end.
        others_s: Seconds of all that the trainer did besides its share of the segments, without waiting.
        trainer: The segments that the trainer has computed, and their mean time.
        workers: The same for each worker, by its address.
        pending_gradient_bytes: The most bytes of gradients that were pending on the trainer.
        chain: The most segments that a micro-batch had, wherever they were computed.
        segment_bytes: The most bytes of gradients that one micro-batch has for the parameters of a segment that workers
            were given.
        deferred_bytes: The most bytes that unfinished micro-batches held on the trainer: kept inputs, gradients that
            workers start from, and kept activations.
    """

    micro_batches: int
    took_s: float
    others_s: float
    trainer: Helper
    workers: dict[str, Helper]
    pending_gradient_bytes: int
    chain: int = 0
    segment_bytes: int = 0
    deferred_bytes: int = 0

    @property
    def segments(self) -> int:
        """The number of segments of all micro-batches."""
        return self.trainer.segments + sum(worker.segments for worker in self.workers.values())

    @property
    def speed_up(self) -> float:
        """The time that the trainer alone would have taken, over the time that the block took.

        Alone, it would have computed every segment in the time of those of its share. NaN if its share was empty.
        """
        alone_s = self.others_s + self.segments * self.trainer.segment_s
        return alone_s / self.took_s if self.trainer.segments and self.took_s else math.nan

    def __str__(self) -> str:
        shares = [("trainer", self.trainer), *self.workers.items()]
        lines = [
            f"last accumulation block: {self.micro_batches} micro-batches in {self.took_s:.2f} s, "
            + (f"speed-up {self.speed_up:.2f}, " if self.trainer.segments else "")
            + f"at most {size_text(self.pending_gradient_bytes)} of gradients pending and "
            f"{size_text(self.deferred_bytes)} in unfinished micro-batches"
        ]
        lines += [
            f"  {name}: {helper.segments} of {self.segments} segments, {helper.segment_s * 1e3:.1f} ms each"
            for name, helper in shares
        ]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class StepsReport:
    """The steps that have ended.

    Attributes:
        count: The number of steps, see `Session.step`.
        wait_s: Seconds for which backward waited for workers, over all steps.
        overhead_s: Seconds of recording, digests and sending in the trainer's own threads.
        spared_s: Seconds that the trainer would have taken to recompute what workers have recomputed, and for the
            backward where they returned gradients.
        saved_bytes: The most bytes that autograd saved in segments at one time and that the trainer did not keep.
    """

    count: int = 0
    wait_s: float = 0.0
    overhead_s: float = 0.0
    spared_s: float = 0.0
    saved_bytes: int = 0

    @property
    def added_s(self) -> float:
        """Seconds that workers have added to the steps."""
        return self.wait_s + self.overhead_s

    def __str__(self) -> str:
        added, spared, waited = (1e3 * s / self.count for s in (self.added_s, self.spared_s, self.wait_s))
        longer = added - spared
        return (
            f"in the mean of {self.count} steps: {added:.1f} ms added ({waited:.1f} ms of them waiting), where the "
            f"trainer alone would have taken {spared:.1f} ms\n"
            f"{size_text(self.saved_bytes)} less memory than without checkpointing; steps {abs(longer):.1f} ms "
            f"{'longer' if longer > 0 else 'shorter'} than with torch's checkpoint"
        )


@dataclass(frozen=True, slots=True)
class Report:
    """The counts of a session so far. `print` it, or read its fields.

    Attributes:
        segments: The counts by name, in the order of the first calls.
        block: The last accumulation block; None if there was none.
        copied_bytes: Bytes of the copies of parameters that the trainer keeps now, to send only their differences.
        steps: What is measured of the steps; None with `telemetry=False`.
    """

    segments: tuple[SegmentReport, ...]
    block: BlockReport | None = None
    copied_bytes: int = 0
    steps: StepsReport | None = None

    def metrics(self) -> dict[str, float]:
        """Returns figures for a tracker of experiments, such as `wandb.log(session.report().metrics())`.

        The names stay the same from version to version. A figure that is not known yet is missing:

        - `backhaul/remote_share`: the share of the recomputations that workers did, from 0 to 1.
        - `backhaul/fallbacks`: the number of segments that were meant for a worker but ran on the trainer.
        - `backhaul/rechecks`: the number of gradients that the trainer has computed as well, and found equal.
        - `backhaul/up_bytes`, `backhaul/down_bytes`: bytes sent to workers, and received from them.
        - `backhaul/added_s_per_step`: seconds that workers added to a step in the mean: waiting and overhead.
        - `backhaul/spared_s_per_step`: seconds that the trainer would have taken in their place.
        - `backhaul/saved_bytes`: the most bytes that autograd saved in segments and that the trainer did not keep.
        """
        figures: dict[str, float] = {
            "fallbacks": self.fallbacks,
            "rechecks": sum(segment.rechecked for segment in self.segments),
            "up_bytes": self.up_bytes,
            "down_bytes": self.down_bytes,
        }
        recomputed = self.remote + sum(s.decisions.get(Decision.TRAINER, 0) for s in self.segments)
        if recomputed:
            figures["remote_share"] = self.remote / recomputed
        if self.steps is not None and self.steps.count:
            figures["added_s_per_step"] = self.steps.added_s / self.steps.count
            figures["spared_s_per_step"] = self.steps.spared_s / self.steps.count
            figures["saved_bytes"] = self.steps.saved_bytes
        return {f"backhaul/{name}": value for name, value in figures.items()}

    @property
    def remote(self) -> int:
        """Number of recomputations on workers."""
        return sum(s.decisions.get(d, 0) for s in self.segments for d in (Decision.GRADIENTS, Decision.ACTIVATIONS))

    @property
    def travels(self) -> float:
        """The share of the calls, from 0 to 1, whose segment travels; NaN if there were no calls.

        The trainer's share of an accumulation block counts as travelling: a worker could have recomputed it.
        """
        calls = sum(segment.calls for segment in self.segments)
        stayed = sum(
            count
            for segment in self.segments
            for reason, count in (*segment.reasons.items(), *segment.kept.items())
            if reason != TRAINERS_SHARE
        )
        return 1 - stayed / calls if calls else math.nan

    @property
    def fallbacks(self) -> int:
        """Number of segments that were meant for a worker but ran on the trainer."""
        return sum(segment.fallbacks for segment in self.segments)

    @property
    def up_bytes(self) -> int:
        """Bytes sent to workers."""
        return sum(segment.up_bytes for segment in self.segments)

    @property
    def down_bytes(self) -> int:
        """Bytes received from workers."""
        return sum(segment.down_bytes for segment in self.segments)

    @property
    def spared_bytes(self) -> int:
        """Bytes that were not sent to workers because only the differences of parameters were."""
        return sum(segment.spared_bytes for segment in self.segments)

    @property
    def drift(self) -> float:
        """The largest drift of all segments."""
        return max((segment.drift for segment in self.segments), default=0.0)

    def __str__(self) -> str:
        columns = "".join(f"{title:>{width}}" for title, width in _COLUMNS)
        lines = [f"{'segment':<32}{columns}"]
        for segment in self.segments:
            counts = "".join(
                f"{segment.decisions.get(decision, 0):>{width}}"
                for decision, (_, width) in zip(Decision, _COLUMNS[1:], strict=False)
            )
            lines.append(
                f"{segment.name[:31]:<32}{segment.calls:>7}{counts}{segment.wait_s * 1e3:>7.0f} ms"
                f"{size_text(segment.up_bytes):>11}{size_text(segment.down_bytes):>11}"
            )
            lines += _notes(segment)
            for where, reasons in (
                *_explained(segment).items(),
                ("recorded", segment.recorded),
                ("compiled again", segment.recompiled),
                ("not rechecked", segment.not_rechecked),
                ("not given away whole", segment.not_whole),
            ):
                lines += [f"  {count} {where}: {reason}" for reason, count in reasons.items()]
        sections = dict.fromkeys(
            where.replace(" ", "-")
            for segment in self.segments
            for where, reasons in _explained(segment).items()
            if reasons.keys() - {TRAINERS_SHARE}
        )
        if sections:
            lines.append(f"what to do: {', '.join(f'docs/on-the-trainer.md#{section}' for section in sections)}")
        if self.spared_bytes:
            lines.append(
                f"differences of parameters have spared {size_text(self.spared_bytes)} of uploads; copies take "
                f"{size_text(self.copied_bytes)} here"
            )
        if self.block is not None:
            lines.append(str(self.block))
        if self.steps is not None and self.steps.count:
            lines.append(str(self.steps))
        if self.drift:
            lines.append(f"values of workers are within {self.drift:.0e} of those of forward, where they were compared")
        elif self.remote:
            lines.append("values of workers have the bits of those of forward, wherever they were compared")
        return "\n".join(lines)


def _notes(segment: SegmentReport) -> list[str]:
    """Returns what is to be said of a segment beside its row, apart from reasons."""
    lines = []
    if segment.drift:
        lines.append(f"  drift {segment.drift:.1e}: a worker computes other bits, compared within tolerances")
    if segment.known:
        lines.append(f"  {segment.known} not recorded: their programs were known")
    if segment.whole:
        lines.append(f"  {segment.whole} whole micro-batches: workers have run forward and backward")
    if segment.losses_read:
        lines.append(f"  {segment.losses_read} of their losses were read inside the block: that waits")
    if segment.rechecked:
        lines.append(f"  {segment.rechecked} rechecked: the trainer has computed the same gradients")
    if segment.compilations:
        times = "once" if segment.compilations == 1 else f"{segment.compilations} times"
        lines.append(
            f"  torch.compile has compiled it {times} in {segment.compile_s:.1f} s; workers "
            f"got {segment.programs} different {'program' if segment.programs == 1 else 'programs'}"
        )
    return lines


def _explained(segment: SegmentReport) -> dict[str, dict[str, int]]:
    """Returns the reasons of which each kind has a section in docs/on-the-trainer.md."""
    return {
        "on the trainer": segment.reasons,
        "kept on the trainer": segment.kept,
        "as activations": segment.inside,
        "not deferred": segment.blocked,
    }

"""All figures of `backhaul bench`: their names, definitions and limits. Imports no torch."""

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """On which side of its limit a figure must lie."""

    AT_MOST = "<="
    AT_LEAST = ">="
    REPORTED = ""


class Verdict(Enum):
    """Result of comparing a figure with its limit."""

    REACHED = "reached"
    MISSED = "missed"
    INCONCLUSIVE = "inconclusive"
    """Other processes disturbed too many rounds."""
    REPORTED = "reported"
    """The figure was measured and has no limit."""
    NOT_BUILT = "not built"
    """Used in old results only: Backhaul did not have the measured feature yet."""
    UNAVAILABLE = "unavailable"
    """Something that the measurement needs is not available."""
    FAILED = "failed"
    """Gradients were not bitwise equal, or the measurement failed. The figure has no value."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured ratio.

    Attributes:
        name: Name of the figure. It never changes, because results are compared by it.
        what: Description for people, as "numerator / denominator".
        group: Name of the measurement that yields the figure. Figures of a group share its rounds.
        kind: Which side of the limit is good.
        limit: Limit that the value must keep. None: the figure is only reported.
    """

    name: str
    what: str
    group: str
    kind: Kind = Kind.REPORTED
    limit: float | None = None

    def __post_init__(self) -> None:
        assert (self.limit is None) == (self.kind is Kind.REPORTED), self.name

    def judge(self, value: float) -> Verdict:
        """Returns the verdict on a conclusive value."""
        if self.limit is None:
            return Verdict.REPORTED
        good = value <= self.limit if self.kind is Kind.AT_MOST else value >= self.limit
        return Verdict.REACHED if good else Verdict.MISSED

    @property
    def limit_text(self) -> str:
        """The limit as text, such as "<= 0.80". Empty if there is no limit."""
        return "" if self.limit is None else f"{self.kind.value} {self.limit:.2f}"


def _at_most(group: str, name: str, limit: float, what: str) -> Figure:
    return Figure(name, what, group, Kind.AT_MOST, limit)


def _at_least(group: str, name: str, limit: float, what: str) -> Figure:
    return Figure(name, what, group, Kind.AT_LEAST, limit)


FIGURES = (
    _at_most("steps", "step_vs_torch_gradients", 0.80, "step with gradients / with torch's checkpoint, 8 blocks"),
    _at_most("steps", "step_vs_torch_activations", 0.83, "step with activations / with torch's checkpoint, 8 blocks"),
    _at_most("steps", "step_vs_none_gradients", 1.05, "step with gradients / without checkpointing, 8 blocks"),
    _at_most("steps", "step_vs_none_graphs", 1.04, 'the same, with graphs="eager" / without checkpointing'),
    _at_most("steps", "step_half_budget", 1.22, "step, a worker with room for 4 of 8 segments / without checkpointing"),
    _at_most("steps", "exposed_recompute", 0.10, "recomputation that ran after its grad_output was there / all of it"),
    _at_most("small_frozen", "small_frozen_vs_torch", 1.0, "step of 64 tokens, LoRA, over TCP / torch's checkpoint"),
    _at_most(
        "small", "small_trainable_vs_torch", 1.0, "step of 64 tokens, all trainable, same host / torch's checkpoint"
    ),
    _at_most("graphs", "graph_added", 0.12, "added to forward by a block that is known / by a recorded one, width 64"),
    _at_most("graphs", "graph_added_outputs", 0.07, 'the same with determinism_check="outputs"'),
    _at_most("small_frozen", "small_frozen_graphs", 0.90, 'small_frozen_vs_torch with graphs="eager"'),
    _at_most("small", "small_trainable_graphs", 0.90, 'small_trainable_vs_torch with graphs="eager"'),
    _at_most("deferred", "defer_equal_graphs", 0.60, 'defer_equal with graphs="eager"'),
    _at_most("deferred_third", "defer_third_graphs", 0.88, 'defer_third with graphs="eager"'),
    _at_most("deferred_lora", "defer_lora_graphs", 0.60, 'defer_lora with graphs="eager"'),
    _at_most("deferred", "defer_equal", 0.64, "step of 8 deferred micro-batches, equal worker / torch's checkpoint"),
    _at_most("deferred", "defer_vs_none", 0.84, "step of 8 deferred micro-batches / without checkpointing"),
    _at_most("deferred", "defer_keep_vs_none", 0.76, "the same, the share keeps activations / without checkpointing"),
    _at_most("deferred_third", "defer_third", 0.92, "step of 16 micro-batches, a worker with 0.3 of a core / torch's"),
    _at_most("deferred_lost", "defer_lost_helper", 1.00, "mean step, worker killed in every second one / torch's"),
    _at_most("deferred_wire", "defer_wire", 1.05, "bytes of a micro-batch, boundaries derived / three boundaries"),
    _at_most("deferred_lora", "defer_lora", 0.64, "step of 8 deferred micro-batches, LoRA / torch's checkpoint"),
    _at_most("whole", "whole_equal", 0.55, "step of 8 whole micro-batches, equal worker / torch's checkpoint"),
    _at_most("whole_third", "whole_third", 0.85, "step of 16, a worker with 0.3 of a core / torch's checkpoint"),
    _at_most("whole_lora", "whole_lora", 0.55, "step of 8 whole micro-batches, LoRA / torch's checkpoint"),
    _at_most("whole_lost", "whole_lost_helper", 0.80, "mean step, worker killed in every second one / torch's"),
    _at_most("whole_wire", "whole_wire", 1.05, "bytes of a whole micro-batch, without sums / its token ids"),
    _at_most("peak_flat", "peak_flat", 1.05, "trainer's peak activation bytes, 64 segments / 8"),
    _at_most("peaks", "peak_vs_torch", 0.40, "trainer's peak activation bytes / torch's checkpoint, 16 blocks by 2"),
    _at_most("peaks", "peak_vs_offload", 0.45, "trainer's peak activation bytes / one segment's working set"),
    _at_most("wire", "wire_over_bound", 1.02, "bytes that travelled / the least that must"),
    _at_least("transfers", "save_vs_grpc", 0.8, "bytes/s of 64 MiB tensors up / bare gRPC stream"),
    _at_least("transfers", "fetch_vs_grpc", 0.8, "bytes/s of 64 MiB tensors down / bare gRPC stream"),
    Figure("save_vs_tcp", "bytes/s of 64 MiB tensors up / TCP socket into a pooled buffer", "transfers"),
    Figure("fetch_vs_tcp", "bytes/s of 64 MiB tensors down / TCP socket into a pooled buffer", "transfers"),
    _at_least("shared_memory", "shm_vs_memcpy", 0.7, "bytes/s on one host, 16 MiB and more, used in place / memcpy"),
    _at_most("roundtrip", "small_roundtrip", 2.0, "backward's wait per segment of 1 KiB / bare gRPC stream round trip"),
    _at_most("growth", "growth", 1.1, "time of each segment from the 9th to the 64th / of the first 8"),
    _at_least("tenants", "tenants", 0.9, "requests/s of a worker with 8 clients / with 1"),
    _at_least("tenants", "tenants_fair", 0.8, "requests/s of the slowest of 8 clients / of the fastest"),
    _at_most(
        "credentials", "credentials_p99", 2.0, "p99 of a client beside 8 of another credential / of the client alone"
    ),
    _at_most(
        "hivemind", "vs_hivemind", 0.70, "from grad_output to input gradient / hivemind's RemoteExpert, one block"
    ),
    _at_most("torch_rpc", "vs_torch_rpc", 0.5, "time added over local compute / added by torch.distributed.rpc"),
    _at_most(
        "compression_thin",
        "compression_thin",
        0.75,
        "step in bf16 over 12.5 MB/s with compressed differences / without",
    ),
    Figure("cores_together", "a forward while the worker's core computes the same / alone", "cores"),
    Figure("checks_large", "recording and digests, added to a step of 1024 tokens / the step", "checks_large"),
    Figure("checks_small", "recording and digests, added to a step of 64 tokens / the step", "checks_small"),
    Figure("telemetry_added", "telemetry and a watching dashboard, added to a step / the step", "telemetry"),
    _at_most("recheck", "recheck_added", 0.02, "a share of 0.01 rechecked, added to a step / the step"),
)


def chosen(names: list[str]) -> list[Figure]:
    """Returns the figures with these names, or all figures if there are no names, in the order of FIGURES.

    Raises:
        ValueError: There is no figure with one of the names.
    """
    unknown = sorted(set(names) - {figure.name for figure in FIGURES})
    if unknown:
        known = ", ".join(figure.name for figure in FIGURES)
        raise ValueError(f"there is no figure {', '.join(unknown)}; there are {known}")
    return [figure for figure in FIGURES if not names or figure.name in names]

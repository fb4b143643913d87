"""Measures the bytes that a step transfers, relative to the minimum."""

from backhaul_lab.bench.outcomes import Outcome, of_counts
from backhaul_lab.bench.steps import BLOCKS, on_trainer
from backhaul_lab.harness.core_times import settle
from backhaul_lab.harness.link_proxy import LinkProxy
from backhaul_lab.harness.stage import Stage
from backhaul_lab.harness.training import LARGE, BlockTraining, checkpoint_of_torch, compare

STEPS = 2


def measure(stage: Stage) -> list[Outcome]:
    """Measures the figure wire_over_bound."""
    with LinkProxy(stage.tcp_worker()) as proxy:
        session = stage.session(proxy.address, returns="gradients")
        training = BlockTraining("backhaul", BLOCKS, LARGE, session.checkpoint)
        reference = BlockTraining("torch", BLOCKS, LARGE, checkpoint_of_torch)
        step_bytes = []
        for _ in range(1 + STEPS):
            before = proxy.passed_bytes
            training.step()
            settle(stage.cores, quiet_s=0.1)  # Includes the bytes that are sent after the step.
            step_bytes.append(proxy.passed_bytes - before)
            reference.step()
            compare([training, reference])
        session.close()
    bound = _bound_bytes(training)
    note = on_trainer(session.report().fallbacks)
    # The first step is left out: it also sends programs, and its weights do not come from an update.
    ratios = [passed / bound for passed in step_bytes[1:]]
    return [of_counts("wire_over_bound", ratios, note, {"bound_bytes": bound, "step_bytes": step_bytes[-1]})]


def _bound_bytes(training: BlockTraining) -> int:
    """Returns the minimum: all inputs, one gradient up, one down per segment, all parameters and their gradients."""
    boundary = training.x.nbytes
    return BLOCKS * boundary + boundary + BLOCKS * boundary + 2 * training.parameter_bytes

"""Measures a step over a thin link, with parameters sent as compressed differences and with whole ones."""

import torch

from backhaul._config import Compressed, Settings
from backhaul_lab.bench.outcomes import Outcome, of_rounds
from backhaul_lab.bench.steps import on_trainer
from backhaul_lab.harness.link_proxy import LinkProxy
from backhaul_lab.harness.rounds import Plan, ratio_of
from backhaul_lab.harness.stage import OVER_TCP, Stage
from backhaul_lab.harness.training import SMALL, BlockTraining, take_turns

BYTES_PER_S = 12.5e6
"""A link of 100 Mbit/s in each direction."""

BLOCKS, WIDTH = 4, 256
# The first step measures the link, the second notes which tensors change, and the third copies them.
PLAN = Plan(most=16, warm=4, limit_s=30.0)


def measure(stage: Stage) -> list[Outcome]:
    """Measures the figure compression_thin."""
    links = [LinkProxy(stage.tcp_worker(), bytes_per_s=BYTES_PER_S) for _ in range(2)]
    modes: tuple[Compressed, ...] = ("auto", "off")
    with links[0], links[1]:
        # "auto" has to find out by itself that the link is thin.
        sessions = {
            mode: stage.session(link.address, returns="gradients", settings=Settings(compression=mode, **OVER_TCP))
            for mode, link in zip(modes, links, strict=True)
        }
        trainings = [
            BlockTraining(mode, BLOCKS, SMALL, session.checkpoint, WIDTH, dtype=torch.bfloat16)
            for mode, session in sessions.items()
        ]
        rounds = take_turns(trainings, stage.cores, PLAN, leads_in=False)
        reports = {mode: session.report() for mode, session in sessions.items()}
        for session in sessions.values():
            session.close()
    note = on_trainer(sum(report.fallbacks for report in reports.values()))
    up = {mode: report.up_bytes / 1e6 for mode, report in reports.items()}
    bytes_note = f"{up['auto']:.1f} MB went up instead of {up['off']:.1f}, in all rounds"
    return [of_rounds("compression_thin", rounds, ratio_of("auto", "off"), "; ".join(filter(None, (note, bytes_note))))]

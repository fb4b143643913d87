"""A rank of a training that a test starts with torchrun: `rank.py WORKERS FOLDER CASE...`.

Runs each case without Backhaul and with it, and writes what it found to a file in the folder, named by its rank.
WORKERS are addresses for `connect`, for the first rank, the second one and so on, separated by spaces; one serves all
ranks. The name of a case may be followed by a colon and what workers return.
"""

import json
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

import backhaul
from distributed.cases import ALL, ERRORS
from distributed.training import Ranks
from support.bits import differing
from support.torchrun import Outcome

QUIET = backhaul.Settings(silence_s=240.0)


def outcome_of(name: str, workers: str) -> Outcome:
    name, _, returns = name.partition(": ")
    torch.manual_seed(0)
    expected = [] if name in ERRORS else ALL[name](Ranks())
    with backhaul.connect(workers, settings=QUIET) as session:
        torch.manual_seed(0)
        try:
            ours, error = ALL[name](Ranks(session, {"returns": returns} if returns else {})), ""
        except backhaul.BackhaulError as raised:
            ours, error = expected, f"{type(raised).__name__}: {raised}"
        segments = session.report().segments
    return Outcome(
        differing(ours, expected),
        {segment.name: {str(d.value): n for d, n in segment.decisions.items()} for segment in segments},
        [reason for segment in segments for reason in (*segment.reasons, *segment.kept, *segment.blocked)],
        error,
    )


def main(workers: str, folder: str, *names: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=QUIET.silence_s))
    addresses = workers.split()
    mine = addresses[dist.get_rank() % len(addresses)]
    outcomes = {name: asdict(outcome_of(name, mine)) for name in names}
    (Path(folder) / str(dist.get_rank())).write_text(json.dumps(outcomes))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

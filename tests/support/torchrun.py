"""Trainings of several processes, started by torchrun."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_RANK = Path(__file__).parents[1] / "distributed/rank.py"


@dataclass(frozen=True)
class Outcome:
    """What a rank found in a case.

    Attributes:
        differing: Positions of results that differ from those without Backhaul.
        decisions: How often each decision was taken, by the name of the segment.
        reasons: Why segments ran on the trainer, why activations were kept, and why a block waited.
        error: The error with which the case ended, empty if there was none.
    """

    differing: list[int] = field(default_factory=list)
    decisions: dict[str, dict[str, int]] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    error: str = ""

    def count(self, decision: str) -> int:
        """How often a decision was taken, in all segments."""
        return sum(of_segment.get(decision, 0) for of_segment in self.decisions.values())


def outcomes(
    ranks: int,
    workers: Sequence[str],
    folder: Path,
    names: Sequence[str],
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> dict[str, list[Outcome]]:
    """Runs cases in several processes of this machine. Returns what each rank found, by case.

    Args:
        ranks: The number of processes.
        workers: The addresses for `connect`, one for all ranks or one for each.
        folder: An empty folder.
        names: The names of the cases.
        timeout_s: Seconds after which the processes are ended.
        environment: Further variables for the ranks.
    """
    run_ranks(ranks, [str(_RANK), " ".join(workers), str(folder), *names], timeout_s, environment)
    by_rank = [json.loads((folder / str(rank)).read_text()) for rank in range(ranks)]
    return {name: [Outcome(**of_rank[name]) for of_rank in by_rank] for name in names}


def run_ranks(
    ranks: int, command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> None:
    """Runs a script in several processes of this machine, which must all succeed.

    Args:
        ranks: The number of processes.
        command: The script and its arguments.
        timeout_s: Seconds after which the processes are ended.
        environment: Further variables for the ranks.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [*torchrun, *command],
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(environment or {})},
            start_new_session=True,
        )
        try:
            process.wait(timeout_s)
        finally:
            with suppress(ProcessLookupError):  # also a rank that torchrun left behind
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        assert process.returncode == 0, said.read()

"""Holds processes to a share of their core by stopping and continuing them. Imports no torch.

A process of its own does this, so that the measuring process is not interrupted. Usage:
`python -m backhaul_lab.harness.throttle SHARE CORE PID...`; it ends when its stdin is closed.
"""

import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from backhaul_lab.harness.processes import MODULE, ChildProcess

PERIOD_S = 0.02
"""Short beside a segment's backward, and long beside a context switch."""


@contextmanager
def to(share: float, pids: Sequence[int], core: int) -> Iterator[None]:
    """Holds processes to a share of a core.

    Args:
        share: The share, between 0 and 1.
        pids: The processes, which run nowhere else.
        core: The core of the process that stops and continues them; another one than theirs.
    """
    command = [*MODULE, "backhaul_lab.harness.throttle", str(share), str(core), *map(str, pids)]
    process = ChildProcess("throttle", command)
    try:
        yield
    finally:
        process.end()


def main(share: float, core: int, pids: Sequence[int]) -> None:
    """Stops and continues processes in turns until stdin is closed."""
    os.sched_setaffinity(0, {core})
    parts = ((signal.SIGCONT, PERIOD_S * share), (signal.SIGSTOP, PERIOD_S * (1 - share)))
    try:
        while True:
            for number, wait_s in parts:
                _send(number, pids)
                if select.select([sys.stdin], [], [], wait_s)[0]:
                    return
    finally:
        _send(signal.SIGCONT, pids)


def _send(number: signal.Signals, pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), list(map(int, sys.argv[3:])))

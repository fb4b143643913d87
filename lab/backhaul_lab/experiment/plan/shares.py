"""The share of a core that each node of a cell gets, so that all of them together fit the machine. Pure.

NOTE [Shares]
1. A node is a machine with one core. Its speed is the share of a real core that it gets: the trainer's share is the
   unit, and a worker of speed s gets s times as much.
2. No share exceeds one core. A worker of speed 3 therefore needs trainers at a third.
3. The sum of all shares fits the machine's cores, less what the proxies and the collector of the history need.
   Otherwise nodes would wait for each other's cores, and further workers would seem to bring less than they do.
4. A cell whose shares would be too small for the kernel's accounting, or that cannot be throttled, is core-bound. It is
   run all the same, and kept out of what the report says about scaling.
"""

from dataclasses import dataclass

from backhaul_lab.experiment.plan.cells import Cell

RESERVED, FOR_PROXIES = 0.1, 0.15
"""Part of the machine that is left to the collector and the kernel, and a further part if proxies delay all bytes."""
SMALLEST = 0.02
"""The smallest share. The kernel accounts in periods of 20 ms, of which this is 0.4 ms."""


@dataclass(frozen=True, slots=True)
class NodeShares:
    """NodeShares of a core.

    Attributes:
        trainer: Share of each trainer, above 0 and up to 1.
        worker: Share of each worker, above 0 and up to 1.
        is_core_bound: Whether the nodes cannot be held to their shares.
        why: Why not; empty if they can.
    """

    trainer: float
    worker: float
    is_core_bound: bool = False
    why: str = ""

    @property
    def speed(self) -> float:
        """Speed of a worker relative to a trainer."""
        return self.worker / self.trainer


def shares_of(cell: Cell, cores: int, obstacle: str = "") -> NodeShares:
    """Returns the shares of a cell's nodes.

    Args:
        cell: The cell whose numbers of nodes and worker's speed count.
        cores: The number of cores that the machine's processes may use.
        obstacle: Why no process can be throttled here; empty if it can be.
    """
    speed, trainers, workers = float(cell["worker_speed"]), cell["trainers"], cell["workers"]
    free = cores * (1 - RESERVED - (FOR_PROXIES if cell["latency"] else 0.0))
    trainer = min(1.0, 1.0 / speed, free / (trainers + speed * workers))
    if obstacle:
        return NodeShares(1.0, 1.0, is_core_bound=True, why=obstacle)
    smallest = trainer * min(1.0, speed)
    if smallest < SMALLEST:
        why = f"{trainers + workers} nodes on {cores} cores would leave {smallest:.3f} of a core to one of them"
        return NodeShares(1.0, 1.0, is_core_bound=True, why=why)
    return NodeShares(trainer, trainer * speed)

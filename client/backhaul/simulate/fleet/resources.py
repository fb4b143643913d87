"""The shared resources of a simulated fleet. Imports no torch."""

import math
from collections import defaultdict
from collections.abc import Iterator

from backhaul.simulate.fleet.phases import WorkerShare, per_second
from backhaul.simulate.fleet.setup import FleetSetup
from backhaul.simulate.fleet.shared_resource import SharedResource


class FleetResources:
    """The cores and links of all workers, and the links of racks. Unlimited links are left out.

    Args:
        setup: The fleet to which they belong.

    Attributes:
        cores: The core of each worker.
    """

    def __init__(self, setup: FleetSetup) -> None:
        self._setup = setup
        link, rack_link = per_second(setup.worker_link_bytes_per_s), per_second(setup.rack_link_bytes_per_s)
        workers = setup.workers if link < math.inf else 0
        racks = setup.racks if rack_link < math.inf else 0
        self.cores = [SharedResource(1.0) for _ in range(setup.workers)]
        self._ups = [SharedResource(link) for _ in range(workers)]
        self._downs = [SharedResource(link) for _ in range(workers)]
        self._rack_ups = [SharedResource(rack_link) for _ in range(racks)]
        self._rack_downs = [SharedResource(rack_link) for _ in range(racks)]

    def links(
        self, worker: int, share: WorkerShare, up_bytes: float, down_bytes: float
    ) -> Iterator[tuple[SharedResource, float, float]]:
        """Yields each link that a session uses on its way to a worker, with the bytes and the tail in seconds."""
        rack = worker // self._setup.rack_size
        for links, number, size_bytes, tail_s in (
            (self._ups, worker, up_bytes, share.up_tail_s),
            (self._downs, worker, down_bytes, share.down_tail_s),
            (self._rack_ups, rack, up_bytes, share.up_tail_s),
            (self._rack_downs, rack, down_bytes, share.down_tail_s),
        ):
            if links and size_bytes:
                yield links[number], size_bytes, tail_s

    def lose(self, now_s: float) -> tuple[dict[int, dict[int, float]], dict[int, int]]:
        """Removes all jobs of the lost racks.

        Returns:
            By session and lost worker the largest part of a job that was not done, from 0 to 1, and by session the
            number of its removed jobs.
        """
        left: dict[int, dict[int, float]] = defaultdict(dict)
        removed: dict[int, int] = defaultdict(int)
        for worker in range(self._setup.workers_lost):
            for resources in (self.cores, self._ups, self._downs):
                for session, part in resources[worker].remove_all(now_s) if resources else ():
                    removed[session] += 1
                    left[session][worker] = max(left[session].get(worker, 0.0), part)
        # The links of lost racks carry nothing else.
        for links in (self._rack_ups, self._rack_downs):
            for link in links[: self._setup.racks_lost]:
                for session, _ in link.remove_all(now_s):
                    removed[session] += 1
        return left, removed

    def busy_s(self, now_s: float) -> dict[str, float]:
        """Returns the mean seconds for which each kind of resource was used. Those that will be lost do not count."""
        worker, rack = self._setup.workers_lost, self._setup.racks_lost
        kinds = {
            "worker compute": self.cores[worker:],
            "worker link up": self._ups[worker:],
            "worker link down": self._downs[worker:],
            "rack link up": self._rack_ups[rack:],
            "rack link down": self._rack_downs[rack:],
        }
        for resources in kinds.values():
            for resource in resources:
                resource.advance(now_s)
        return {kind: sum(one.busy_s for one in all_) / len(all_) for kind, all_ in kinds.items() if all_}

"""Nodes on a Ray cluster: workers are actors of a fleet on its hosts, and trainers are processes of this machine."""

import os
import socket
from pathlib import Path

from backhaul_lab.experiment.nodes.fabric import Fabric
from backhaul_lab.experiment.plan.cells import Cell, SpecError
from backhaul_lab.experiment.plan.shares import NodeShares
from backhaul_lab.experiment.plan.spec import NodesSpec
from backhaul_lab.harness.processes import ChildError
from backhaul_runtime.process.ray_fleet import NEEDS_RAY, default_address, has_ray, join
from backhaul_server.fleet import control
from backhaul_server.fleet.spec import WorkerSpec


def join_cluster(address: str) -> None:
    """Joins the Ray cluster. Raises SpecError without Ray, and ConnectError if the cluster does not answer."""
    if not has_ray():
        raise SpecError(f'nodes.kind: "ray" {NEEDS_RAY}')
    join(default_address() if address == "auto" else address)


def shares_on_cluster(cell: Cell) -> NodeShares:
    """Returns the shares of nodes that the hosts of a cluster run as fast as they can."""
    import ray

    hosts = {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
    here, cores = socket.gethostname(), len(os.sched_getaffinity(0))
    on_this_machine = cell["trainers"] + (cell["workers"] if hosts == {here} else 0)
    if on_this_machine <= cores:
        return NodeShares(1.0, 1.0)
    why = f"{on_this_machine} nodes run on the {cores} cores of {here}, and hosts of a Ray cluster are not throttled"
    return NodeShares(1.0, 1.0, is_core_bound=True, why=why)


class RayFabric(Fabric):
    """Workers on the hosts of the cluster that this process has joined.

    Args:
        cell: The cell whose nodes are started.
        nodes: Settings of the nodes.
        folder: Directory for the logs of nodes.
    """

    has_all_processes = False  # Ray may place workers on this machine, too

    def __init__(self, cell: Cell, nodes: NodesSpec, folder: Path) -> None:
        super().__init__(cell, nodes, folder)
        self.token_file = nodes.token_file
        self._fleet = f"experiment-{os.getpid()}"
        self._actors: control.Actors = {}

    def start_workers(self) -> None:
        """Starts all workers at once, and waits until they serve. Raises ChildError if one does not."""
        protected = ("--token-file", self.token_file, "--plaintext") if self.token_file else ()
        spec = WorkerSpec((*self._nodes.worker_options, *protected, "--device", "cpu"), 1, 0)
        self._actors = control.start(self._fleet, range(self._cell["workers"]), spec)
        self._opened.callback(lambda: control.drain(self._fleet, self._actors, 0.0))
        workers = control.wait_until_settled(self._fleet, self._actors, self._nodes.start_timeout_s)
        for worker in workers:
            if worker.state != "serving":
                raise ChildError(f"{worker.name} is {worker.state}", worker.trouble)
        self.address = ",".join(worker.address for worker in workers)

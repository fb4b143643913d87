"""Nodes on a Ray cluster: workers are actors of a fleet on its hosts, and trainers are processes of this machine."""

import os
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from backhaul_lab.experiment.nodes.fabric import ENVIRONMENT
from backhaul_lab.experiment.plan.cells import Cell, SpecError
from backhaul_lab.experiment.plan.shares import NodeShares
from backhaul_lab.experiment.plan.spec import NodesSpec
from backhaul_lab.harness.processes import MODULE, ChildError, ChildProcess
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


class RayFabric:
    """Workers on the hosts of the cluster that this process has joined: a `Fabric`.

    Args:
        cell: The cell whose nodes are started.
        nodes: Settings of the nodes.
        folder: Directory for the logs of nodes.
    """

    def __init__(self, cell: Cell, nodes: NodesSpec, folder: Path) -> None:
        self.address, self.token_file = "", nodes.token_file
        self.workers: list[ChildProcess] = []
        self.trainers: list[ChildProcess] = []
        self.processes: list[ChildProcess] = []
        self.has_all_processes = False  # Ray may place workers on this machine, too
        self._cell, self._nodes, self._folder = cell, nodes, folder
        self._fleet = f"experiment-{os.getpid()}"
        self._actors: control.Actors = {}
        self._opened = ExitStack()

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

    def start_trainer(self) -> ChildProcess:
        """Starts a trainer process, which waits for its settings."""
        trainer = self._node(
            f"trainer {len(self.trainers)}", "backhaul_lab.experiment.training.trainer", environment=ENVIRONMENT
        )
        self.trainers.append(trainer)
        return trainer

    def collector(self, store: str) -> ChildProcess | None:
        """Starts the process that writes the history."""
        return self._node(
            "collector", "backhaul_lab.experiment.conduct.collector", store, self.address, self.token_file
        )

    def link_bytes(self) -> tuple[int, int]:
        """Returns zeros: the links of other machines are not counted."""
        return 0, 0

    def _node(self, name: str, *command: str, environment: Any = None) -> ChildProcess:
        log = self._folder / f"{name.replace(' ', '-')}.log"
        node = ChildProcess(name, [*MODULE, *command], log, environment)
        self.processes.append(node)
        self._opened.callback(node.end)
        return node

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.close()

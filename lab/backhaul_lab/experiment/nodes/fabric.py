"""Where the nodes of a cell run, and the links between them: on this machine, in namespaces, or on a Ray cluster."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from math import ceil
from pathlib import Path
from typing import Self

from backhaul_lab.experiment.nodes.network import Bridge, Host
from backhaul_lab.experiment.plan.cells import Cell
from backhaul_lab.experiment.plan.spec import NodesSpec
from backhaul_lab.harness.processes import MODULE, ChildProcess
from backhaul_runtime.process.credentials import make_token

_PORT = 50051
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "KINETO_LOG_LEVEL": "6",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "BACKHAUL_LOG_FORMAT": "text",
}
"""Variables of every node: an op uses one thread, because a node is a machine with one core."""


class Fabric(ABC):
    """Starts the nodes of one cell. A context manager that ends them.

    Args:
        cell: The cell whose nodes are started.
        nodes: Settings of the nodes.
        folder: Directory for logs and the token.

    Attributes:
        address: What trainers connect to, once workers were started.
        token_file: File with the workers' token; empty if they need none.
        workers: The workers' processes on this machine.
        trainers: The processes of the trainers.
        processes: Processes of the cell on this machine: of nodes, links and the history.
        has_all_processes: Whether these are all of the cell's processes that run on this machine.
    """

    has_all_processes = True

    def __init__(self, cell: Cell, nodes: NodesSpec, folder: Path) -> None:
        self.address = self.token_file = ""
        self.workers: list[ChildProcess] = []
        self.trainers: list[ChildProcess] = []
        self.processes: list[ChildProcess] = []
        self._cell, self._nodes, self._folder = cell, nodes, folder
        self._opened = ExitStack()
        self._collector: ChildProcess | None = None

    @abstractmethod
    def start_workers(self) -> None:
        """Starts all workers at once, and waits until they serve. Raises ChildError if one does not."""

    def start_trainer(self) -> ChildProcess:
        """Starts a trainer process, which waits for its settings."""
        command = self._on_trainer(*MODULE, "backhaul_lab.experiment.training.trainer")
        trainer = self._node(f"trainer {len(self.trainers)}", command, ENVIRONMENT)
        self.trainers.append(trainer)
        return trainer

    def collector(self, store: str) -> ChildProcess:
        """Starts the process that writes the history."""
        module = "backhaul_lab.experiment.conduct.collector"
        command = self._on_hub(*MODULE, module, store, self.address, self.token_file)
        self._collector = self._node("collector", command, {})
        return self._collector

    def link_bytes(self) -> tuple[int, int]:
        """Returns the bytes that the devices of all trainers and of all workers have carried; zeros without devices."""
        return 0, 0

    def _on_trainer(self, *command: str) -> list[str]:
        """Returns a command line that runs a command where the next trainer runs."""
        return list(command)

    def _on_hub(self, *command: str) -> list[str]:
        """Returns a command line that runs a command where it reaches all workers."""
        return list(command)

    def _node(
        self, name: str, command: list[str], environment: Mapping[str, str], *, ends_with_stdin: bool = True
    ) -> ChildProcess:
        log = self._folder / f"{name.replace(' ', '-')}.log"
        node = ChildProcess(name, command, log, environment, ends_with_stdin=ends_with_stdin)
        self.processes.append(node)
        self._opened.callback(node.end)
        return node

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        # All end at the same time, so that an interrupted run does not wait for each node in turn.
        for trainer in self.trainers:
            trainer.ask_to_end()
        if self._collector is not None:
            self._collector.end()  # it reads the workers' last reports
        for process in self.processes:
            process.ask_to_end()
        self._opened.close()


class LocalFabric(Fabric):
    """Processes of this machine, each in a network namespace of its own if there is a bridge.

    Args:
        cell: The cell whose nodes are started.
        nodes: Settings of the nodes.
        folder: Directory for logs and the token.
        is_in_namespaces: Whether each node has a network namespace.
    """

    def __init__(self, cell: Cell, nodes: NodesSpec, folder: Path, *, is_in_namespaces: bool) -> None:
        super().__init__(cell, nodes, folder)
        self._bridge: Bridge | None = None
        self._worker_hosts: list[Host] = []
        self._trainer_hosts: list[Host] = []
        if is_in_namespaces:
            self._bridge = self._opened.enter_context(Bridge())
            self.token_file = str(folder / "token")
            Path(self.token_file).unlink(missing_ok=True)
            make_token(Path(self.token_file))

    def start_workers(self) -> None:
        """Starts all workers at once, and waits until they serve. Raises ChildError if one does not."""
        for number in range(self._cell["workers"]):
            self.workers.append(self._start_worker(number))
        addresses = [self._served_at(worker) for worker in self.workers]
        self.address = ",".join(self._linked(number, address) for number, address in enumerate(addresses))

    def _on_trainer(self, *command: str) -> list[str]:
        if self._bridge is None:
            return list(command)
        host = self._bridge.host()
        self._trainer_hosts.append(host)
        return host.command(*command)

    def _on_hub(self, *command: str) -> list[str]:
        return list(command) if self._bridge is None else self._bridge.hub.command(*command)

    def link_bytes(self) -> tuple[int, int]:
        """Returns the bytes that the devices of all trainers and of all workers have carried; zeros without devices."""
        if self._bridge is None:
            return 0, 0
        trainers, workers = (
            sum(sum(self._bridge.counted(host)) for host in hosts)
            for hosts in (self._trainer_hosts, self._worker_hosts)
        )
        return trainers, workers

    def _start_worker(self, number: int) -> ChildProcess:
        options = ["--device", "cpu", *self._nodes.worker_options]
        if self._bridge is None:
            command = [*MODULE, "backhaul", "worker", "--listen", "127.0.0.1:0", *options]
        else:
            host = self._bridge.host()
            self._worker_hosts.append(host)
            where = ["--listen", f"{self._behind_link(host)}:{_PORT}", "--token-file", self.token_file, "--plaintext"]
            command = host.command(*MODULE, "backhaul", "worker", *where, *options)
            if self._cell["bandwidth"]:
                trainers, workers = self._cell["trainers"], self._cell["workers"]
                peers = ceil(trainers / workers) if self._nodes.one_worker_each else trainers
                self._bridge.limit(host, self._cell["bandwidth"], peers)
        return self._node(f"worker {number}", command, ENVIRONMENT, ends_with_stdin=False)

    def _behind_link(self, host: Host) -> str:
        """Returns the address that a worker listens on: where the proxy of its link can reach it, if it has one."""
        return "127.0.0.1" if self._cell["latency"] else host.address

    def _linked(self, number: int, address: str) -> str:
        """Returns the address at which trainers reach a worker: that of its link's proxy if it needs one."""
        latency_s, bytes_per_s = self._cell["latency"], self._cell["bandwidth"]
        if self._bridge is not None:
            bytes_per_s = 0.0  # the device limits it
        if not latency_s and not bytes_per_s:
            return address
        host = self._worker_hosts[number] if self._bridge is not None else None
        link = (address, host.address if host else "127.0.0.1", latency_s, bytes_per_s, self._nodes.window_kib << 10)
        command = [*MODULE, "backhaul_lab.harness.link_proxy", *map(str, link)]
        proxy = self._node(f"link of worker {number}", host.command(*command) if host else command, {})
        return proxy.read(self._nodes.start_timeout_s)

    def _served_at(self, worker: ChildProcess) -> str:
        return worker.read(self._nodes.start_timeout_s).rpartition(" ")[2]

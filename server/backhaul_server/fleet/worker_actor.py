"""The actor of one worker of a fleet. Ray places it, and restarts it if it or its node is lost.

NOTE [Fleet workers]
1. The actor is the supervisor of the worker's serving process (NOTE [Supervision] in `worker/supervisor.py`): it
   restarts the process at the same address. The process ends when the actor ends, however that happens, so a restarted
   actor finds the device free.
2. A worker that cannot start, for example because a file is missing on this node, is tried again every `RETRY_S`. Its
   status says why it does not start.
3. A drain has three steps. The actor withdraws the address, and trainers send the worker nothing new. After the grace
   period the worker gets SIGTERM, and finishes the requests in flight. When it has ended, the actor ends itself so that
   Ray does not restart it.
"""

import sys
import threading
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from time import monotonic

from backhaul_runtime.process import logs
from backhaul_runtime.process.addresses import parse_address
from backhaul_runtime.process.threads import only_in
from backhaul_server.fleet.spec import WorkerSpec, parse_options
from backhaul_server.worker.command import command_of
from backhaul_server.worker.supervisor import Supervisor, reserve_address

RETRY_S = 10.0
_ANY_HOST = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class FleetWorkerStatus:
    """A worker of a fleet as `backhaul fleet status` shows it.

    Attributes:
        name: The name of the worker's actor.
        state: "pending" (Ray is placing or restarting the actor), "starting", "serving", "restarting" or "draining".
        node: The IP address of the actor's node; empty while pending.
        node_id: Ray's id of the node; empty while pending.
        address: The address that trainers use; empty while they use none.
        uptime_s: Seconds since the process that serves now became ready; None if none serves.
        restarts: The number of processes that were started again since Ray started the actor, and 1 more if Ray has
            restarted the actor.
        trouble: Why the last process ended, or why the worker is pending; empty if there is nothing to say.
    """

    name: str
    state: str
    node: str = ""
    node_id: str = ""
    address: str = ""
    uptime_s: float | None = None
    restarts: int = 0
    trouble: str = ""


class FleetWorker:
    """Supervises one worker. Ray calls one method at a time.

    Args:
        name: The name of the actor.
        spec: What the fleet's workers have in common.
    """

    def __init__(self, name: str, spec: WorkerSpec) -> None:
        import ray

        context = ray.get_runtime_context()
        self._name, self._spec = name, spec
        self._node_id = context.get_node_id()
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        self._node = next(node["NodeManagerAddress"] for node in nodes if node["NodeID"] == self._node_id)
        self._actor = context.current_actor
        self._arguments = parse_options(spec.options)
        self._listen = parse_address(self._arguments.listen or f"{_bracketed(self._node)}:0")
        self._restarts = int(context.was_current_actor_reconstructed)
        self._trouble = ""
        self._supervisor: Supervisor | None = None
        self._drains = False
        self._stopping = threading.Event()
        self._round = threading.Lock()  # guards the beginning of a round against the end of all rounds
        threading.Thread(target=self._supervise, name="backhaul-supervisor", daemon=True).start()

    def spec(self) -> WorkerSpec:
        """Returns what this worker was started with, for further workers of the fleet."""
        return self._spec

    def address(self) -> str:
        """Returns the address that trainers use now; empty if they must not use the worker."""
        supervisor = self._supervisor
        if supervisor is None or not supervisor.announcement or self._drains:
            return ""
        host, _, port = supervisor.announcement.rpartition(" ")[2].rpartition(":")
        return f"{_bracketed(self._node) if host.strip('[]') in _ANY_HOST else host}:{port}"

    def status(self) -> FleetWorkerStatus:
        """Returns what this worker does now."""
        supervisor, state = self._supervisor, "starting"
        ready_at_s = supervisor.ready_at_s if supervisor is not None else None
        trouble = (supervisor.trouble if supervisor is not None else "") or self._trouble
        if self._drains:
            state = "draining"
        elif ready_at_s is not None:
            state = "serving"
        elif trouble:
            state = "restarting"
        return FleetWorkerStatus(
            name=self._name,
            state=state,
            node=self._node,
            node_id=self._node_id,
            address=self.address(),
            uptime_s=monotonic() - ready_at_s if ready_at_s is not None else None,
            restarts=self._restarts + (supervisor.restarts if supervisor is not None else 0),
            trouble=trouble,
        )

    def drain(self, grace_s: float) -> None:
        """Withdraws the address now, and stops the worker after a grace period. Returns at once (Rule 3).

        A second call with a shorter grace period stops the worker sooner.

        Args:
            grace_s: Seconds until the worker gets SIGTERM.
        """
        self._drains = True
        threading.Timer(grace_s, self._stop).start()

    def _stop(self) -> None:
        with self._round:
            self._stopping.set()
            if self._supervisor is not None:
                self._supervisor.stop()

    @only_in("backhaul-supervisor")
    def _supervise(self) -> None:
        import ray

        while not self._stopping.is_set():
            with ExitStack() as reserved:
                try:
                    self._run(reserved)
                except OSError as error:
                    self._trouble = f'can\'t listen on "{self._listen.text}": {error.strerror or error}'
            self._stopping.wait(RETRY_S)
        ray.kill(self._actor, no_restart=True)

    def _run(self, reserved: ExitStack) -> None:
        """Runs a worker on a port of its own until it is not to be restarted there. Raises OSError for a taken port."""
        text = reserve_address(self._listen, reserved)
        lines: deque[str] = deque([""], maxlen=1)
        with self._round:
            if self._stopping.is_set():
                return
            self._supervisor = supervisor = Supervisor(command_of(self._arguments, text), log=partial(_log, lines))
        supervisor.run()
        self._supervisor = None
        self._restarts += supervisor.restarts + 1
        self._trouble = supervisor.trouble if supervisor.announcement else f"{supervisor.trouble}: {lines[-1]}"


def _log(lines: deque[str], line: str) -> None:
    """Passes a line of a worker on to the actor's log, which Ray's dashboard shows, and remembers what it says."""
    sys.stderr.write(line)
    parsed = logs.parse(line)
    lines.append(line.strip() if parsed is None else parsed.message)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host

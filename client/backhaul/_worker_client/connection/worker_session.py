"""One session on one worker process, and what the worker has reported about itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from backhaul._worker_client.connection.shared_memory import TrainerSharedMemory
from backhaul_runtime.program.custom.names import OfferedNames


@dataclass(frozen=True, slots=True)
class WorkerSession:
    """One session on one worker process, with what the worker has reported about itself.

    Attributes:
        number: Number of the worker session within the connection.
        session: The worker's id of the session.
        budget_bytes: The memory budget of the worker.
        fingerprint: What the worker's numbers depend on.
        lease_s: Seconds without a request after which the worker closes the session.
        memory: Memory shared with a worker on this machine; None if there is none.
        crosses_network: Whether the worker is reached over TCP, and not through memory or a socket of this machine.
        version: The worker's version of Backhaul.
        allowed: What the worker runs beside torch's own ops.
    """

    number: int
    session: str
    budget_bytes: int
    fingerprint: Mapping[str, str]
    lease_s: float
    memory: TrainerSharedMemory | None = None
    crosses_network: bool = False
    version: str = ""
    allowed: OfferedNames = field(default_factory=OfferedNames)

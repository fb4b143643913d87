"""A worker's settings. The module does not import torch, so that `backhaul worker --help` is quick."""

from dataclasses import dataclass
from pathlib import Path

from backhaul_runtime.process.addresses import Address
from backhaul_runtime.process.tls import TlsFiles
from backhaul_runtime.wire.protocol import LEASE_S
from backhaul_server.worker.credentials import Credentials

EXECUTION_LIMIT_S = 120.0
"""Seconds that an execution may take. A trainer waits at most four times its expected duration, and at least 5 s."""

DRAIN_S = 30.0
"""Seconds that SIGTERM waits for requests in flight; a second SIGTERM ends the wait."""

END_S = 5.0
"""Seconds that an execution which is in progress has to end after that."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The settings of a worker, from the options of `backhaul worker`."""

    address: Address
    """The address to listen on; port 0 takes any free port."""

    device: str = "auto"
    """The device that runs programs: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N"."""

    memory_bytes: int = 0
    """Budget in bytes for everything that the worker holds, 0 for half of the device's memory."""

    sharers: int = 1
    """Number of workers of one training that divide that half among themselves, at least 1."""

    lease_s: float = LEASE_S
    """Seconds without a request after which a trainer's session is closed."""

    execution_limit_s: float = EXECUTION_LIMIT_S
    """Seconds that an execution of a program may take."""

    credentials: Credentials | None = None
    """Who may use the worker; None if everyone who reaches the address may."""

    plaintext: bool = False
    """Whether the worker may listen beyond this machine without TLS."""

    audit_log: str | None = None
    """File that gets a line for each session that is opened and each request that is denied; None for no such log."""

    tls: TlsFiles | None = None
    """The files with which the worker speaks TLS, and requires clients to show a certificate; None: without TLS."""

    allow: tuple[str, ...] = ()
    """Packages, modules and classes whose functions, ops and types programs may name; imported at the start."""

    compiles: bool = False
    """Whether programs may run compiled by Inductor, see NOTE [Compiling]."""

    shared_memory: bool = True
    """Whether trainers on this machine may send and receive tensors in shared memory."""

    unix_socket: bool = True
    """Whether a worker with a TCP address also offers trainers on this machine a Unix socket."""

    parent: int = 0
    """Process id of the trainer that started the worker, and with which the worker ends; 0 for none."""

    supervisor: int = 0
    """Process id of the supervisor that restarts the worker, and with which the worker ends; 0 for none."""


def why_exposed(config: WorkerConfig) -> str:
    """Returns why the worker must not listen on its address; empty if it may."""
    if config.address.is_local:
        return ""
    reachable = f'"{config.address.text}" can be reached from other machines'
    if config.credentials is None:
        return (
            f"{reachable}, and everyone who reaches it could use this worker. Make a token with `backhaul token FILE` "
            "and start with --token-file FILE, or listen on 127.0.0.1 or unix:/path"
        )
    if config.tls is None and not config.plaintext:
        return (
            f"{reachable}, and without TLS everyone who can observe the network could read tensors and tokens. Make "
            "certificates with `backhaul certificates DIR` and start with --tls-cert, --tls-key and --tls-ca; or "
            "accept that with --plaintext, for example in a private network or behind a tunnel"
        )
    return ""


def host_memory_bytes() -> int:
    """Returns the bytes of this machine's memory, or the limit of this process's container if that is lower."""
    total = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return total if text == "max" else min(total, int(text))

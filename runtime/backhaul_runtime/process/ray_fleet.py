"""Fleets of workers in a Ray cluster: how their actors are named and found. Imports Ray when it is first used.

NOTE [Fleets]
1. A worker of a fleet is a detached actor in the namespace "backhaul". Its name is the fleet's name and a number.
   Nothing else is kept about fleets, so a fleet exists while it has an actor.
2. An actor answers `address()` with the address of its worker, or with "" while trainers must not use the worker:
   before it is ready for the first time, and from the beginning of its drain.
3. Ray carries names, addresses and states. Tensors go from the trainer to the worker over gRPC.
"""

import logging
import os
import re
import socket
import sys
import threading
from importlib.util import find_spec
from typing import Any

from backhaul_runtime.errors import AddressError, ConnectError
from backhaul_runtime.process.addresses import parse_address

NAMESPACE = "backhaul"
NEEDS_RAY = "needs Ray: pip install 'backhaul[ray]'"
JOIN_S = 120.0
"""Seconds that Ray may take to join a cluster. It has no such limit of its own.

On a slow machine its client took more than 30 s: a server of its own is started for each client.
"""

_REACH_S = 5.0
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?")
_ACTOR = re.compile(r"(.+)-(\d+)")
_START = "Start a cluster with `ray start --head`, or set RAY_ADDRESS to the address of one"


def has_ray() -> bool:
    """Returns whether Ray is installed."""
    return find_spec("ray") is not None


def check_name(name: str) -> str:
    """Returns a fleet's name. Raises ValueError if it cannot be one: it is also the name in certificates."""
    if not _NAME.fullmatch(name):
        raise ValueError(f'"{name}" cannot be the name of a fleet: use at most 63 letters, digits, "-" and "."')
    return name


def actor_name(fleet: str, number: int) -> str:
    """Returns the name of a worker's actor (Rule 1)."""
    return f"{fleet}-{number}"


def default_address() -> str:
    """Returns RAY_ADDRESS, or the address of the cluster that the program has joined by itself, or Ray's default."""
    address = os.environ.get("RAY_ADDRESS")
    ray = sys.modules.get("ray")  # a program that has not imported Ray has not joined a cluster
    if not address and ray is not None and ray.is_initialized():
        address = str(ray.get_runtime_context().gcs_address)
    return address or "auto"


def join(address: str) -> None:
    """Makes this process a driver in a Ray cluster, from which it can find fleets.

    Args:
        address: As for `ray.init`: "auto", "host:port", or "ray://host:port" from a machine outside of the cluster.

    Raises:
        ConnectError: The cluster does not answer, or it refuses this process.
    """
    _reach(address)
    failures: list[BaseException] = []

    def init() -> None:
        import ray

        try:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        except BaseException as error:
            failures.append(error)

    # Ray tries for minutes if a process accepts the connection but does not answer.
    joining = threading.Thread(target=init, name="backhaul-ray", daemon=True)
    joining.start()
    joining.join(JOIN_S)
    if joining.is_alive():
        raise ConnectError(f'the Ray cluster at "{address}" does not answer within {JOIN_S:g} s. {_START}')
    if failures and address == "auto" and isinstance(failures[0], ConnectionError):
        raise ConnectError(f"no Ray cluster runs on this machine. {_START}")
    if failures:
        raise ConnectError(f'the Ray cluster at "{address}" can\'t be joined: {_short(failures[0])}. {_START}')


def fleets() -> dict[str, list[int]]:
    """Returns the numbers of the workers of each fleet in the cluster that this process has joined."""
    import ray

    numbers_of: dict[str, list[int]] = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        match = _ACTOR.fullmatch(actor["name"])
        if actor["namespace"] == NAMESPACE and match is not None:
            numbers_of.setdefault(match[1], []).append(int(match[2]))
    return {name: sorted(numbers) for name, numbers in sorted(numbers_of.items())}


def actor_of(fleet: str, number: int) -> Any:
    """Returns the handle of a worker's actor, None if there is no such actor."""
    import ray

    try:
        return ray.get_actor(actor_name(fleet, number), NAMESPACE)
    except ValueError:
        return None


def unknown_fleet(name: str, known: dict[str, list[int]]) -> str:
    """Returns the message for a fleet that does not exist."""
    others = f"only {', '.join(known)}" if known else "and no other one"
    return (
        f'the Ray cluster has no fleet "{name}", {others}. Start it with `backhaul fleet up --name {name} --workers N`'
    )


def _reach(address: str) -> None:
    """Opens a TCP connection to the cluster, which fails sooner than Ray does. Raises ConnectError."""
    if address == "auto":
        return
    try:
        where = parse_address(address.removeprefix("ray://"))
        socket.create_connection((where.host, where.port), _REACH_S).close()
    except AddressError:
        raise ConnectError(
            f'"{address}" is no address of a Ray cluster: write "host:port" or "ray://host:port"'
        ) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConnectError(f'no Ray cluster answers at "{address}": {reason}. {_START}') from None


def _short(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")

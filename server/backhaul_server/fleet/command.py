"""The command `backhaul fleet` and its subcommands."""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import timedelta

from backhaul_runtime.errors import BackhaulError, SettingError
from backhaul_runtime.process.ray_fleet import (
    NEEDS_RAY,
    actor_name,
    check_name,
    default_address,
    fleets,
    has_ray,
    join,
    unknown_fleet,
)
from backhaul_runtime.process.units import parse_seconds
from backhaul_server.fleet import control
from backhaul_server.fleet.spec import WorkerSpec, parse_options
from backhaul_server.fleet.worker_actor import FleetWorkerStatus

HELP = "run workers as actors of a Ray cluster"
EXAMPLES = (
    "backhaul fleet up --name pool --workers 4 -- --memory 8GiB",
    "backhaul fleet status --name pool",
    "backhaul fleet scale --name pool --workers 6",
    "backhaul fleet drain --name pool pool-5",
    "backhaul fleet down --name pool",
)

GRACE_S = 5.0
"""Seconds between the withdrawal of an address and SIGTERM. Trainers notice the withdrawal within 3 s."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands to a parser."""
    actions = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND", required=True)

    def add(name: str, act: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=text, description=text)
        action.set_defaults(act=act)
        action.add_argument(
            "--name", type=_name, required=act is not _status, metavar="NAME", help="the fleet, for trainers `ray:NAME`"
        )
        action.add_argument(
            "--address",
            metavar="RAY",
            help="the Ray cluster, as host:port, or ray://host:port from outside (default: RAY_ADDRESS, or the cluster "
            "of this machine)",
        )
        return action

    up = add("up", _up, "start a fleet, and wait until its workers serve")
    up.add_argument("--workers", type=_count, required=True, metavar="N", help="number of workers, one for each device")
    up.add_argument(
        "--cpus",
        type=_count,
        default=1,
        metavar="N",
        help="CPUs that Ray reserves for each worker (default: %(default)s)",
    )
    _add_timeout(up)
    up.add_argument(
        "options",
        nargs="*",
        default=None,
        metavar="OPTION",
        help="after --: options of `backhaul worker`; by default a worker listens on a free port of its node's address",
    )
    status = add("status", _status, "show the workers of a fleet or, without --name, of all fleets")
    status.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    scale = add("scale", _scale, "start further workers of a fleet, or drain those with the highest numbers")
    scale.add_argument("--workers", type=_count, required=True, metavar="N", help="number of workers after it")
    _add_timeout(scale)
    _add_grace(scale)
    drain = add("drain", _drain, "let workers finish what they have, and end them")
    drain.add_argument(
        "workers", nargs="+", metavar="WORKER", help="names of workers, as `backhaul fleet status` shows"
    )
    _add_grace(drain)
    add("down", _down, "end all workers of a fleet as soon as they have finished requests in flight")


def run(arguments: argparse.Namespace) -> int:
    """Runs a subcommand. Returns the exit code: 0, 1 if some workers do not serve, 2 if nothing was done."""
    try:
        if not has_ray():
            raise SettingError(f"the command {NEEDS_RAY}")
        return int(arguments.act(arguments))
    except BackhaulError as error:
        print(f"backhaul fleet: {error}", file=sys.stderr)
        return 2


def _up(arguments: argparse.Namespace) -> int:
    options = tuple(arguments.options)
    device = parse_options(options).device
    join(arguments.address or default_address())
    if arguments.name in fleets():
        raise SettingError(
            f'the fleet "{arguments.name}" exists already: use `backhaul fleet scale` or `backhaul fleet down`'
        )
    spec = WorkerSpec(options, arguments.cpus, int(device == "cuda" or (device == "auto" and _has_gpus())))
    actors = _start(arguments.name, range(arguments.workers), spec)
    workers = control.wait_until_settled(arguments.name, actors, arguments.timeout)
    _print(workers)
    if all(status.state == "restarting" for status in workers):
        control.drain(arguments.name, actors, 0.0)
        print("backhaul fleet: no worker can start, so the fleet was ended.", file=sys.stderr)
        return 2
    return _code(workers)


def _status(arguments: argparse.Namespace) -> int:
    join(arguments.address or default_address())
    names = [arguments.name] if arguments.name is not None else list(fleets())
    workers = [status for name in names for status in control.statuses(name, _actors(name))]
    if arguments.json:
        print(json.dumps([asdict(status) for status in workers], indent=2))
    elif workers:
        _print(workers)
    else:
        print("The Ray cluster has no fleet.")
    return _code(workers)


def _scale(arguments: argparse.Namespace) -> int:
    join(arguments.address or default_address())
    actors = _actors(arguments.name)
    leaving = {status.name for status in control.statuses(arguments.name, actors) if status.state == "draining"}
    staying = [number for number in actors if actor_name(arguments.name, number) not in leaving]
    excess = staying[arguments.workers :]
    if excess:
        return _drained(arguments.name, excess, arguments.grace)
    spec = control.spec_of(actors)
    if spec is None:
        raise SettingError(
            f'no worker of the fleet "{arguments.name}" answers, so its options are not known: try again later'
        )
    free = (number for number in itertools.count() if number not in actors)
    started = _start(arguments.name, list(itertools.islice(free, arguments.workers - len(staying))), spec)
    workers = control.wait_until_settled(arguments.name, started, arguments.timeout)
    _print(control.statuses(arguments.name, {**actors, **started}))
    return _code(workers)


def _drain(arguments: argparse.Namespace) -> int:
    join(arguments.address or default_address())
    numbers = {actor_name(arguments.name, number): number for number in _actors(arguments.name)}
    unknown = [worker for worker in arguments.workers if worker not in numbers]
    if unknown:
        raise SettingError(f"the fleet has no worker {', '.join(unknown)}: there are {', '.join(numbers)}")
    return _drained(arguments.name, [numbers[worker] for worker in arguments.workers], arguments.grace)


def _down(arguments: argparse.Namespace) -> int:
    join(arguments.address or default_address())
    return _drained(arguments.name, list(_actors(arguments.name)), 0.0)


def _actors(name: str) -> control.Actors:
    """Returns the actors of a fleet. Raises SettingError if there is no such fleet."""
    known = fleets()
    if name not in known:
        raise SettingError(unknown_fleet(name, known))
    return control.actors_of(name)


def _start(name: str, numbers: Iterable[int], spec: WorkerSpec) -> control.Actors:
    try:
        return control.start(name, numbers, spec)
    except ValueError as error:
        raise SettingError(f'the fleet "{name}" is being changed by someone else: {error}') from None


def _drained(name: str, numbers: Sequence[int], grace_s: float) -> int:
    """Drains workers and says so. Returns the exit code."""
    actors = {number: actor for number, actor in control.actors_of(name).items() if number in numbers}
    killed = control.drain(name, actors, grace_s)
    for number in actors:
        worker = actor_name(name, number)
        print(f"{worker} was killed: its actor did not answer or end" if worker in killed else f"{worker} has ended")
    return 0


def _print(workers: Sequence[FleetWorkerStatus]) -> None:
    rows = [("NAME", "NODE", "ADDRESS", "STATE", "UPTIME", "RESTARTS")]
    for status in workers:
        uptime = "" if status.uptime_s is None else str(timedelta(seconds=int(status.uptime_s)))
        rows.append((status.name, status.node, status.address, status.state, uptime, str(status.restarts)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for status in workers:
        if status.trouble and status.state != "serving":
            print(f"{status.name} is {status.state}: {status.trouble}", file=sys.stderr)


def _code(workers: Sequence[FleetWorkerStatus]) -> int:
    return 0 if all(status.state == "serving" for status in workers) else 1


def _add_timeout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout",
        type=parse_seconds,
        default=120.0,
        metavar="SECONDS",
        help="wait so long for the workers to serve; they start later, too (default: %(default)g)",
    )


def _add_grace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--grace",
        type=parse_seconds,
        default=GRACE_S,
        metavar="SECONDS",
        help="let trainers use for so long what a worker holds; more than a step avoids recomputation on trainers "
        "(default: %(default)g)",
    )


def _name(text: str) -> str:
    try:
        return check_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'"{text}" is not a whole number above 0')
    return int(text)


def _has_gpus() -> bool:
    import ray

    return bool(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]

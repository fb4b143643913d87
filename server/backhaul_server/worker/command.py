"""`backhaul worker`."""

import argparse
import os
import sys
from functools import partial

from backhaul_runtime.errors import AddressError, SettingError
from backhaul_runtime.process.addresses import parse_address
from backhaul_runtime.process.credentials import read_token
from backhaul_runtime.wire.protocol import LEASE_S
from backhaul_server.worker.config import RUN_LIMIT_S, WorkerConfig, parse_seconds, parse_size
from backhaul_server.worker.supervisor import supervise

HELP = "recompute segments for trainers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "--listen",
        default="127.0.0.1:50051",
        metavar="ADDR",
        help="host:port or unix:/path; port 0 takes a free one (default: %(default)s)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument(
        "--memory",
        type=parse_size,
        default=0,
        metavar="SIZE",
        help="budget for all it holds, with its unit, as in 8GiB (default: half of the device's memory)",
    )
    parser.add_argument(
        "--lease",
        type=parse_seconds,
        default=LEASE_S,
        metavar="SECONDS",
        help="free what a silent trainer held after so long (default: %(default)g)",
    )
    parser.add_argument(
        "--run-limit",
        type=parse_seconds,
        default=RUN_LIMIT_S,
        metavar="SECONDS",
        help="end a run of a segment that takes longer (default: %(default)g)",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="serve only those who show the token in it, needed beyond this machine; `backhaul token FILE` makes one",
    )
    parser.add_argument(
        "--shared-memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="share memory with trainers on this machine (default: yes)",
    )
    parser.add_argument(
        "--unix-socket",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="offer trainers on this machine that come over TCP a Unix socket to go on over (default: yes)",
    )
    parser.add_argument("--parent", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--supervisor", type=int, default=0, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM or SIGINT.

    The process that serves is a child of this one (see `supervisor`), unless a trainer has started this process.
    """
    try:
        config = WorkerConfig(
            address=parse_address(arguments.listen),
            device=arguments.device,
            memory_bytes=arguments.memory,
            lease_s=arguments.lease,
            run_limit_s=arguments.run_limit,
            token=read_token(arguments.token_file) if arguments.token_file is not None else "",
            shared_memory=arguments.shared_memory,
            unix_socket=arguments.unix_socket,
            parent=arguments.parent,
            supervisor=arguments.supervisor,
        )
    except (AddressError, SettingError) as error:
        print(f"backhaul worker: {error}", file=sys.stderr)
        return 2
    if not config.parent and not config.supervisor:
        return supervise(config.address, partial(command_of, arguments))
    # What kernels warn of goes past `logging` to standard error, once for each op of whoever's program.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from backhaul_server.worker.main import serve

    return serve(config)


def command_of(arguments: argparse.Namespace, listen: str) -> list[str]:
    """What starts a worker with the same options, at an address, with this process as its supervisor."""
    options = ["--listen", listen, "--device", arguments.device]
    if arguments.memory:
        options += ["--memory", f"{arguments.memory}B"]
    options += ["--lease", repr(arguments.lease), "--run-limit", repr(arguments.run_limit)]
    if arguments.token_file is not None:
        options += ["--token-file", arguments.token_file]
    options += ["--shared-memory" if arguments.shared_memory else "--no-shared-memory"]
    options += ["--unix-socket" if arguments.unix_socket else "--no-unix-socket"]
    # -P: no modules from the working directory.
    return [sys.executable, "-P", "-m", "backhaul", "worker", *options, "--supervisor", str(os.getpid())]

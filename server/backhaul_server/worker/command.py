"""`backhaul worker`."""

import argparse
import os
import signal
import sys

from backhaul_runtime.addresses import parse_address
from backhaul_runtime.credentials import read_token
from backhaul_runtime.errors import AddressError, SettingError
from backhaul_runtime.protocol import LEASE_S
from backhaul_server.worker.config import WorkerConfig, parse_lease, parse_size

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
        metavar="BYTES",
        help="budget for all it holds, as in 8GiB (default: half of the device's memory)",
    )
    parser.add_argument(
        "--lease",
        type=parse_lease,
        default=LEASE_S,
        metavar="SECONDS",
        help="free what a silent trainer held after so long (default: %(default)g)",
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


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM or SIGINT."""
    try:
        config = WorkerConfig(
            address=parse_address(arguments.listen),
            device=arguments.device,
            memory_bytes=arguments.memory,
            lease_s=arguments.lease,
            token=read_token(arguments.token_file) if arguments.token_file is not None else "",
            shared_memory=arguments.shared_memory,
            unix_socket=arguments.unix_socket,
            parent=arguments.parent,
        )
    except (AddressError, SettingError) as error:
        print(f"backhaul worker: {error}", file=sys.stderr)
        return 2
    if os.getpid() == 1:  # of a container: until it handles SIGTERM, as while torch is imported, the kernel ignores it
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    from backhaul_server.worker.main import serve

    return serve(config)

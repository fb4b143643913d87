"""`backhaul dashboard`."""

import argparse
import socket
import sys

from backhaul_runtime.addresses import Address, parse_address, parse_addresses
from backhaul_runtime.errors import AddressError

HELP = "watch workers in a browser"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "--worker", nargs="+", required=True, metavar="ADDR", help="workers to watch, as host:port or unix:/path"
    )
    parser.add_argument(
        "--listen",
        default="127.0.0.1:8080",
        metavar="HOST:PORT",
        help="where the page is; port 0 takes a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--insecure", action="store_true", help="listen beyond this machine: everyone who reaches it may look"
    )


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM or SIGINT."""
    try:
        workers = parse_addresses(",".join(arguments.worker))
        address = parse_address(arguments.listen)
        listener = _listen(address, insecure=arguments.insecure)
    except (AddressError, ValueError, OSError) as error:
        print(f"backhaul dashboard: {error}", file=sys.stderr)
        return 2
    try:
        from backhaul_server.dashboard.app import serve
    except ImportError as error:
        print(f"backhaul dashboard: {error}; pip install 'backhaul[server]' brings it", file=sys.stderr)
        return 2
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"backhaul dashboard on http://{shown}:{port}", flush=True)
    serve(workers, listener)
    return 0


def _listen(address: Address, *, insecure: bool) -> socket.socket:
    """Takes the address. Raises ValueError or OSError saying why it can't be taken."""
    if address.unix_path:
        raise ValueError(f'"{address.text}" is no place for a page: write host:port')
    if not address.is_local and not insecure:
        raise ValueError(
            f'"{address.text}" can be reached from other machines, and everyone who reaches it could look. Listen on '
            "127.0.0.1, or pass --insecure on a network you trust"
        )
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address.host, address.port))
        listener.listen()  # from here on connections wait rather than fail
    except OSError as error:
        listener.close()
        raise OSError(f'can\'t listen on "{address.text}": {error.strerror}') from None
    return listener

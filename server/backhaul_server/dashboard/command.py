"""The command `backhaul dashboard`."""

import argparse
import re
import socket
import sys

from backhaul_runtime.errors import AddressError
from backhaul_runtime.process.addresses import Address, parse_address
from backhaul_runtime.process.credentials import read_token
from backhaul_server.dashboard.collect.worker_options import add_credentials, read_workers
from backhaul_server.dashboard.history.retention import RETENTION_DAYS, default_path, parse_retention

HELP = "watch workers in a browser"
_ROOT_PATH = re.compile(r"(/[\w.~-]+)*/?", re.ASCII)  # other characters would need an escape in the cookie's path
EXAMPLES = (
    "backhaul dashboard --worker 127.0.0.1:50051    # then open http://127.0.0.1:8080",
    "backhaul dashboard --worker gpu-1:50051 gpu-2:50051 --worker-token-file worker.token --worker-tls dashboard",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to a parser."""
    parser.add_argument(
        "--worker",
        nargs="+",
        action="extend",
        required=True,
        metavar="ADDR",
        help="workers to watch, as host:port, unix:/path, dns:///name:port or file:/path; may be given more than once",
    )
    parser.add_argument(
        "--listen",
        default="127.0.0.1:8080",
        metavar="HOST:PORT",
        help="address to serve on; port 0 takes a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--root-path",
        type=_root_path,
        default="",
        metavar="PATH",
        help="path prefix that a reverse proxy strips before it passes requests on, such as /ml/backhaul; "
        "the login cookie is then sent to this prefix only",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="require the token in this file; needed to listen beyond this machine; `backhaul token FILE` makes one",
    )
    add_credentials(parser)
    parser.add_argument(
        "--store",
        default=default_path(),
        metavar="FILE",
        help="SQLite file that keeps runs and their steps; :memory: keeps nothing over a restart (default: "
        "backhaul/history.sqlite3 in $XDG_STATE_HOME or ~/.local/state)",
    )
    parser.add_argument(
        "--retention",
        type=parse_retention,
        default=RETENTION_DAYS,
        metavar="DAYS",
        help="delete steps and runs that are older (default: %(default)g)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM or SIGINT. Returns the exit code."""
    try:
        resolvers, tokens, tls = read_workers(arguments)
        address = parse_address(arguments.listen)
        token = read_token(arguments.token_file) if arguments.token_file is not None else None
        listener = _listen(address, has_token=token is not None)
    except (AddressError, ValueError, OSError) as error:
        print(f"backhaul dashboard: {error}", file=sys.stderr)
        return 2
    try:
        from backhaul_server.dashboard.history.writer import History
        from backhaul_server.dashboard.http.app import create_app, serve
    except ImportError as error:
        print(f"backhaul dashboard: {error}; install it with: pip install 'backhaul[server]'", file=sys.stderr)
        return 2
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"backhaul dashboard on http://{shown}:{port}", flush=True)
    history = History(arguments.store, arguments.retention)
    if trouble := history.trouble():
        print(f"backhaul dashboard: runs will not be kept over a restart: {trouble}", file=sys.stderr)
    app = create_app(resolvers, tokens, token, address.host, history, tls)
    serve(app, listener, arguments.root_path)
    return 0


def _root_path(text: str) -> str:
    """Returns a path prefix without its last slash. Raises ArgumentTypeError for text that is no absolute path."""
    if not _ROOT_PATH.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f'"{text}" is not a path: write it as it is in the address of the page, such as /ml/backhaul'
        )
    return text.rstrip("/")


def _listen(address: Address, *, has_token: bool) -> socket.socket:
    """Binds the address. Raises ValueError or OSError that say why it cannot be bound."""
    if address.unix_path:
        raise ValueError(f'"{address.text}" is not an address for a page: write host:port')
    if not address.is_local and not has_token:
        raise ValueError(
            f'"{address.text}" can be reached from other machines, and everyone who reaches it could look. Make a '
            "token with `backhaul token FILE` and start with --token-file FILE, or listen on 127.0.0.1"
        )
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address.host, address.port))
        listener.listen()  # from now on connections wait instead of failing
    except OSError as error:
        listener.close()
        raise OSError(f'can\'t listen on "{address.text}": {error.strerror}') from None
    return listener

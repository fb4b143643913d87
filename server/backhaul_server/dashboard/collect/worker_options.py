"""The options of commands that watch workers. Imports nothing that would slow down `--help`."""

import argparse
from collections.abc import Sequence

from backhaul_runtime.process.credentials import one_for_each, read_token
from backhaul_runtime.process.discovery import Resolver, parse_resolvers
from backhaul_runtime.process.tls import TlsFiles, files_of


def add_credentials(parser: argparse.ArgumentParser) -> None:
    """Adds the options with the tokens and the TLS files of the workers."""
    parser.add_argument(
        "--worker-token-file",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="file with the token of the workers: one for all, or one for each in their order",
    )
    parser.add_argument(
        "--worker-tls",
        metavar="DIR",
        help="directory with tls.crt, tls.key and ca.crt, to speak TLS with the workers",
    )


def read_workers(arguments: argparse.Namespace) -> tuple[Sequence[Resolver], list[str | None], TlsFiles | None]:
    """Returns what `Watch` needs: the resolvers that name the workers, their tokens, and the TLS files.

    Raises BackhaulError for an address or a file that cannot be used.
    """
    resolvers = parse_resolvers(",".join(arguments.worker))
    files = one_for_each(arguments.worker_token_file, len(resolvers))
    return resolvers, [read_token(file) if file else None for file in files], files_of(arguments.worker_tls)

"""The command `backhaul top`."""

import argparse
import asyncio
import os
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from backhaul_runtime.errors import BackhaulError
from backhaul_server.dashboard.collect.worker_options import add_credentials, read_workers

if TYPE_CHECKING:
    from rich.console import Console

    from backhaul_server.dashboard.collect.watch import Watch

HELP = "watch workers in a terminal"
EXAMPLES = (
    "backhaul top gpu-1:50051 gpu-2:50051 --worker-token-file worker.token --worker-tls dashboard",
    "backhaul top 127.0.0.1:50051 --once",
)

REFRESH_S = 1.0
_ONCE_S = 0.02
_PIPE_COLUMNS = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to a parser."""
    parser.add_argument(
        "worker",
        nargs="+",
        metavar="ADDR",
        help="workers to watch, as host:port, unix:/path, dns:///name:port or file:/path",
    )
    add_credentials(parser)
    parser.add_argument(
        "--once",
        action="store_true",
        help="print the state once and exit, as if the output were no terminal; exit code 1 if no worker answered",
    )


def run(arguments: argparse.Namespace) -> int:
    """Shows the state until SIGINT or SIGTERM, or once. Returns the exit code."""
    try:
        resolvers, tokens, tls = read_workers(arguments)
    except BackhaulError as error:
        print(f"backhaul top: {error}", file=sys.stderr)
        return 2
    try:
        from rich.console import Console

        from backhaul_server.dashboard.collect.watch import Watch
    except ImportError as error:
        print(f"backhaul top: {error}; install it with: pip install 'backhaul[server]'", file=sys.stderr)
        return 2
    is_terminal = sys.stdout.isatty()
    # A pipe has no width, so lines are not cut. Texts of workers are not interpreted as markup.
    width = None if is_terminal or "COLUMNS" in os.environ else _PIPE_COLUMNS
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    show = _follow if is_terminal and not arguments.once else _once
    return asyncio.run(show(Watch(resolvers, tokens, tls=tls), console))


async def _once(watch: "Watch", console: "Console") -> int:
    from backhaul_server.commands.top_view import view

    asking = asyncio.create_task(watch.run())
    try:
        while not watch.is_ready and not asking.done():
            await asyncio.sleep(_ONCE_S)
    finally:
        await _end(asking)
    console.print(view(watch, time.time()))
    return 0 if any(worker.telemetry is not None for worker in watch.workers) else 1


async def _follow(watch: "Watch", console: "Console") -> int:
    from rich.live import Live

    from backhaul_server.commands.top_view import view

    asked_to_end = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # so that the terminal's cursor is restored
        asyncio.get_running_loop().add_signal_handler(number, asked_to_end.set)
    asking = asyncio.create_task(watch.run())
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while not asked_to_end.is_set() and not asking.done():
                live.update(view(watch, time.time()), refresh=True)
                with suppress(TimeoutError):
                    await asyncio.wait_for(asked_to_end.wait(), REFRESH_S)
    finally:
        await _end(asking)
    return 0


async def _end(asking: "asyncio.Task[None]") -> None:
    """Ends the watch. Raises its exception if it has failed."""
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking

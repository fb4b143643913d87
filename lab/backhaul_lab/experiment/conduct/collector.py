"""Writes what workers report into the history that the dashboard shows, while a cell runs.

`python -m backhaul_lab.experiment.conduct.collector STORE ADDRESSES TOKEN_FILE` serves until its stdin is closed. An
empty TOKEN_FILE means that the workers need no token.
"""

import asyncio
import sys
from contextlib import suppress

from backhaul_runtime.process.credentials import read_token
from backhaul_runtime.process.discovery import parse_resolvers
from backhaul_server.dashboard.collect.watch import INTERVAL_S, Watch
from backhaul_server.dashboard.history.retention import RETENTION_DAYS
from backhaul_server.dashboard.history.writer import History

_LAST_LOOK_S = 1.2 * INTERVAL_S


async def _collect(history: History, addresses: str, token: str | None) -> None:
    watching = asyncio.create_task(
        Watch(parse_resolvers(addresses), [token], history.put, None, history.put_event).run()
    )
    await asyncio.to_thread(sys.stdin.read)
    await asyncio.sleep(_LAST_LOOK_S)  # trainers send their last reports when their sessions close
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching


def main(store: str, addresses: str, token_file: str) -> None:
    """Serves until stdin is closed. Prints why nothing is kept, or an empty line."""
    history = History(store, RETENTION_DAYS)
    print(history.trouble(), flush=True)
    history.start()
    try:
        asyncio.run(_collect(history, addresses, read_token(token_file) if token_file else None))
    finally:
        history.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A TCP proxy that is slow, for tests of slow networks."""

import time
from collections.abc import Callable

from backhaul_lab.harness.link_proxy import LinkProxy


class SlowProxy(LinkProxy):
    """Passes bytes on to a server, each read so many seconds later. A context manager."""

    def __init__(self, target: str, delay_s: float) -> None:
        self._delay_s = delay_s
        super().__init__(target)

    def _pace(self, is_up: bool) -> Callable[[int], None]:
        return lambda _: time.sleep(self._delay_s)

"""A proxy that is the link of a worker: it adds latency, and limits the bandwidth of each direction.

`python -m backhaul_lab.experiment.nodes.link_proxy TARGET HOST LATENCY_S BYTES_PER_S WINDOW_BYTES` prints its address
and serves until its stdin is closed.
"""

import sys
from collections.abc import Callable

from backhaul_lab.bench.distant_proxy import DistantProxy
from backhaul_lab.bench.throttled_proxy import Bandwidth


class LinkProxy(DistantProxy):
    """A link with latency and bandwidth. A context manager.

    Args:
        target: Address of the worker, as "host:port".
        host: IP address that the proxy listens on.
        latency_s: Seconds that a byte takes in one direction.
        bytes_per_s: Bandwidth of each direction, which all connections share; 0 for unlimited.
        window_bytes: Bytes of one direction of one connection that may be on their way.
    """

    def __init__(self, target: str, host: str, latency_s: float, bytes_per_s: float, window_bytes: int) -> None:
        self._up, self._down = Bandwidth(bytes_per_s), Bandwidth(bytes_per_s)
        super().__init__(target, 2 * latency_s, window_bytes, host)

    def _pace(self, is_up: bool) -> Callable[[int], None]:
        return (self._up if is_up else self._down).wait


def main(target: str, host: str, latency_s: str, bytes_per_s: str, window_bytes: str) -> None:
    """Serves until stdin is closed. Prints the address."""
    with LinkProxy(target, host, float(latency_s), float(bytes_per_s), int(window_bytes)) as proxy:
        print(proxy.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])

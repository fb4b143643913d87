"""A Ray cluster of several nodes on this machine, each at a loopback address of its own.

Run as a program it is a node: it starts Ray with its arguments, and ends all processes of it when standard input is
closed, which also happens when the test is killed.
"""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

_PR_SET_CHILD_SUBREAPER = 36
_STORE_BYTES = 80_000_000  # Ray's smallest is 75 MB
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "240",  # a busy machine takes longer than the 30 s that Ray allows
    # Ray notices the loss of a node within 3 s instead of half a minute.
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


class RayNode:
    """A node of a cluster, ready when constructed.

    Args:
        address: IP address of the node.
        options: Options of `ray start`.
    """

    def __init__(self, address: str, *options: str) -> None:
        self.address = address
        self._process = subprocess.Popen(
            [
                *(sys.executable, __file__, "--node-ip-address", address, "--object-store-memory", str(_STORE_BYTES)),
                *(
                    "--num-cpus",
                    "3",
                    "--num-gpus",
                    "0",
                    "--disable-usage-stats",
                    "--include-log-monitor",
                    "false",
                    *options,
                ),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **_QUIET},
            text=True,
        )
        assert self._process.stdout is not None
        lines: list[str] = []
        while not lines or lines[-1] != "ready\n":
            lines.append(self._process.stdout.readline())
            if not lines[-1]:
                raise RuntimeError("".join(lines))

    def processes(self) -> dict[int, str]:
        """The command lines of the node's processes, by process id."""
        return dict(_descendants(self._process.pid))

    def serving(self, address: str) -> int:
        """The process of the node that serves at an address, 0 if there is none."""
        serving = (pid for pid, line in self.processes().items() if f" worker --listen {address} " in line)
        return next(serving, 0)

    def kill(self) -> None:
        """Ends all processes of the node at once, as if its machine was gone."""
        self._process.communicate()


class RayCluster:
    """A cluster whose first node is its head.

    Attributes:
        address: Where the cluster is joined from its nodes.
        client_address: Where the cluster is joined from other machines.
        nodes: The nodes that were started.
    """

    def __init__(self, nodes: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ray-"))  # Unix sockets in a test's own folder had too long names
        self.nodes: list[RayNode] = []
        try:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = str(free.getsockname()[1])
            self.client_address = f"ray://127.0.0.2:{port}"
            self.nodes.append(
                RayNode(
                    *("127.0.0.2", "--head", "--port", "0", "--include-dashboard", "false", "--no-monitor"),
                    *("--temp-dir", str(self._folder), "--ray-client-server-port", port),
                )
            )
            self.address = (self._folder / "ray_current_cluster").read_text()
            self.nodes += [RayNode(f"127.0.0.{2 + n}", "--address", self.address) for n in range(1, nodes)]
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for node in self.nodes:
            node.kill()
        shutil.rmtree(self._folder)


def _descendants(pid: int) -> Iterator[tuple[int, str]]:
    """Yields the process ids and command lines of a process's children, of their children, and so on."""
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                yield child, Path(f"/proc/{child}/cmdline").read_bytes().decode().replace("\0", " ")
                yield from _descendants(child)


def _main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # Ray's daemons become children of this process
    try:
        ray = Path(sys.executable).with_name("ray")
        subprocess.run([ray, "start", *sys.argv[1:]], stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, check=True)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.read()
    finally:
        with suppress(ChildProcessError):
            while True:
                for pid, _ in _descendants(os.getpid()):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                os.waitpid(-1, 0)


if __name__ == "__main__":
    _main()

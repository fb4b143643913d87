"""Network namespaces on a bridge, connected by veth pairs. Needs Linux, root and iproute2.

The namespaces have no names. The kernel frees them, with their devices, when the processes that hold them end. These
processes get SIGKILL when this process ends, however that happens.
"""

import os
import shutil
import subprocess
from contextlib import ExitStack
from typing import Any, Self

from backhaul_lab.harness.processes import WITH_ITS_PARENT

SUBNET = "10.77.0"
HUB = f"{SUBNET}.1"
"""Address of the bridge, which is a host of its own."""
_BURST_S, _QUEUE_MS = 0.002, 50
"""What a token bucket and the queue in front of a link hold: seconds of traffic, and milliseconds for each peer."""
_SMALLEST_BURST = 70_000
"""Bytes of a token bucket: room for the largest packet that veth passes on whole. The kernel would split it otherwise,
which costs a multiple of CPU time."""


def obstacle() -> str:
    """Returns why network namespaces cannot be made here; empty if they can be."""
    missing = [name for name in ("ip", "unshare", "nsenter", "setpriv") if shutil.which(name) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)}, of iproute2 and util-linux, which this machine lacks"
    if os.geteuid():
        return "network namespaces need root (CAP_SYS_ADMIN and CAP_NET_ADMIN), and this user is not root"
    made = subprocess.run(
        ["unshare", "--net", "--mount", "ip", "link", "add", "dev", "probe0", "type", "veth", "peer", "name", "probe1"],
        capture_output=True,
        check=False,
        text=True,
    )
    if made.returncode:
        return f"network namespaces are forbidden here: {made.stderr.strip() or 'unshare failed'}"
    return ""


class Host:
    """A network namespace with an address on the bridge.

    Args:
        holder: Process whose namespaces these are.
        address: The IPv4 address of the host.
    """

    def __init__(self, holder: "subprocess.Popen[bytes]", address: str) -> None:
        self.holder, self.address = holder, address

    def command(self, *command: str) -> list[str]:
        """Returns a command line that runs a command in the namespaces."""
        return ["nsenter", "--target", str(self.holder.pid), "--net", "--mount", *command]

    def start(self, *command: str, **options: Any) -> "subprocess.Popen[bytes]":
        """Starts a process in the namespaces that ends with this one."""
        return subprocess.Popen([*WITH_ITS_PARENT, *self.command(*command)], **options)


class Bridge:
    """A bridge in a namespace of its own, to which hosts are connected. A context manager.

    Args:
        prepare: A shell command that each process that holds namespaces runs first.

    Attributes:
        hub: The host at the bridge's own address.
    """

    def __init__(self, prepare: str = ":") -> None:
        self._opened = ExitStack()
        self._prepare = prepare
        try:
            self.hub = Host(self._hold(), HUB)
            self._configure(
                self.hub, "link add dev bridge type bridge", f"address add {HUB}/24 dev bridge", "link set bridge up"
            )
        except BaseException:
            self._opened.close()
            raise
        self._hosts = 1

    def host(self) -> Host:
        """Connects a further host. Raises subprocess.CalledProcessError if the kernel refuses."""
        self._hosts += 1
        host, device = Host(self._hold(), f"{SUBNET}.{self._hosts}"), f"host{self._hosts}"
        self._configure(
            self.hub,
            f"link add dev {device} type veth peer name eth0 netns {host.holder.pid}",
            f"link set {device} master bridge up",
        )
        self._configure(host, f"address add {host.address}/24 dev eth0", "link set eth0 up")
        return host

    def connect(self, host: Host, *, is_up: bool) -> None:
        """Cuts a host off, or connects it again."""
        self._configure(self.hub, f"link set {_device(host)} {'up' if is_up else 'down'}")

    def limit(self, host: Host, bytes_per_s: float, peers: int) -> None:
        """Limits the bandwidth of each direction of a host's link with a token bucket.

        Args:
            host: The host at the end of the link.
            bytes_per_s: Bytes per second of each direction.
            peers: Number of hosts that use the link at the same time. The queue in front of it grows with them: their
                connections would drop and repeat much of what they send if they had to share the queue of one.
        """
        burst = max(_SMALLEST_BURST, int(bytes_per_s * _BURST_S))
        for side, device in ((self.hub, _device(host)), (host, "eth0")):
            bucket = f"rate {int(bytes_per_s * 8)}bit burst {burst}b latency {_QUEUE_MS * peers}ms"
            command = f"tc qdisc replace dev {device} root tbf {bucket}"
            subprocess.run(side.command(*command.split()), check=True, capture_output=True, text=True)

    def counted(self, host: Host) -> tuple[int, int]:
        """Returns the bytes that a host's device has received and sent, as its own side counts them."""
        shown = subprocess.run(host.command("cat", "/proc/net/dev"), check=True, capture_output=True, text=True).stdout
        columns = next(line.split(":")[1].split() for line in shown.splitlines() if line.strip().startswith("eth0:"))
        return int(columns[0]), int(columns[8])

    def _hold(self) -> "subprocess.Popen[bytes]":
        shell = ["sh", "-c", f"ip link set lo up; {self._prepare}; echo; exec sleep inf"]
        holder = subprocess.Popen([*WITH_ITS_PARENT, "unshare", "--net", "--mount", *shell], stdout=subprocess.PIPE)
        self._opened.callback(_end, holder)
        assert holder.stdout is not None
        holder.stdout.readline()
        return holder

    @staticmethod
    def _configure(host: Host, *commands: str) -> None:
        for command in commands:
            subprocess.run(host.command("ip", *command.split()), check=True, capture_output=True, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.close()


def _device(host: Host) -> str:
    """Returns the name of the bridge's end of a host's link."""
    return f"host{host.address.rpartition('.')[2]}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()

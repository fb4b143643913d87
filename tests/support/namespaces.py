"""Hosts of a test: network namespaces on a bridge, with a name server. Needs root and iproute2.

The namespaces have no names. They end with the processes that hold them, also if the test is killed.
"""

import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest

SUBNET = "10.77.0"
NAME_SERVER = f"{SUBNET}.1"
_WITH_ITS_PARENT = ("setpriv", "--pdeathsig", "KILL")
"""What a command begins with that ends when the test does."""


def require_namespaces() -> None:
    """Skips a test where network namespaces cannot be made."""
    if os.geteuid() or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("network namespaces need root, unshare and iproute2")
    if subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("network namespaces are forbidden here")


class Host:
    """A network namespace with an address on the bridge, and a resolver that asks the test's name server.

    Args:
        holder: Process whose namespaces these are.
        address: The IPv4 address.
    """

    def __init__(self, holder: "subprocess.Popen[bytes]", address: str) -> None:
        self.holder, self.address = holder, address

    def command(self, *command: str) -> list[str]:
        """The command, to be run in the namespaces."""
        return ["nsenter", "--target", str(self.holder.pid), "--net", "--mount", *command]

    def start(self, *command: str, **options: Any) -> "subprocess.Popen[bytes]":
        """Starts a process in the namespaces."""
        return subprocess.Popen([*_WITH_ITS_PARENT, *self.command(*command)], **options)


class Network:
    """A bridge in a namespace of its own, to which hosts are connected. Close it with a `with` block.

    Args:
        folder: An empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self._opened = ExitStack()
        self._resolv = folder / "resolv.conf"
        self._resolv.write_text(f"nameserver {NAME_SERVER}\noptions timeout:1 attempts:1\n")
        self.names = folder / "names"
        self.names.write_text("")
        self._hub = self._hold()
        self._in_hub("ip", "link", "add", "bridge", "type", "bridge")
        self._in_hub("ip", "address", "add", f"{NAME_SERVER}/24", "dev", "bridge")
        for device in ("lo", "bridge"):
            self._in_hub("ip", "link", "set", device, "up")
        self._hosts = 1
        server = Host(self._hub, NAME_SERVER).start(sys.executable, "-P", __file__, str(self.names))
        self._opened.callback(_end, server)

    def host(self) -> Host:
        """Connects a further host."""
        self._hosts += 1
        holder, address, device = self._hold(), f"{SUBNET}.{self._hosts}", f"host{self._hosts}"
        self._in_hub("ip", "link", "add", device, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
        self._in_hub("ip", "link", "set", device, "master", "bridge", "up")
        host = Host(holder, address)
        for options in (f"address add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
            subprocess.run(host.command("ip", *options.split()), check=True)
        return host

    def connect(self, host: Host, *, is_up: bool) -> None:
        """Cuts a host off, or connects it again."""
        self._in_hub("ip", "link", "set", f"host{host.address.rpartition('.')[2]}", "up" if is_up else "down")

    def resolve(self, name: str, hosts: Sequence[Host]) -> None:
        """Lets a name have the addresses of these hosts from now on."""
        draft = self.names.with_suffix(".draft")
        draft.write_text(f"{name} {' '.join(host.address for host in hosts)}\n")
        draft.replace(self.names)

    def _hold(self) -> "subprocess.Popen[bytes]":
        holder = subprocess.Popen(
            [
                *_WITH_ITS_PARENT,
                "unshare",
                "--net",
                "--mount",
                "sh",
                "-c",
                f"mount --bind {self._resolv} /etc/resolv.conf; echo; exec sleep inf",
            ],
            stdout=subprocess.PIPE,
        )
        self._opened.callback(_end, holder)
        assert holder.stdout is not None
        holder.stdout.readline()
        return holder

    def _in_hub(self, *command: str) -> None:
        subprocess.run(["nsenter", "--target", str(self._hub.pid), "--net", *command], check=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.close()


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def serve_names(file: Path) -> None:
    """Answers DNS queries for IPv4 addresses from a file, which has a name and its addresses in each line."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((NAME_SERVER, 53))
        while True:
            query, client = server.recvfrom(512)
            labels, position = [], 12
            while query[position]:
                labels.append(query[position + 1 : position + 1 + query[position]].decode())
                position += query[position] + 1
            question = query[12 : position + 5]
            (kind,) = struct.unpack("!H", query[position + 1 : position + 3])
            table = dict(line.split(maxsplit=1) for line in file.read_text().splitlines() if " " in line.strip())
            known = ".".join(labels) in table
            addresses = table.get(".".join(labels), "").split() if kind == 1 else []
            header = query[:2] + struct.pack("!HHHHH", 0x8580 if known else 0x8583, 1, len(addresses), 0, 0)
            records = b"".join(struct.pack("!HHHIH", 0xC00C, 1, 1, 0, 4) + socket.inet_aton(a) for a in addresses)
            server.sendto(header + question + records, client)


if __name__ == "__main__":
    serve_names(Path(sys.argv[1]))

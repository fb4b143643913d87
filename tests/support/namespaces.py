"""Hosts of a test: network namespaces on a bridge, with a name server. Needs root and iproute2.

The namespaces have no names. They end with the processes that hold them, also if the test is killed.
"""

import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from backhaul_lab.experiment.nodes.network import HUB, Bridge, Host, obstacle


def require_namespaces() -> None:
    """Skips a test where network namespaces cannot be made."""
    if why := obstacle():
        pytest.skip(why)


class Network(Bridge):
    """A bridge in a namespace of its own, to which hosts are connected. Close it with a `with` block.

    Args:
        folder: An empty folder.
    """

    def __init__(self, folder: Path) -> None:
        resolv = folder / "resolv.conf"
        resolv.write_text(f"nameserver {HUB}\noptions timeout:1 attempts:1\n")
        self.names = folder / "names"
        self.names.write_text("")
        super().__init__(f"mount --bind {resolv} /etc/resolv.conf")
        self._server = self.hub.start(sys.executable, "-P", __file__, str(self.names))

    def resolve(self, name: str, hosts: Sequence[Host]) -> None:
        """Lets a name have the addresses of these hosts from now on."""
        draft = self.names.with_suffix(".draft")
        draft.write_text(f"{name} {' '.join(host.address for host in hosts)}\n")
        draft.replace(self.names)

    def __exit__(self, *exception: object) -> None:
        self._server.kill()
        self._server.wait()
        super().__exit__(*exception)


def serve_names(file: Path) -> None:
    """Answers DNS queries for IPv4 addresses from a file, which has a name and its addresses in each line."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((HUB, 53))
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

"""Fleets, as far as they need no Ray."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backhaul import AddressError, ConnectError
from backhaul._cli.main import main
from backhaul_runtime.errors import SettingError
from backhaul_runtime.process import ray_fleet, ray_resolver
from backhaul_runtime.process.discovery import parse_resolvers
from backhaul_runtime.process.ray_resolver import RayResolver
from backhaul_server.fleet.spec import parse_options
from conftest import QUIET_S, wait_until
from support.processes import is_running

ANSWERS = """#!{python}
# In the place of Python: answers as `ray_follower` does, with the lines of a file once it is there, and ends after the
# last one.
import os
import sys
import time
from multiprocessing.connection import Connection

sys.argv[1:4] == ["-P", "-m", "backhaul_runtime.process.ray_follower"] or sys.exit(9)
while not os.path.exists({answers!r}):
    time.sleep(0.01)
with Connection(int(sys.argv[6])) as channel, open({answers!r}, "rb") as answers:
    for answer in answers:
        channel.recv_bytes()
        channel.send_bytes(answer)
    channel.recv_bytes()
"""


@pytest.fixture
def resolver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayResolver]:
    """The fleet "small", whose follower answers with the lines of the file `answers`."""
    program = tmp_path / "python"
    program.write_text(ANSWERS.format(python=sys.executable, answers=str(tmp_path / "answers")))
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(ray_resolver, "NEXT_ANSWER_S", QUIET_S)
    (resolver,) = parse_resolvers("ray:small")
    assert isinstance(resolver, RayResolver)
    yield resolver
    resolver.close()


@pytest.mark.parametrize("text", ["ray:", "ray:a b", "ray:-a", "ray:a_b", "ray://host:10001"])
def test_a_name_that_no_fleet_can_have(text: str) -> None:
    with pytest.raises(AddressError, match="names no fleet: .* cannot be the name of a fleet"):
        parse_resolvers(text)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ray_fleet, "find_spec", lambda name: None)
    with pytest.raises(AddressError, match=r"\"ray:small\" needs Ray: pip install 'backhaul\[ray\]'"):
        parse_resolvers("ray:small")
    assert main(["fleet", "status"]) == 2
    assert capsys.readouterr().err == "backhaul fleet: the command needs Ray: pip install 'backhaul[ray]'\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--token-file", "token"), "--token-file token: write the whole path, which must exist on all nodes"),
        (("--tls-key", "tls/key.pem"), "--tls-key tls/key.pem: write the whole path"),
        (("--listen", "unix:/run/worker"), "reached over TCP"),
        (("--device", "cuda:1"), "Ray chooses the GPU"),
        (("--when-idle",), "Ray has reserved the device"),
    ],
)
def test_options_that_no_worker_of_a_fleet_can_have(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        parse_options(options)


def test_a_cluster_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "down", "--name", "small", "--address", "127.0.0.1:1"]) == 2
    assert 'no Ray cluster answers at "127.0.0.1:1": Connection refused' in capsys.readouterr().err
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    assert main(["fleet", "status"]) == 2
    assert '"nonsense" is no address of a Ray cluster' in capsys.readouterr().err


def test_the_workers_of_a_fleet_have_its_name_in_their_certificates(resolver: RayResolver, tmp_path: Path) -> None:
    (tmp_path / "answers").write_text('{"addresses": ["127.0.0.2:1", "127.0.0.3:1"]}\n{"addresses": []}\n')
    first = resolver.resolve()
    assert [(address.text, address.verified_name) for address in first] == [
        ("127.0.0.2:1", "small"),
        ("127.0.0.3:1", "small"),
    ]
    assert resolver.resolve() == []


def test_a_follower_that_has_ended_is_no_empty_fleet(
    resolver: RayResolver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "answers").write_text('{"addresses": []}\n{"trouble": "the Ray cluster has ended"}\n')
    assert resolver.resolve() == []
    with pytest.raises(ConnectError, match="the Ray cluster has ended"):
        resolver.resolve()
    for _ in range(2):  # the follower ends now, and no other one is started so soon
        with pytest.raises(ConnectError, match="the Ray cluster has ended"):
            resolver.resolve()
    monkeypatch.setattr(ray_resolver, "RESTART_S", 0.0)
    assert resolver.resolve() == []


def test_an_answer_that_comes_late_is_that_to_a_later_look(
    resolver: RayResolver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ray_resolver, "FIRST_ANSWER_S", 0.0)
        with pytest.raises(ConnectError, match="Ray does not answer"):
            resolver.resolve()
    answers = tmp_path / "whole"
    answers.write_text('{"addresses": ["127.0.0.2:1"]}\n{"addresses": []}\n')
    answers.rename(tmp_path / "answers")
    assert [address.text for address in resolver.resolve()] == ["127.0.0.2:1"]
    assert resolver.resolve() == []


def test_a_closed_source_leaves_no_process(resolver: RayResolver, tmp_path: Path) -> None:
    (tmp_path / "answers").write_text('{"addresses": []}\n' * 9)
    resolver.resolve()
    assert resolver._process is not None
    pid = resolver._process.pid
    resolver.close()
    wait_until(lambda: not is_running(pid), "the follower has ended")
    with pytest.raises(ConnectError, match="The resolver is closed"):
        resolver.resolve()
    assert resolver._process is None

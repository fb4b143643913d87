"""The worker that connect() starts: where its socket lies, and the device and memory that it gets."""

import tempfile
from pathlib import Path

import pytest
import torch

import backhaul
from backhaul import ConnectError, SettingError
from backhaul._worker_client.connection import embedded
from backhaul._worker_client.connection.embedded import EmbeddedWorker
from backhaul_runtime.process.addresses import socket_address
from conftest import QUIET


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "job%2F7",
        "a;b&c=d:[e]",
        *[
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("a%20b", "a,b", "a#b", "a?b", "a b", "ä", "a" * 100)
        ],
    ],
)
def test_the_temporary_folder_may_have_any_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp")) / name  # tmp_path itself is long
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    x = torch.randn(3, requires_grad=True)

    with backhaul.connect(strict=True, settings=QUIET) as session:
        session.checkpoint(torch.sin, x).sum().backward()

    assert list(folder.iterdir()) == []
    folder.rmdir()
    folder.parent.rmdir()


def test_without_a_place_for_the_socket_the_error_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "a,b"))
    monkeypatch.setattr(embedded, "_SYSTEMS_DIRECTORY", str(tmp_path / "missing"))
    with pytest.raises(ConnectError, match="Set TMPDIR"):
        backhaul.connect()


def test_a_started_worker_that_does_not_answer_is_not_to_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    address = socket_address(f"{tempfile.mkdtemp()}/nobody.sock")
    monkeypatch.setattr(EmbeddedWorker, "ensure", lambda _: address)
    with pytest.raises(ConnectError, match="that connect.. has started does not answer") as caught:
        backhaul.connect(settings=backhaul.Settings(connect_timeout_s=0.1))
    assert "without an address" not in str(caught.value)
    Path(address.unix_path).parent.rmdir()


@pytest.mark.parametrize(
    ("ranks", "gpus", "device", "sharers"),
    [("", 0, "cpu", 1), ("4", 0, "cpu", 4), ("4", 4, "cuda:2", 1), ("4", 2, "cuda:0", 2), ("x", 1, "cuda:0", 1)],
)
def test_ranks_divide_the_memory_of_a_device(
    ranks: str, gpus: int, device: str, sharers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert embedded._sharers(device) == sharers


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "CPU", "auto"])
def test_a_device_is_named_as_torch_names_it(device: str) -> None:
    with pytest.raises(SettingError, match="cuda:N"):
        backhaul.connect(device=device)


@pytest.mark.nightly
def test_a_worker_that_was_ended_in_order_is_started_again() -> None:
    worker = EmbeddedWorker(0, 30)
    worker.ensure()
    process = worker._process
    assert process is not None
    process.terminate()
    process.wait(30)

    worker.ensure()

    assert worker.pid not in {None, process.pid}
    worker.close()

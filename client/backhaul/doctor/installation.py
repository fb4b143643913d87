"""Checks of this installation, and of the connection to a worker."""

import platform
from importlib.metadata import version as version_of_package

import torch

from backhaul._config import Config
from backhaul.doctor.check import Check
from backhaul.doctor.profile.costs import PlainProfile
from backhaul.doctor.profile.measurement import WorkerProfile
from backhaul_runtime.process.fingerprint import DECISIVE
from backhaul_runtime.process.units import size_text
from backhaul_runtime.version import version

_GIGABIT = 1e9 / 8
_MILLISECONDS = 1e3


def installation() -> Check:
    """Says which versions are installed here."""
    device = "a CPU"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    values = {
        "backhaul": version(),
        "torch": torch.__version__,
        "grpcio": version_of_package("grpcio"),
        "python": platform.python_version(),
        "device": device,
    }
    text = (
        f"Backhaul {values['backhaul']} with torch {values['torch']}, grpcio {values['grpcio']} and Python "
        f"{values['python']} on {device}."
    )
    return Check("installation", "ok", text, values=values)


def connection_checks(worker: WorkerProfile, config: Config) -> list[Check]:
    """Checks the versions, the numerics, the encryption, the link and the memory of a worker that has answered."""
    return [_versions(worker), _numerics(worker), _encryption(worker, config), _link(worker), _memory(worker)]


def _versions(worker: WorkerProfile) -> Check:
    values = {"worker": worker.version, "trainer": version()}
    if worker.version == version():
        return Check("versions", "ok", f"the worker has Backhaul {worker.version} as well.", values=values)
    return Check(
        "versions",
        "note",
        f"the worker has Backhaul {worker.version}, this trainer {version()}. They speak the same protocol.",
        "Install the same version on both when you can.",
        values,
    )


def _numerics(worker: WorkerProfile) -> Check:
    values = {name: list(pair) for name, pair in worker.differences.items()}
    if not values:
        return Check("numerics", "ok", "the worker computes the same bits as this trainer.")
    text = ", ".join(f"{name} ({ours} here, {theirs} there)" for name, (ours, theirs) in values.items())
    if values.keys() & DECISIVE:
        return Check(
            "numerics",
            "failed",
            f"the worker cannot recompute anything for this trainer, because these differ: {text}.",
            "Install the same torch on both sides, and use the same type of device.",
            values,
        )
    return Check(
        "numerics",
        "note",
        f"the worker rounds differently, so its values are compared within tolerances. These differ: {text}.",
        "",
        values,
    )


def _encryption(worker: WorkerProfile, config: Config) -> Check:
    is_near = worker.link is not None and not worker.link.crosses_network
    if is_near or worker.address.startswith(("127.0.0.1:", "localhost:", "[::1]:")):
        return Check("encryption", "ok", "the worker is on this machine, so nothing crosses a network.")
    if config.tls:
        return Check("encryption", "ok", f"the connection uses TLS with the files in {config.tls}.")
    return Check(
        "encryption",
        "note",
        "the connection is not encrypted: anyone who can observe the network can read the training data.",
        "Use TLS, see docs/tls.md, unless the network is your own.",
    )


def _link(worker: WorkerProfile) -> Check:
    link = worker.link
    if link is None:
        text = "the worker did not run a small segment, so the link could not be measured."
        return Check("link", "failed", text, "The log says why.")
    values = {
        "up_bytes_per_s": link.up_bytes_per_s,
        "down_bytes_per_s": link.down_bytes_per_s,
        "round_trip_s": link.round_trip_s,
        "crosses_network": link.crosses_network,
    }
    way = "over TCP" if link.crosses_network else "through shared memory or a Unix socket"
    text = (
        f"{link.up_bytes_per_s / _GIGABIT:.2g} Gbit/s to the worker and {link.down_bytes_per_s / _GIGABIT:.2g} Gbit/s "
        f"from it, {way}; a small request takes {link.round_trip_s * _MILLISECONDS:.2g} ms."
    )
    return Check("link", "ok", text, values=values)


def _memory(worker: WorkerProfile) -> Check:
    text = f"the worker lends {size_text(worker.memory_bytes)}."
    return Check("memory", "ok", text, values={"memory_bytes": worker.memory_bytes})


def speed_check(worker: WorkerProfile, plain: PlainProfile, what: str) -> Check:
    """Says how fast a worker computes a model that is not the user's.

    Args:
        worker: The worker, measured with the model.
        plain: The model on this trainer.
        what: What the model is, for the text.
    """
    speed = worker.speed(plain)
    if not speed:
        reasons = (
            "; ".join(reason for times in worker.segment_times for reason in times.reasons) or "no gradients came back"
        )
        return Check("speed", "failed", f"the worker did not compute {what}: {reasons}.", "The log may say more.")
    text = f"the worker computes {what} {speed:.2f} times as fast as this trainer."
    return Check("speed", "ok", text, values={"speed": speed})

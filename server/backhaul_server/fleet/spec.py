"""What all workers of a fleet have in common."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from backhaul_runtime.errors import SettingError
from backhaul_runtime.process.addresses import parse_address
from backhaul_server.worker import command

_FILES = ("token_file", "credentials", "audit_log", "tls_cert", "tls_key", "tls_ca")


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What an actor needs to know to run a worker, beside its own name.

    Attributes:
        options: The options of `backhaul worker`.
        cpus: The CPUs that Ray reserves for a worker.
        gpus: The GPUs that Ray reserves for a worker, 0 or 1.
    """

    options: tuple[str, ...]
    cpus: int
    gpus: int


def parse_options(options: tuple[str, ...]) -> argparse.Namespace:
    """Parses options of `backhaul worker` and checks what is special to fleets.

    Returns:
        The values. `listen` is None if the options do not have it.

    Raises:
        SettingError: A worker of a fleet cannot have such an option.
        SystemExit: The worker has no such option, or it has no such value. The parser has printed what is wrong.
    """
    parser = argparse.ArgumentParser(prog="backhaul fleet up ... --", usage="%(prog)s [OPTIONS OF backhaul worker]")
    command.add_arguments(parser)
    parser.set_defaults(listen=None)
    arguments = parser.parse_args(options)
    if arguments.listen is not None and parse_address(arguments.listen).unix_path:
        raise SettingError(f"--listen {arguments.listen}: a fleet's workers are reached over TCP, as in 0.0.0.0:50051")
    if arguments.when_idle is not None:
        raise SettingError("--when-idle: Ray has reserved the device for the worker, so others do not use it")
    if arguments.device.startswith("cuda:"):
        raise SettingError(f"--device {arguments.device}: Ray chooses the GPU, so write --device cuda")
    for name in _FILES:
        path = getattr(arguments, name)
        if path is not None and not Path(path).is_absolute():
            option = f"--{name.replace('_', '-')}"
            raise SettingError(f"{option} {path}: write the whole path, which must exist on all nodes of the cluster")
    return arguments

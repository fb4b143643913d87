"""The command `backhaul worker`."""

import argparse
import os
import re
import sys
from functools import partial
from pathlib import Path

from backhaul_runtime.errors import AddressError, SettingError
from backhaul_runtime.process.addresses import parse_address
from backhaul_runtime.process.tls import TlsFiles
from backhaul_runtime.process.units import parse_seconds, parse_size
from backhaul_runtime.wire.protocol import LEASE_S
from backhaul_server.worker.config import EXECUTION_LIMIT_S, WorkerConfig, why_exposed
from backhaul_server.worker.credentials import Credentials
from backhaul_server.worker.idleness import QUIET_S, Idleness
from backhaul_server.worker.supervisor import supervise

HELP = "recompute segments for trainers"
EXAMPLES = (
    "backhaul worker --memory 8GiB                  # for trainers on this machine",
    "backhaul worker --listen 0.0.0.0:50051 --token-file worker.token --tls-cert worker/tls.crt \\\n"
    "      --tls-key worker/tls.key --tls-ca worker/ca.crt",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to a parser."""
    parser.add_argument(
        "--listen",
        default="127.0.0.1:50051",
        metavar="ADDR",
        help="host:port or unix:/path; port 0 takes a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--device", type=_parse_device, default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)"
    )
    parser.add_argument(
        "--memory",
        type=parse_size,
        default=0,
        metavar="SIZE",
        help="memory budget with its unit, as in 8GiB (default: half of the device's memory)",
    )
    parser.add_argument(
        "--lease",
        type=parse_seconds,
        default=LEASE_S,
        metavar="SECONDS",
        help="close the session of a trainer that is silent for so long (default: %(default)g)",
    )
    parser.add_argument(
        "--execution-limit",
        type=parse_seconds,
        default=EXECUTION_LIMIT_S,
        metavar="SECONDS",
        help="cancel an execution of a segment that takes longer (default: %(default)g)",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="require the token in this file; needed to listen beyond this machine; `backhaul token FILE` makes one",
    )
    parser.add_argument(
        "--credentials",
        metavar="FILE",
        help="accept the credentials in this TOML file, each with tokens and quotas; instead of --token-file",
    )
    parser.add_argument(
        "--audit-log",
        metavar="FILE",
        help="append a JSON line for each session that is opened and each request that is denied",
    )
    for option, what in (("cert", "certificate"), ("key", "private key"), ("ca", "authority's certificate")):
        parser.add_argument(
            f"--tls-{option}",
            metavar="FILE",
            help=f"{what} (PEM), to speak TLS; the three --tls options belong together",
        )
    parser.add_argument(
        "--plaintext",
        action="store_true",
        help="allow to listen beyond this machine without TLS: others on the network can read tensors and tokens then",
    )
    parser.add_argument(
        "--allow",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="run custom autograd functions, ops and types of these installed packages or modules, or single classes "
        "as module:name; the worker imports them at its start, see docs/allow.md",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile programs with Inductor for trainers that do; needs a C++ compiler, or Triton on a GPU",
    )
    parser.add_argument(
        "--shared-memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="share memory with trainers on this machine (default: yes)",
    )
    parser.add_argument(
        "--unix-socket",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="offer a Unix socket to trainers on this machine that connect over TCP (default: yes)",
    )
    parser.add_argument(
        "--when-idle",
        nargs="?",
        type=parse_seconds,
        const=QUIET_S,
        metavar="SECONDS",
        help="serve only while others do not use the device: start when the GPU, or the CPU for a worker on the CPU, "
        f"was otherwise idle for so long ({QUIET_S:g} without a number), and finish and wait when it is used again",
    )
    parser.add_argument("--sharers", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--supervisor", type=int, default=0, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Runs a worker until SIGTERM or SIGINT. Returns the exit code.

    The worker is a child of this process (see `supervisor`), unless a trainer or a supervisor has started this process.
    """
    try:
        config = WorkerConfig(
            address=parse_address(arguments.listen),
            device=arguments.device,
            memory_bytes=arguments.memory,
            sharers=max(1, arguments.sharers),
            lease_s=arguments.lease,
            execution_limit_s=arguments.execution_limit,
            credentials=_credentials(arguments),
            plaintext=arguments.plaintext,
            audit_log=arguments.audit_log,
            tls=_tls(arguments),
            allow=tuple(dict.fromkeys(arguments.allow)),
            compiles=arguments.compile,
            shared_memory=arguments.shared_memory,
            unix_socket=arguments.unix_socket,
            parent=arguments.parent,
            supervisor=arguments.supervisor,
        )
        if trouble := why_exposed(config):
            raise SettingError(trouble)
    except (AddressError, SettingError) as error:
        print(f"backhaul worker: {error}", file=sys.stderr)
        return 2
    if not config.parent and not config.supervisor:
        gate = None if arguments.when_idle is None else Idleness.of(arguments.device, arguments.when_idle)
        return supervise(config.address, partial(command_of, arguments), gate)
    # Warnings of torch's kernels bypass `logging`. A program could fill standard error with one per op.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from backhaul_server.worker.main import serve

    return serve(config)


def _parse_device(text: str) -> str:
    """Returns the name of a device as it is. Raises ArgumentTypeError for what is none that a worker computes on."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f'"{text}" is no device of a worker: write auto, cpu, cuda or cuda:N')
    return text


def _credentials(arguments: argparse.Namespace) -> Credentials | None:
    """Returns who may use the worker. Raises SettingError if the files cannot be used."""
    if arguments.credentials is not None and arguments.token_file is not None:
        raise SettingError(
            "--credentials and --token-file exclude each other: name the token's file in the credentials"
        )
    if arguments.credentials is not None:
        return Credentials(arguments.credentials)
    return Credentials(arguments.token_file, is_single=True) if arguments.token_file is not None else None


def _tls(arguments: argparse.Namespace) -> TlsFiles | None:
    """Returns the files of the TLS options. Raises SettingError if they cannot be used."""
    named = {name: getattr(arguments, f"tls_{name}") for name in ("cert", "key", "ca")}
    missing = [f"--tls-{name}" for name, file in named.items() if file is None]
    if len(missing) == len(named):
        return None
    if missing:
        raise SettingError(f"TLS needs --tls-cert, --tls-key and --tls-ca; missing: {', '.join(missing)}")
    if parse_address(arguments.listen).unix_path:
        raise SettingError("TLS needs a TCP address: a Unix socket is open only to users of this machine")
    files = TlsFiles(*map(Path, named.values()))
    files.read()
    return files


def command_of(arguments: argparse.Namespace, listen: str) -> list[str]:
    """Returns the command line of a worker with the same options, with this process as its supervisor.

    Args:
        arguments: The parsed options of this process.
        listen: The address to listen on.
    """
    options = ["--listen", listen, "--device", arguments.device]
    if arguments.memory:
        options += ["--memory", f"{arguments.memory}B"]
    options += ["--lease", repr(arguments.lease), "--execution-limit", repr(arguments.execution_limit)]
    for name in ("token_file", "credentials", "audit_log"):
        if getattr(arguments, name) is not None:
            options += [f"--{name.replace('_', '-')}", getattr(arguments, name)]
    for name in arguments.allow:
        options += ["--allow", name]
    options += ["--compile"] if arguments.compile else []
    options += ["--plaintext"] if arguments.plaintext else []
    for name in ("cert", "key", "ca"):
        if getattr(arguments, f"tls_{name}") is not None:
            options += [f"--tls-{name}", getattr(arguments, f"tls_{name}")]
    options += ["--shared-memory" if arguments.shared_memory else "--no-shared-memory"]
    options += ["--unix-socket" if arguments.unix_socket else "--no-unix-socket"]
    # -P keeps modules of the working directory out.
    return [sys.executable, "-P", "-m", "backhaul", "worker", *options, "--supervisor", str(os.getpid())]

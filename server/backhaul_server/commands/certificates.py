"""The command `backhaul certificates`."""

import argparse
import ipaddress
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backhaul_runtime.process.tls import AUTHORITY, CERTIFICATE, KEY

if TYPE_CHECKING:
    from cryptography import x509

HELP = "make a private authority, and certificates of workers, trainers and dashboards"
EXAMPLES = ("backhaul certificates certificates --worker gpu-box 192.0.2.7",)

AUTHORITY_KEY = "ca.key"
_AUTHORITY_DAYS = 3650
_EARLY = timedelta(minutes=5)  # clocks of other machines may be behind


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to a parser."""
    parser.add_argument(
        "directory",
        type=Path,
        metavar="DIR",
        help="directory for the authority, with a directory for each certificate; an existing authority stays in use",
    )
    parser.add_argument(
        "--worker",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="host names or IP addresses under which trainers and dashboards reach workers (default: localhost, "
        "127.0.0.1 and ::1)",
    )
    parser.add_argument(
        "--days", type=_days, default=365, help="days for which certificates are valid (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Makes the certificates and prints where they are. Returns the exit code."""
    try:
        made = make(arguments.directory, arguments.worker or ["localhost", "127.0.0.1", "::1"], arguments.days)
    except ImportError as error:
        print(f"backhaul certificates: {error}; install it with: pip install 'backhaul[tls]'", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"backhaul certificates: {error}", file=sys.stderr)
        return 2
    for directory in made:
        print(directory)
    return 0


def make(directory: Path, worker_names: Sequence[str], days: int) -> list[Path]:
    """Makes new certificates, and the authority that issues them if the directory has none.

    Returns:
        The directories of the certificates: of workers, trainers and dashboards. Each has `tls.crt`, `tls.key` and
        `ca.crt`. Certificates that are there already are replaced one file at a time, key first.

    Raises:
        ImportError: The package `cryptography` is missing.
        OSError: A file cannot be read or written.
        ValueError: The authority in the directory cannot be used.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    directory.mkdir(parents=True, exist_ok=True)
    authority, authority_key = _authority(directory)
    made = []
    for role in ("worker", "trainer", "dashboard"):
        names = list(worker_names) if role == "worker" else [role]
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if role == "worker" else [])]
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _builder(role, authority.subject, key.public_key(), days)
            .add_extension(x509.SubjectAlternativeName([_name(name) for name in names]), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(authority_key, _hash())
        )
        of_role = directory / role
        of_role.mkdir(exist_ok=True)
        _write(of_role / KEY, _pem(key), 0o600)
        _write(of_role / CERTIFICATE, _encoded(certificate))
        _write(of_role / AUTHORITY, _encoded(authority))
        made.append(of_role)
    return made


def _authority(directory: Path) -> tuple["x509.Certificate", Any]:
    """Returns the authority of a directory with its private key, which are made if they are missing."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    if (directory / AUTHORITY).exists():
        certificate = x509.load_pem_x509_certificate((directory / AUTHORITY).read_bytes())
        return certificate, serialization.load_pem_private_key((directory / AUTHORITY_KEY).read_bytes(), None)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "backhaul authority")])
    certificate = (
        _builder("backhaul authority", name, key.public_key(), _AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, _hash())
    )
    _write(directory / AUTHORITY_KEY, _pem(key), 0o600)
    _write(directory / AUTHORITY, _encoded(certificate))
    return certificate, key


def _builder(name: str, issuer: "x509.Name", public_key: Any, days: int) -> "x509.CertificateBuilder":
    from cryptography import x509

    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLY)
        .not_valid_after(now + timedelta(days=days))
    )


def _name(text: str) -> "x509.GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _hash() -> Any:
    from cryptography.hazmat.primitives import hashes

    return hashes.SHA256()


def _pem(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    encoded: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return encoded


def _encoded(certificate: "x509.Certificate") -> bytes:
    from cryptography.hazmat.primitives import serialization

    return certificate.public_bytes(serialization.Encoding.PEM)


def _write(path: Path, contents: bytes, mode: int = 0o644) -> None:
    """Replaces a file at once, so that nobody reads a part of it."""
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as opened:
        opened.write(contents)
    draft.replace(path)


def _days(text: str) -> int:
    try:
        days = int(text)
    except ValueError:
        days = 0
    if not 0 < days <= _AUTHORITY_DAYS:
        raise argparse.ArgumentTypeError(f'"{text}" is not a number of days from 1 to {_AUTHORITY_DAYS}')
    return days

"""TLS between trainers, dashboards and workers: who is let in, who is not, and what both are told."""

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from torch import Tensor, nn

import backhaul
from backhaul_runtime.process.tls import TlsFiles
from backhaul_server.commands import certificates
from conftest import quiet, wait_until
from support.bits import Checkpoint, differing, plainly
from support.dashboards import Dashboard
from support.nursery import run
from support.processes import WorkerProcess
from support.wire import METHODS, refusal

NAMES = ["localhost", "127.0.0.1"]


class Secured(NamedTuple):
    """A worker that requires certificates and a token."""

    process: WorkerProcess
    token_file: str


def options_of(directory: Path) -> list[str]:
    """The options of a worker that uses these files."""
    files = {"cert": "tls.crt", "key": "tls.key", "ca": "ca.crt"}
    return [text for option, name in files.items() for text in (f"--tls-{option}", str(directory / name))]


def token_in(directory: Path, token: str) -> str:
    path = directory / "token"
    path.write_text(token + "\n")
    path.chmod(0o600)
    return str(path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and a certificate for each role."""
    directory = tmp_path_factory.mktemp("certificates")
    certificates.make(directory, NAMES, 30)
    return directory


@pytest.fixture(scope="module")
def secured(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    token_file = token_in(tmp_path_factory.mktemp("token"), "the-token-of-this-worker")
    options = ["--memory", "512MiB", "--token-file", token_file, *options_of(made / "worker")]
    # A trainer keeps gRPC quiet, and what a test starts has the variables of the trainer that the test is.
    with WorkerProcess(*options, environment={"GRPC_VERBOSITY": "INFO"}) as process:
        yield Secured(process, token_file)


def gradients(checkpoint: Checkpoint) -> list[Tensor | None]:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
    y = torch.randn(4, 16)
    for layer in layers:
        y = checkpoint(layer, y).tanh()
    y.sum().backward()
    return [parameter.grad for parameter in layers.parameters()]


def why_not(worker: Secured, tls: Path | None, **options: Any) -> str:
    """The message of the error with which a connection fails."""
    settings: dict[str, Any] = {
        "tls": "" if tls is None else str(tls),
        "token_file": worker.token_file,
        "settings": backhaul.Settings(connect_timeout_s=5.0),
    }
    with pytest.raises((backhaul.ConnectError, backhaul.CredentialError)) as caught:
        backhaul.connect(worker.process.address, **(settings | options))
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "dns:///localhost"])
@pytest.mark.parametrize("is_beside", [True, False])
def test_training_over_tls(secured: Secured, made: Path, host: str, is_beside: bool) -> None:
    with backhaul.connect(
        f"{host}:{secured.process.address.rpartition(':')[2]}",
        tls=str(made / "trainer"),
        token_file=secured.token_file,
        settings=quiet(unix_socket=is_beside, shared_memory=is_beside),
    ) as session:
        assert differing(gradients(session.checkpoint), gradients(plainly)) == []
        assert (session.report().remote, session.report().fallbacks) == (3, 0)


def signed(directory: Path, authority: Path | None, days: int) -> Path:
    """Files of a certificate that ends in some days, issued by an authority or by itself."""
    directory.mkdir()
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "trainer")])
    issuer, issuers_key = name, key
    if authority is not None:
        issuer = x509.load_pem_x509_certificate((authority / "ca.crt").read_bytes()).subject
        loaded = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), None)
        assert isinstance(loaded, ec.EllipticCurvePrivateKey)
        issuers_key = loaded
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=60))
        .not_valid_after(now + timedelta(days=days))
        .sign(issuers_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (directory / "tls.crt").write_bytes(certificate.public_bytes(pem))
    (directory / "tls.key").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return directory


@pytest.mark.slow
def test_who_is_not_let_in(secured: Secured, made: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    certificates.make(foreign, NAMES, 30)
    trusting = Path(shutil.copytree(foreign / "trainer", tmp_path / "trusting"))
    self_signed = signed(tmp_path / "self-signed", None, 30)
    expired = signed(tmp_path / "expired", made, -30)
    assert "its certificate is refused: " in why_not(secured, foreign / "trainer")
    for directory in (trusting, self_signed, expired):
        shutil.copy(made / "ca.crt", directory / "ca.crt")
        assert "it refuses our certificate: " in why_not(secured, directory)
    assert "it requires TLS" in why_not(secured, None)
    assert "token" in why_not(secured, made / "trainer", token_file=token_in(tmp_path, "another-token-for-it"))
    assert "token" in why_not(secured, made / "trainer", token_file="")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["another authority", "self-signed", "expired", "none"])
def test_no_method_is_reached_with_a_bad_certificate(kind: str, secured: Secured, made: Path, tmp_path: Path) -> None:
    token = Path(secured.token_file).read_text().strip()
    if kind == "another authority":
        certificates.make(tmp_path / "foreign", NAMES, 30)
        shown = tmp_path / "foreign" / "trainer"
    else:
        authority, days = {"expired": (made, -30)}.get(kind, (None, 30))
        shown = signed(tmp_path / "signed", authority, days)
    shutil.copy(made / "ca.crt", shown / "ca.crt")
    credentials = TlsFiles.in_directory(str(shown)).of_channel
    if kind == "none":
        credentials = {"root_certificates": credentials["root_certificates"]}
    before = secured.process.logged()
    with grpc.secure_channel(secured.process.address, grpc.ssl_channel_credentials(**credentials)) as channel:
        for method in METHODS:
            call = refusal(channel, method, token)
            assert call is not None
            assert call.code() == grpc.StatusCode.UNAVAILABLE, method.name
    wait_until(lambda: "Handshake" in secured.process.logged()[len(before) :], "the worker has logged the handshakes")


@pytest.mark.slow
def test_no_method_is_reached_with_a_good_certificate_and_a_wrong_token(secured: Secured, made: Path) -> None:
    credentials = TlsFiles.in_directory(str(made / "trainer")).of_channel
    with grpc.secure_channel(secured.process.address, grpc.ssl_channel_credentials(**credentials)) as channel:
        for method in METHODS:
            call = refusal(channel, method, "not-the-token-of-it")
            assert call is not None
            assert call.code() == grpc.StatusCode.UNAUTHENTICATED, method.name


@pytest.mark.slow
def test_a_worker_under_another_name_is_refused(made: Path, tmp_path: Path) -> None:
    elsewhere = Path(shutil.copytree(made, tmp_path / "elsewhere"))
    certificates.make(elsewhere, ["gpu-box"], 30)
    with (
        WorkerProcess(*options_of(elsewhere / "worker")) as worker,
        pytest.raises(backhaul.ConnectError, match=r"its certificate is refused: .*127\.0\.0\.1"),
    ):
        backhaul.connect(worker.address, tls=str(made / "trainer"), settings=backhaul.Settings(connect_timeout_s=5.0))


@pytest.mark.slow
def test_a_worker_without_tls_says_so(worker: WorkerProcess, made: Path) -> None:
    with pytest.raises(backhaul.ConnectError, match="it does not speak TLS"):
        backhaul.connect(worker.address, tls=str(made / "trainer"), settings=backhaul.Settings(connect_timeout_s=5.0))
    with pytest.raises(backhaul.SettingError, match=r"can't be read: .*backhaul certificates"):
        backhaul.connect(worker.address, tls="/nowhere")


@pytest.mark.slow
def test_files_that_are_replaced_are_used_without_a_restart(tmp_path: Path) -> None:
    for name in ("first", "second"):
        certificates.make(tmp_path / name, NAMES, 30)
    used = Path(shutil.copytree(tmp_path / "first" / "worker", tmp_path / "used"))

    def connects(authority: str) -> bool:
        tls = str(tmp_path / authority / "trainer")
        try:
            backhaul.connect(
                worker.address, tls=tls, settings=backhaul.Settings(connect_timeout_s=5.0, unix_socket=False)
            ).close()
        except backhaul.ConnectError:
            return False
        return True

    with WorkerProcess(*options_of(used)) as worker:
        assert (connects("first"), connects("second")) == (True, False)
        (used / "tls.key").write_text("half of it")
        assert connects("first")
        for name in ("tls.key", "tls.crt", "ca.crt"):
            shutil.copy(tmp_path / "second" / "worker" / name, used / name)
        assert (connects("first"), connects("second")) == (False, True)
        assert "the former ones stay in use" in worker.logged()


@pytest.mark.slow
def test_a_dashboard_over_tls(secured: Secured, made: Path) -> None:
    token, tls = ("--worker-token-file", secured.token_file), ("--worker-tls", str(made / "dashboard"))
    for options, healthy in (((*token, *tls), 1), (token, 0)):
        with Dashboard(secured.process.address, options=options) as dashboard:
            wait_until(lambda: dashboard.get("/readyz").status_code == 200, "the worker was asked")
            assert dashboard.api("overview")["healthy_workers"] == healthy


def said(*command: str) -> str:
    """The exit code of a command, and what it printed."""
    ended = run(*command)
    return f"{ended.returncode} {ended.stdout}{ended.stderr}"


@pytest.mark.slow
def test_health_over_tls(secured: Secured, made: Path) -> None:
    address = secured.process.address
    assert said("health", address, "--tls", str(made / "trainer")) == f"0 {address}: serving\n"
    assert said("health", address).startswith(f"1 {address}: the connection broke")
    assert "can't be read" in said("health", address, "--tls", "/nowhere")


@pytest.mark.slow
def test_wrong_options_of_a_worker(made: Path, tmp_path: Path) -> None:
    worker, trainer = options_of(made / "worker"), options_of(made / "trainer")
    assert "missing: --tls-key, --tls-ca" in said("worker", *worker[:2])
    assert "the key does not belong to the certificate" in said("worker", *worker[:2], *trainer[2:])
    assert "needs a TCP address" in said("worker", "--listen", f"unix:{tmp_path}/socket", *worker)
    assert "can't be read: No such file" in said("worker", *worker[:5], str(tmp_path / "none"))
    assert "holds no certificate" in said("worker", *worker[:5], str(made / "worker" / "tls.key"))


@pytest.mark.slow
def test_certificates_from_the_command_line(tmp_path: Path) -> None:
    directory = tmp_path / "made"
    assert said("certificates", str(directory), "--worker", "gpu-box", "10.0.0.5").startswith("0 ")
    authority = (directory / "ca.crt").read_bytes()
    certificate = x509.load_pem_x509_certificate((directory / "worker" / "tls.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["gpu-box"]
    assert list(map(str, names.get_values_for_type(x509.IPAddress))) == ["10.0.0.5"]
    assert said("certificates", str(directory)).startswith("0 ")  # again, by the same authority
    assert (directory / "ca.crt").read_bytes() == authority
    assert [key for key in directory.rglob("*.key") if key.stat().st_mode & 0o077] == []
    assert "not a number of days" in said("certificates", str(directory), "--days", "0")
    (tmp_path / "file").write_text("")
    assert said("certificates", str(tmp_path / "file")).startswith("2 ")

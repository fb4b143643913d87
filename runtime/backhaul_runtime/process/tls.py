"""The files of TLS, and what is wrong if two sides refuse each other because of them. Does not import torch.

NOTE [Certificates]
1. Both sides show a certificate, and verify that the other's was issued by the authority whose certificate they have.
   The client also verifies that the server's certificate names the host that the user wrote.
2. The files may be replaced at any time, as cert-manager does before certificates expire. A server looks at them at
   each handshake, and a client reads them whenever it connects. Connections that exist go on.
3. A server keeps the certificates that it has while the new files cannot be used, for example because only some of them
   have been written yet.
"""

import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from backhaul_runtime.errors import SettingError
from backhaul_runtime.process.files import state_of

CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"
"""The names of the files in a directory, as in a Kubernetes Secret of cert-manager."""
_READ_S = 0.5
_REFUSED = "it refuses our certificate: another authority than the one that it trusts has issued it, or it has expired"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files with which one side of a connection identifies itself and verifies the other. All are PEM.

    Attributes:
        certificate: The certificate, followed by those of intermediate authorities.
        key: The certificate's private key, not encrypted.
        authority: The certificate of the authority that issued the other side's certificate.
    """

    certificate: Path
    key: Path
    authority: Path

    @classmethod
    def in_directory(cls, directory: str) -> "TlsFiles":
        """Returns the three files of a directory."""
        return cls(*(Path(directory) / name for name in (CERTIFICATE, KEY, AUTHORITY)))

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Returns the contents of the three files.

        Raises:
            SettingError: A file cannot be read or has other contents. The message never has the key.
        """
        contents = []
        for path in (self.certificate, self.key, self.authority):
            try:
                contents.append(path.read_bytes())
            except OSError as error:
                raise SettingError(f'the file "{path}" can\'t be read: {error.strerror}. {_HOW}') from None
        self.context()
        certificate, key, authority = contents
        return certificate, key, authority

    @property
    def of_channel(self) -> dict[str, bytes]:
        """The arguments of `grpc.ssl_channel_credentials`. Raises SettingError as `read` does."""
        certificate, key, authority = self.read()
        return {"root_certificates": authority, "private_key": key, "certificate_chain": certificate}

    def context(self) -> ssl.SSLContext:
        """Returns a client's context of Python's own TLS, which says what is wrong with the files.

        Raises:
            SettingError: The files cannot be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or str(error)
            raise SettingError(
                f'the certificate "{self.certificate}" and the key "{self.key}" can\'t be used: '
                f"{_REASONS.get(reason, reason)}. {_HOW}"
            ) from None
        try:
            context.load_verify_locations(self.authority)
        except (OSError, ValueError) as error:
            raise SettingError(f'"{self.authority}" holds no certificate of an authority: {error}. {_HOW}') from None
        return context

    @property
    def state(self) -> tuple[object, ...]:
        """Changes when a file is replaced or written."""
        return tuple(map(state_of, (self.certificate, self.key, self.authority)))


_HOW = "`backhaul certificates DIR` makes certificates"
_REASONS = {"KEY_VALUES_MISMATCH": "the key does not belong to the certificate", "NO_START_LINE": "one is not PEM"}


def files_of(directory: str | None) -> TlsFiles | None:
    """Returns the files of a directory, None for no directory. Raises SettingError if they cannot be used."""
    if not directory:
        return None
    files = TlsFiles.in_directory(directory)
    files.read()
    return files


def why_refused(host: str, port: int, files: TlsFiles | None, timeout_s: float, name: str = "") -> str:
    """Returns why a server and a client with these files refuse each other; empty if TLS is not the reason.

    gRPC only says that the connection was closed. This tries again with Python's own TLS.

    Args:
        host: The host of the server.
        port: The TCP port of the server.
        files: The files of the client; None if it speaks without TLS.
        timeout_s: Seconds within which the server must answer.
        name: The name that the server's certificate must have; empty for the host.
    """
    if files is not None:
        context = files.context()
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, port), timeout_s) as connected,
            context.wrap_socket(connected, server_hostname=name or host) as secured,
        ):
            if files is None:
                return "it requires TLS, so this side needs certificates"
            secured.settimeout(_READ_S)
            # In TLS 1.3 a server refuses a certificate only after the client's part has ended, and gRPC's says nothing.
            if not secured.recv(1):
                return _REFUSED
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is refused: {error.verify_message}"
    except ssl.SSLError as error:
        if files is None:
            return ""
        if error.reason in {"WRONG_VERSION_NUMBER", "HTTP_REQUEST"}:
            return "it does not speak TLS"
        return f"{_REFUSED} ({str(error.reason).lower().replace('_', ' ')})"
    except OSError:
        pass
    return ""

"""The credentials of a worker: the tokens that it accepts, and what each of them may use. Does not import torch.

NOTE [Credentials]
1. A credential has a name, tokens and quotas. A file names all of them; with `--token-file` there is one credential
   without a name and without quotas.
2. The files are read again when they change. Quotas count at once. A token that is gone is revoked: requests with it
   are denied, and the sessions that were opened with it are closed.
3. While the files cannot be used, for example because they are being written, what was read before stays valid.
4. A credential with two tokens accepts both, so that a token can be replaced without denying anyone.
"""

import logging
import os
import tomllib
from argparse import ArgumentTypeError
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path
from typing import Any

from backhaul_runtime.errors import SettingError
from backhaul_runtime.process.credentials import read_token, shown_token
from backhaul_runtime.process.files import state_of
from backhaul_runtime.process.units import parse_size
from backhaul_server.worker.accounts import Account, Quotas

logger = logging.getLogger("backhaul.worker")

_QUOTAS = {"memory": "memory_bytes", "inflight": "inflight_bytes", "requests": "requests", "sessions": "sessions"}
_KEYS = ("token_files", *_QUOTAS, "dashboard")
_EXAMPLE = """[alice]
token_files = ["alice.token"]
memory = "8GiB\""""


@dataclass(frozen=True, slots=True)
class Credential:
    """What the files say about one credential.

    Attributes:
        name: The name, for logs and messages.
        token_files: The files with its tokens.
        quotas: What it may use.
        sees_all: Whether it may read telemetry about the sessions of others.
    """

    name: str
    token_files: tuple[Path, ...]
    quotas: Quotas = field(default_factory=Quotas)
    sees_all: bool = False


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request.

    Attributes:
        account: The account of the credential.
        token: The digest of the token that the request shows.
    """

    account: Account
    token: bytes


class Credentials:
    """The credentials that a worker accepts at present. Event loop only, after construction.

    Args:
        file: A TOML file with a table for each credential, or a file with one token.
        is_single: Whether the file holds one token.

    Raises:
        SettingError: A file cannot be read, or has a mistake. The message never has a token.
    """

    def __init__(self, file: str | os.PathLike[str], *, is_single: bool = False) -> None:
        self._file, self._is_single = Path(file), is_single
        self._accounts: dict[str, Account] = {}
        self._callers: dict[bytes, Caller] = {}
        self._files: tuple[Path, ...] = (self._file,)
        self._seen: tuple[object, ...] = ()
        self._revoked: dict[bytes, str] = {}
        self._use(self._read())

    def caller(self, authorizations: Iterable[str]) -> Caller | None:
        """Returns who shows a token in the only authorization header of a request; None if it is no valid one."""
        token = shown_token(authorizations)
        return self._callers.get(_digest(token)) if token is not None else None

    def why_denied(self, authorizations: Iterable[str]) -> str:
        """Returns why `caller` knows nobody, for logs."""
        token = shown_token(authorizations)
        if token is None:
            return "no token"
        name = self._revoked.get(_digest(token))
        return "an unknown token" if name is None else f'a revoked token of "{name}"' if name else "a revoked token"

    def refresh(self) -> bool:
        """Reads the files if they have changed. Returns whether other tokens are valid now."""
        if self._state == self._seen:
            return False
        before, self._seen = set(self._callers), self._state
        try:
            self._use(self._read())
        except SettingError as error:
            logger.error("The credentials were changed, but what was read before stays valid: %s", error.message)
            return False
        return before != set(self._callers)

    def accepts(self, token: bytes) -> bool:
        """Whether the token with this digest is valid."""
        return token in self._callers

    @property
    def names(self) -> list[str]:
        """The names of all credentials, sorted."""
        return sorted({caller.account.name for caller in self._callers.values()})

    @property
    def _state(self) -> tuple[object, ...]:
        return tuple(map(state_of, self._files))

    def _read(self) -> list[tuple[Credential, list[bytes]]]:
        """Returns all credentials with the digests of their tokens."""
        self._files = (self._file,)
        self._seen = self._state
        whole = Credential("", (self._file,), sees_all=True)
        credentials = [whole] if self._is_single else read_credentials(self._file)
        self._files = (self._file, *(path for credential in credentials for path in credential.token_files))
        self._seen = self._state  # taken before the tokens are read, so that no later change is missed
        owners: dict[bytes, str] = {}
        tokens = []
        for credential in credentials:
            digests = [_digest(read_token(path)) for path in credential.token_files]
            for digest in digests:
                if owners.setdefault(digest, credential.name) != credential.name:
                    names = f'"{owners[digest]}" and "{credential.name}"'
                    raise SettingError(f'"{self._file}" gives {names} the same token: each needs one of its own')
            tokens.append((credential, digests))
        return tokens

    def _use(self, credentials: list[tuple[Credential, list[bytes]]]) -> None:
        callers: dict[bytes, Caller] = {}
        for credential, digests in credentials:
            account = self._accounts.setdefault(credential.name, Account(credential.name))
            account.quotas, account.sees_all = credential.quotas, credential.sees_all
            callers |= {digest: Caller(account, digest) for digest in digests}
        for digest, caller in self._callers.items():
            if digest not in callers:
                self._revoked[digest] = caller.account.name
        self._callers = callers


def read_credentials(file: Path) -> list[Credential]:
    """Reads a file of credentials.

    Raises:
        SettingError: The file cannot be read, is no TOML, or has a mistake. The message says where and what is allowed.
    """
    try:
        tables = tomllib.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SettingError(f'the credentials "{file}" can\'t be read: {reason}. An example:\n{_EXAMPLE}') from None
    if not tables:
        raise SettingError(f'the credentials "{file}" name nobody. An example:\n{_EXAMPLE}')
    return [_credential(file, name, table) for name, table in tables.items()]


def _credential(file: Path, name: str, table: Any) -> Credential:
    def wrong(what: str) -> SettingError:
        return SettingError(f'the credential "{name}" in "{file}" {what}. An example:\n{_EXAMPLE}')

    if not isinstance(table, Mapping):
        raise wrong("is no table")
    for key in table:
        if key not in _KEYS:
            nearest = get_close_matches(key, _KEYS, n=1)
            hint = f", did you mean {nearest[0]}?" if nearest else f": allowed are {', '.join(_KEYS)}"
            raise wrong(f'has the unknown key "{key}"{hint}')
    paths = table.get("token_files")
    if not isinstance(paths, list) or not paths or not all(isinstance(path, str) and path for path in paths):
        raise wrong("needs token_files, a list of one or more files with a token each")
    quotas: dict[str, int] = {}
    for key, attribute in _QUOTAS.items():
        if key in table:
            try:
                quotas[attribute] = _quota(key, table[key])
            except ArgumentTypeError as error:
                raise wrong(f"has a wrong {key}: {error}") from None
    sees_all = table.get("dashboard", False)
    if not isinstance(sees_all, bool):
        raise wrong("has a wrong dashboard: it is true or false")
    return Credential(name, tuple(file.parent / path for path in paths), Quotas(**quotas), sees_all)


def _quota(key: str, value: object) -> int:
    """Returns the value of a quota. Raises ArgumentTypeError."""
    if key in {"memory", "inflight"}:
        if not isinstance(value, str):
            raise ArgumentTypeError('write a size with its unit, as in "8GiB"')
        return parse_size(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentTypeError("write a whole number above 0")
    return value


def _digest(token: str) -> bytes:
    """Returns the digest to look up a token by, so that the duration does not reveal how much of it is right."""
    return sha256(token.encode()).digest()

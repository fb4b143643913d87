"""Tokens: reading them from files, sending and comparing them. Does not import torch.

A token is a secret that a worker or a dashboard requires. Everywhere it is named by its file: it never occurs in
arguments of commands, logs, reprs, messages or metrics.
"""

import errno
import hmac
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from backhaul_runtime.errors import SettingError

logger = logging.getLogger("backhaul")

SHORTEST, LONGEST = 16, 1024
"""The most characters of a token. Longer ones would not fit beside other metadata."""

AUTHORIZATION = "authorization"
_TOKEN = re.compile(r"[!-~]+")
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def read_token(file: str | os.PathLike[str]) -> str:
    """Returns the token in a file, without the newline at its end.

    Raises:
        SettingError: The file cannot be read or holds no token. The message has its path, never its contents.
    """
    path = Path(file)
    try:
        with path.open("rb") as opened:
            content = opened.read(LONGEST + 3)  # a newline, and one more to detect a token that is too long
            _warn_of_readers(path, opened.fileno())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        file = path / "token" if path.is_dir() else path
        raise SettingError(
            f'the token file "{path}" can\'t be read: {reason}. `backhaul token {file}` makes one'
        ) from None
    token = content.decode("latin-1").removesuffix("\n").removesuffix("\r")
    if not token:
        wrong = "is empty"
    elif not _TOKEN.fullmatch(token):
        wrong = "holds more than one word of printable ASCII characters"
    elif len(token) < SHORTEST:
        wrong = f"holds fewer than {SHORTEST} characters"
    elif len(token) > LONGEST:
        wrong = f"holds more than {LONGEST} characters"
    else:
        return token
    raise SettingError(f'the token file "{path}" {wrong}: remove it, and `backhaul token {path}` makes another')


def one_for_each(files: Sequence[str], workers: int) -> list[str]:
    """Returns the token file of each address, from one file for all or one for each; empty names if there are none.

    Raises:
        SettingError: There are several files, but not as many as workers.
    """
    if len(files) not in {0, 1, workers}:
        raise SettingError(
            f"{len(files)} token files are given for {workers} addresses of workers: name one for all, or one for each "
            "in their order"
        )
    if not files:
        return [""] * workers
    return list(files) if len(files) == workers else list(files) * workers


def make_token(path: Path) -> bool:
    """Writes a random token to a new file that only its owner can read. Returns False if the file exists already.

    If several processes do this at once, one creates the file, and none sees a partial file.

    Raises:
        OSError: The file cannot be created.
    """
    if path.is_dir():  # "." and "/" have no name for a temporary file
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as opened:
            opened.write(secrets.token_urlsafe(32) + "\n")
        os.link(draft, path)  # unlike a rename, a link replaces nothing
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    return True


def bearer(token: str | None) -> tuple[tuple[str, str], ...]:
    """Returns the metadata with the token; empty without a token."""
    return ((AUTHORIZATION, f"Bearer {token}"),) if token else ()


def shown_token(authorizations: Iterable[str]) -> str | None:
    """Returns the token in the only authorization header of a request; None if there is none."""
    match list(authorizations):
        case [shown]:
            scheme, _, token = shown.partition(" ")
            return token if scheme.lower() == "bearer" else None
    return None


def shows(authorizations: Iterable[str], token: str) -> bool:
    """Whether a request shows the token in its only authorization header. Takes equally long for any wrong one."""
    shown = shown_token(authorizations)
    return shown is not None and is_token(shown, token)


def is_token(shown: str, token: str) -> bool:
    """Whether this is the right token. The duration reveals only the length."""
    return hmac.compare_digest(shown.encode(), token.encode())


def _warn_of_readers(path: Path, descriptor: int) -> None:
    """Warns if other users can read a token file, provided that its owner could change that.

    Secrets that a container engine mounts belong to another user or are on a read-only mount.
    """
    status = os.fstat(descriptor)
    is_fixed = status.st_uid != os.geteuid() or os.fstatvfs(descriptor).f_flag & os.ST_RDONLY
    if stat.S_ISREG(status.st_mode) and status.st_mode & _OTHERS and not is_fixed:
        logger.warning("others than its owner can read the token file %s: chmod 600 %s", path, path)

"""Where Inductor's files lie that a worker has compiled for trainers: a directory for each credential.

NOTE [Compiled files]
1. The directories lie in one of the worker's own. The worker and its compiling child hold a lock on it for as long as
   they live, however they end.
2. A worker that makes its directory removes those of this user that nobody has locked: their workers were killed.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "backhaul-compiled-"


class CompilationDirectories:
    """The directories of a worker. They are made when the first one is asked for, which may take a moment.

    Attributes:
        lock: The descriptor that holds the lock, which a child process has to inherit; -1 if there is no directory.
    """

    def __init__(self) -> None:
        self._directory: Path | None = None
        self.lock = -1

    def of(self, account: str) -> str:
        """Returns the directory of a credential, which only this user can read."""
        if self._directory is None:
            _remove_leftovers()
            self._directory, self.lock = _made()
        one = self._directory / hashlib.sha256(account.encode()).hexdigest()[:16]
        one.mkdir(mode=0o700, exist_ok=True)
        return str(one)

    def close(self) -> None:
        """Removes all files."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            os.close(self.lock)
            self._directory, self.lock = None, -1


def _made() -> tuple[Path, int]:
    """Makes a directory. Returns it with the descriptor of its lock."""
    while True:
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
        with suppress(FileNotFoundError):  # another worker may find it before it is locked, and remove it
            descriptor = _opened(directory)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if directory.exists():
                return directory, descriptor
            os.close(descriptor)


def _remove_leftovers() -> None:
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another worker removes it too, or it is no directory
            descriptor = _opened(directory)
            try:
                if os.fstat(descriptor).st_uid == os.getuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(descriptor)


def _opened(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

"""Files that are read again when they change. Does not import torch."""

from pathlib import Path


def state_of(path: Path) -> object:
    """Returns a value that changes when a file is written, replaced or removed; None while it cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size

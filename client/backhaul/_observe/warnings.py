"""Warnings that a training program can filter."""

import contextlib
import sys
import warnings
from pathlib import Path

_SKIPPED = (str(Path(__file__).parents[1]), contextlib.__file__)


class NotRemoteWarning(UserWarning):
    """Segments run on the trainer although a session is open. The message names the cause."""


def warn_not_remote(message: str) -> None:
    """Issues a warning at the line that called Backhaul, so that Python shows it once for each such line."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_code.co_filename.startswith(_SKIPPED) and frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, NotRemoteWarning, stacklevel=depth + 1)

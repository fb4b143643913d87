"""Whether checkpoints are parts of a larger call that torch.compile captures now, see `Graphs.unseen`."""

import threading

import torch


class Inlining(threading.local):
    """What a thread captures.

    Attributes:
        active: Whether the call that it captures takes the checkpoints inside as plain calls.
    """

    active = False


inlining = Inlining()


def is_inlined() -> bool:
    """Whether a checkpoint that is called now has to be a plain call. torch.compile follows this function."""
    return inlining.active and torch.compiler.is_compiling()

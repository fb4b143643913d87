"""The op of a call that runs at present, as its parts see it before, during and after its run."""

from torch import Tensor


class RunningOp:
    """The op or custom autograd function of a call that runs at present.

    Attributes:
        name: The name of the op or function, as programs have it; empty if none runs.
        tensors: The tensors among its arguments, including those inside of objects.
        reads: The digest of what the op reads, if autograd saves undefined bytes in it; None for any other.
    """

    def __init__(self) -> None:
        self.name = ""
        self.tensors: list[Tensor] = []
        self.reads: bytes | None = None

    def begin(self, name: str) -> None:
        """Notes which op or function is about to run."""
        self.name, self.reads = name, None
        self.tensors.clear()

    def end(self) -> None:
        """Notes that the op or function has ended, also by an exception."""
        self.name, self.reads = "", None
        self.tensors.clear()

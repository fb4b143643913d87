"""The op of a call that runs at present, as its parts see it before, while and after it runs."""

from collections.abc import Callable

from torch import Tensor


class RunningOp:
    """The op or custom autograd function of a call that runs at present.

    Attributes:
        name: The name of the op or function, as programs have it; empty if none runs.
        tensors: The tensors among its arguments, including those inside of objects.
        reads: The digest of what the op reads, for an op of UNDEFINED_SAVES; None for any other.
        is_undefined: Says which of the tensors that autograd saves have undefined bytes; None if none has.
    """

    def __init__(self) -> None:
        self.name = ""
        self.tensors: list[Tensor] = []
        self.reads: bytes | None = None
        self.is_undefined: Callable[[Tensor], bool] | None = None

    def begin(self, name: str) -> None:
        """Notes which op or function is about to run."""
        self.name, self.reads, self.is_undefined = name, None, None
        self.tensors.clear()

    def end(self) -> None:
        """Notes that the op or function has ended, also by an exception."""
        self.name, self.reads, self.is_undefined = "", None, None
        self.tensors.clear()

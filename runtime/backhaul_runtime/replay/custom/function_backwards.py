"""What a replay can't repeat of the backward of custom functions, noticed around one backward of the whole program.

On the trainer a function may do anything, as without checkpointing. What only the trainer can do is noted there, and
keeps the function on it from the next forward on. On a worker it raises ReplayError.
"""

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor
from torch.autograd.graph import Node

from backhaul_runtime.errors import BackhaulError, ReplayError
from backhaul_runtime.program.custom.names import names
from backhaul_runtime.replay.custom.backward_watch import CHANGES, WRITES, BackwardWatch
from backhaul_runtime.replay.custom.context_state import context_digest, is_changed
from backhaul_runtime.replay.custom.outside_writes import OutsideWrites
from backhaul_runtime.torch_internals.graph_entries import added_to_gradient


class FunctionBackwards:
    """The custom functions of a replay during one backward. Construct it before the backward, call `end` afterwards.

    Args:
        functions: The names of the program's custom functions.
        nodes: The nodes that they have made, each with the name of its function.
        sources: The sources of the program.
        outputs: Its outputs by number, see `Contribution.source`.
        reach: By the name of each function, the keys of the storages in which it has got, returned or kept tensors.
        lent: Keys of the storages of sources, which backward may read.
        is_own: Whether this process recorded the program.
    """

    def __init__(
        self,
        functions: Collection[str],
        nodes: Sequence[tuple[str, Node]],
        sources: Sequence[Tensor],
        outputs: Mapping[int, Tensor],
        reach: Mapping[str, Collection[int]],
        lent: Collection[int],
        *,
        is_own: bool,
    ) -> None:
        self._functions, self._nodes, self._sources, self._is_own = functions, nodes, sources, is_own
        # A worker compares the context around each backward of a function, see `BackwardWatch`.
        self._contexts = [context_digest(node) for _, node in nodes] if is_own else []
        self._writes = OutsideWrites({**dict(enumerate(sources)), **outputs}, reach)
        self._watch = None
        if functions and not is_own:
            own = set[int]().union(*reach.values()).difference(lent)
            self._watch = BackwardWatch(nodes, {tensor.device for tensor in outputs.values()}, own, lent)

    def end(self) -> dict[int, list[str]]:
        """Ends the watch. May wait for an accelerator.

        Returns:
            On the trainer: the functions that may have written to a source or output, by its number.

        Raises:
            ReplayError: The backward has done what must be done on the trainer, or to the trainer's own tensors.
        """
        if self._watch is not None:
            self._watch.end()
        written = self._writes.changed()
        for name in sorted({name for writers in written.values() for name in writers}):
            if not self._is_own:
                raise ReplayError(f"the backward of {name} {WRITES}", function=name)
            names.deny(name, f"the backward of {name} {WRITES}")
        for (name, node), before in zip(self._nodes[: len(self._contexts)], self._contexts, strict=True):
            if is_changed(before, context_digest(node)):  # a second backward over the same graph would see that
                names.deny(name, f"the backward of {name} {CHANGES}")
        # The addition went to a copy of the parameter, and the caller's own would miss it.
        if self._functions and any(tensor.is_leaf and tensor.grad is not None for tensor in self._sources):
            raise added_to_gradient()
        return written

    def failed(self, error: BackhaulError) -> None:
        """Keeps the functions on the trainer after an error that one of them has added to gradients."""
        if error.fields.get("adds_to_gradients") and self._is_own:
            for name in self._functions:
                names.deny(name, error.message)

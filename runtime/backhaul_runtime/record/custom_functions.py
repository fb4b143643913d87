"""Which custom autograd functions of a running call are nodes of its program, and why others are not."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef

from backhaul_runtime.errors import Refusal
from backhaul_runtime.program.names import JoinedNames
from backhaul_runtime.record.context_tensors import ContextTensors
from backhaul_runtime.torch_internals.graph_uses import is_custom, name_of
from backhaul_runtime.torch_internals.private import backward_class
from backhaul_runtime.torch_internals.storages import storage_key


class CustomFunctions:
    """The custom autograd functions that a call has run.

    Args:
        allows: The names of the functions that workers run.

    Attributes:
        node_classes: The classes of the autograd nodes that recorded functions have made.
        contexts: The tensors that contexts of recorded functions refer to.
        refused: Why the function that runs is not recorded as a node; empty if no such function runs.
    """

    def __init__(self, allows: JoinedNames) -> None:
        self.node_classes: set[type] = set()
        self.contexts = ContextTensors()
        self.refused = ""
        self._saved: list[StorageWeakRef] = []  # of what recorded functions have saved, if it was made inside
        self._allows = allows
        self._why_not: dict[type, str] = {}
        self._refused_nodes: dict[type, str] = {}  # why functions are not recorded, by the class of their nodes

    def reason_against(self, function: type) -> str:
        """Returns why no worker runs a function; empty if workers do."""
        if function not in self._why_not:
            self._why_not[function] = self._allows.why_not_function(function)
        return self._why_not[function]

    def run_refused(self, function: Any, run: Callable[[], Any], reason: str) -> Any:
        """Runs a function that is not recorded as a node, for this reason. Returns what `run` returns."""
        outer, self.refused = self.refused, reason
        try:
            return run()
        finally:
            self.refused = outer
            self._refused_nodes[backward_class(function)] = reason

    def note_saved(self, tensor: Tensor) -> None:
        """Notes a tensor that was made inside and that a recorded function saves."""
        self._saved.append(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]

    def saves_outlive(self, outputs: Sequence[Tensor]) -> bool:
        """Whether anything besides outputs and contexts still has memory that a function has saved.

        It would see what a backward writes there.
        """
        known = {*map(storage_key, outputs), *self.contexts.storages()}
        return any(not storage.expired() and storage.cdata not in known for storage in self._saved)  # type: ignore[no-untyped-call]

    def check_node(self, node: Node) -> None:
        """Raises Refusal if a node in the graph of the call belongs to a function that was not recorded."""
        if is_custom(node) and type(node) not in self.node_classes:
            what = f"the custom autograd function {name_of(node).removesuffix('Backward')}"
            raise Refusal(self._refused_nodes.get(type(node), what))

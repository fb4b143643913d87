"""Adds nodes whose insides torch does not describe to the value check: custom functions, ops of other libraries."""

from collections.abc import Sequence

from torch import Tensor

from backhaul_runtime.errors import Refusal
from backhaul_runtime.program.class_names import plain_name
from backhaul_runtime.program.code_identity import identity_of_class
from backhaul_runtime.program.names import names
from backhaul_runtime.record.call_choices import CallChoices
from backhaul_runtime.record.contents import Contents
from backhaul_runtime.record.custom_functions import CustomFunctions
from backhaul_runtime.record.function_watch import FunctionWatch
from backhaul_runtime.record.interior_memory import InteriorMemory
from backhaul_runtime.record.program_builder import ProgramBuilder
from backhaul_runtime.record.recording import Recording, SavedTensor
from backhaul_runtime.record.running_op import RunningOp
from backhaul_runtime.record.sources import SourceLedger
from backhaul_runtime.replay.opaque_check import CHECKED, OpaqueCheck
from backhaul_runtime.torch_internals.graph_uses import is_custom
from backhaul_runtime.torch_internals.private import is_plain
from backhaul_runtime.torch_internals.storages import storage_key


class OpaqueNodes:
    """Checks a node that is a custom autograd function, or an op that is not torch's, as a whole, see `OpaqueCheck`.

    Args:
        recording: Gets the digest of each such node among those of saved tensors.
        op: The op or function that runs.
        sources: The sources of the call.
        contents: Takes the digests of what the node reads, returns and keeps.
        interior: The memory that the ops have made.
        choices: The draws and decisions of the call, which can't be recorded with such a node.
        functions: Notes what the functions return and keep.
        builder: The nodes that were recorded so far.

    Attributes:
        watch: Watches the function that runs, or has watched the one before; None before the first one.
    """

    def __init__(
        self,
        recording: Recording,
        op: RunningOp,
        sources: SourceLedger,
        contents: Contents,
        interior: InteriorMemory,
        choices: CallChoices,
        functions: CustomFunctions,
        builder: ProgramBuilder,
    ) -> None:
        self.watch: FunctionWatch | None = None
        self._recording = recording
        self._op = op
        self._sources = sources
        self._contents = contents
        self._interior = interior
        self._choices = choices
        self._functions = functions
        self._builder = builder
        self._check: OpaqueCheck | None = None

    def begin(self) -> None:
        """Begins the check of the node that is about to run: of its arguments, which are recorded already."""
        self._choices.give_up(Refusal(f"what {self._op.name} draws or decides can't be recorded for other hardware"))
        self._check = OpaqueCheck(self._contents.digest)
        self._check.add(self._op.tensors)
        self._contents.forget()  # a kernel outside torch may write to an argument without a new version

    @property
    def is_checking(self) -> bool:
        """Whether the node that is being recorded is such a node."""
        return self._check is not None

    def end(self, name: str, results: Sequence[Tensor]) -> None:
        """Adds results and contexts to the check, and the check to the tensors that autograd saved.

        Args:
            name: The name of the op or function that has run.
            results: The tensors that it has returned.
        """
        check, self._check = self._check, None
        assert check is not None
        for result in results:
            if is_custom(result.grad_fn):
                self._functions.node_classes.add(type(result.grad_fn))
        check.add(results)
        check.add_contexts(results)
        for tensor in check.tensors:
            self._functions.contexts.add(tensor)
            if is_plain(type(tensor)):
                self.check_kept(name, tensor)
        self._builder.note_save()
        self._recording.saved.append(SavedTensor(check.digest(), f"{name} (all that it read and kept)", CHECKED, -1, 0))

    def drop(self) -> None:
        """Ends the check without a result, as the op or function is not recorded."""
        self._check = None

    def check_kept(self, name: str, tensor: Tensor) -> None:
        """Raises Refusal if a custom function keeps a tensor that is neither its own nor an argument of anything.

        Its backward may read it after others have changed it, or write to it.

        Args:
            name: The name of the op or function that keeps the tensor.
            tensor: A tensor that autograd saves, or that is on the context.
        """
        function = names.functions[name] if name in self._recording.identities else None
        if function is None or self.watch is None or self.watch.has_made(tensor) or tensor in self._interior:
            return
        key = storage_key(tensor)
        compared = identity_of_class(function).tensors
        if not self._sources.at(key) and key not in map(storage_key, compared):
            raise Refusal(
                f"the custom autograd function {plain_name(function)} keeps a tensor that is not among its arguments"
            )

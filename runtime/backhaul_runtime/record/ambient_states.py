"""The surroundings of the ops of a running call: grad and autocast state, flags, and saved-tensor hooks."""

from collections.abc import Callable

import torch
from torch import Tensor

from backhaul_runtime.errors import Refusal
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.torch_internals.private import top_saved_tensor_hooks


class AmbientStates:
    """The distinct ambient states that the nodes of a call run under, numbered in the order of first use.

    Args:
        pack: The only pack hook that ops may run under; None to check no hooks.

    Attributes:
        pack: The hook, until the call has ended.
        hookless: Why a custom function is not recorded that runs without the hook; empty if none does.
        present: The number of the state of the node that is being recorded, or was recorded last.
        uses_cuda: Whether the call has used a tensor on CUDA. Otherwise its states don't have CUDA's settings, so that
            a worker without CUDA can apply them.
    """

    def __init__(self, pack: Callable[[Tensor], object] | None) -> None:
        self.pack = pack
        self.hookless = ""
        self.present = 0
        self.uses_cuda = False
        self._state: ambient_state.State = ()  # that of `present`; the next op usually has the same
        self._numbers: dict[ambient_state.State, int] = {}
        self._cleared = self._cleared_before_op = ambient_state.cleared_casts()  # that of the last recorded node

    def capture(self) -> None:
        """Notes the state that a node is about to run under. Raises Refusal if no replay can have it."""
        hooks = top_saved_tensor_hooks(True)
        # A replay packs with our hooks, so backward would get what those hooks would have changed.
        if (
            self.hookless and torch.is_grad_enabled()
        ):  # what such an op saves is not noted, but its replay would save it
            raise Refusal(self.hookless)
        if not self.hookless and self.pack is not None and (hooks is None or hooks[0] is not self.pack):
            raise Refusal("the function uses saved-tensor hooks of its own")
        if torch.is_inference_mode_enabled():
            raise Refusal("inference mode is on inside the function")
        state = ambient_state.capture()
        if state != self._state:
            self._state, self.present = state, self._number(state)

    def with_grad(self, number: int) -> int:
        """Returns the number of a state with gradients enabled that is otherwise equal to the one of this number."""
        return self._number(ambient_state.with_grad(tuple(self._numbers)[number]))

    def _number(self, state: ambient_state.State) -> int:
        return self._numbers.setdefault(state, len(self._numbers))

    def has_fresh_casts(self) -> bool:
        """Whether autocast's cache was cleared since the last recorded node, which has used other casts."""
        self._cleared_before_op = ambient_state.cleared_casts()
        return self._cleared_before_op != self._cleared

    def node_added(self) -> None:
        """Notes that the node for which `has_fresh_casts` was called is recorded. That of an op which fails is not."""
        self._cleared = self._cleared_before_op

    @property
    def states(self) -> tuple[ambient_state.State, ...]:
        """All states by number."""
        return tuple(self._numbers if self.uses_cuda else map(ambient_state.without_cuda, self._numbers))

    @property
    def used_autocast(self) -> bool:
        """Whether an op ran under autocast."""
        return any(map(ambient_state.is_autocast, self._numbers))

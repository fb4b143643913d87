"""Whole micro-batches of a block, which workers compute from their inputs.

NOTE [Whole micro-batches]
1. The trainer runs no forward of them. The guards of torch.compile choose the program, and the trainer sends its
   inputs: token ids instead of boundaries. The program is one segment, whose backward is a chain of one (NOTE [Parts]).
   So sums, and what follows when a worker is lost, are those of every chain.
2. They are the first ones of a block, because sums are folded from the left: a worker adds up its own gradients, and
   the trainer adds its gradients to that sum when it has arrived. Until then it holds one set of gradients for each
   micro-batch of its own. Of several workers only the first one adds up: the others return each gradient.
3. The generator is moved as forward would have moved it. What a program cannot carry is a reason to run the function
   here: other results than one loss, side effects, writes to buffers, hooks, an input that has a graph.
4. The trainer has nothing to compare with a worker's forward. So it computes a random share of them itself, and
   compares all gradients with the digests that the worker has returned before it knew that they were drawn. How a
   worker adds them up is not compared.
"""

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from backhaul._accumulate.graph_parts import ChainSegment, Parts
from backhaul._accumulate.micro_batch import MicroBatch
from backhaul._accumulate.whole_shares import WholeShares
from backhaul._backward.local_recompute import outputs_here
from backhaul._backward.recheck import Rechecks
from backhaul._forward.awaited_tensor import Awaited
from backhaul._forward.checkpoint import name_of
from backhaul._forward.whole_call import WholeCall, WholeCalls
from backhaul._observe.journal import Journal, SegmentLog
from backhaul_runtime.errors import Refusal

NOT_CALLED = object()
"""Stands for the result of a function that was not called."""


class WholeMicroBatches:
    """The whole micro-batches of one block. Only the block's thread uses it.

    Args:
        calls: Gives calls to workers.
        shares: How many of the first micro-batches workers get.
        rechecks: Draws those that the trainer computes as well; None to compute none of them.
        journal: Counts micro-batches by the name of their function.
        has_workers: Whether a worker is up.
        keep_rest: Called when the trainer begins to compute micro-batches itself: workers get no segments of these.

    Attributes:
        rechecks: As in the arguments: draws those that are computed twice.
        here_s: Seconds of each micro-batch that ran here after those of workers.
        micro_batches: The number of micro-batches that ran here.
    """

    def __init__(
        self,
        calls: WholeCalls,
        shares: WholeShares,
        rechecks: Rechecks | None,
        journal: Journal,
        keep_rest: Callable[[], None],
        *,
        has_workers: bool,
    ) -> None:
        self._calls, self._shares, self.rechecks, self._journal = calls, shares, rechecks, journal
        self._keep_rest = keep_rest
        self._first = self._left = shares.first() if has_workers else 0
        self._submitted: dict[int, MicroBatch] = {}  # by the id of its frame
        self._log = SegmentLog("")  # of the last function
        self._awaited = Awaited(self._loss_read)
        self._began_s = 0.0
        self.here_s: list[float] = []
        self.micro_batches = 0

    @property
    def is_next(self) -> bool:
        """Whether a worker should get the next micro-batch."""
        return self._left > 0

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, WholeCall | None]:
        """Calls a function, or gives the call to a worker. Returns what it returned, and the call if a worker has it.

        What it returned is `NOT_CALLED` if it was not called.
        """
        self._log = self._journal.log(name_of(function))
        of_workers = self._first - self._left, self._first
        self._left -= 1
        try:
            returned, call = self._calls.call(function, args, kwargs, of_workers, self._loss_of, self._awaited)
        except Refusal as refusal:
            self._log.not_whole(refusal.reason)
            self._left = 0
            return NOT_CALLED, None
        if call is None:
            self._shares.learning()
        return returned, call

    def submitted(self, call: WholeCall, micro_batch: MicroBatch) -> None:
        """Notes a micro-batch that a worker has."""
        self._began_s = self._began_s or perf_counter()
        self._log.whole()
        self._submitted[id(call.frame)] = micro_batch

    def call_here(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function whose micro-batch the trainer computes itself, as it does all that follow."""
        self._left = 0
        if self._submitted:
            self._keep_rest()
        return self._calls.here(function, args, kwargs)

    def ran_here(self, took_s: float) -> None:
        """Notes what a micro-batch took that ran here."""
        self.micro_batches += 1
        if not self._left:
            self.here_s.append(took_s)

    def end(self) -> None:
        """Gives all losses their values, and lets the next block's share follow from what this one took."""
        ends_s = [one.ended_s for one in self._submitted.values() if one.ended_s]
        remote_s = (max(ends_s) - self._began_s) / len(ends_s) if ends_s else 0.0
        self._shares.measured(len(self._submitted), self.micro_batches, remote_s, self.here_s)
        self._awaited.end()
        self._submitted.clear()
        self.here_s, self.micro_batches, self._began_s = [], 0, 0.0

    def _loss_read(self) -> None:
        self._log.loss_read()

    def _loss_of(self, call: WholeCall) -> Tensor:
        """Returns the loss of a micro-batch, after a wait for its worker; without one the trainer computes it."""
        micro_batch = self._submitted[id(call.frame)]
        if micro_batch.ended is not None:
            micro_batch.ended.wait()
        if micro_batch.outputs:
            return micro_batch.outputs[0]
        frame = call.frame
        assert frame.program is not None
        assert frame.lineage is not None
        return outputs_here(frame.call.name, frame.program, frame.call.recording, frame.lineage.values(), [0])[0]


def whole_parts(call: WholeCall) -> tuple[Parts, Tensor]:
    """Returns the graph that a whole micro-batch would have, and the gradient of its loss."""
    frame, layout = call.frame, call.frame.uses.layouts[-1]
    device = frame.call.device
    gradient = torch.ones(layout.shape, dtype=layout.dtype, device=device)
    with torch.enable_grad():
        target = get_gradient_edge(torch.empty(0, requires_grad=True))[:2]  # of no tensor but itself
        targets = {source: get_gradient_edge(leaf)[:2] for source, leaf in call.leaves.items()}
    due = enumerate(frame.sources_of_contributions())
    segment = ChainSegment(frame, target, [(index, targets[source]) for index, source in due], lambda: None)
    leaves = {targets[source]: leaf for source, leaf in call.leaves.items()}
    parts = Parts((segment,), "", (), (), (), (), (), leaves, [frame], False)
    return parts, gradient


def loss_in(returned: Any) -> Tensor | None:
    """Returns the loss in what a function has returned; None if there is none."""
    if isinstance(returned, Mapping):
        returned = returned.get("loss")
    elif isinstance(returned, (tuple, list)) and not hasattr(returned, "loss"):
        returned = returned[0] if returned else None
    loss = returned if isinstance(returned, Tensor) else getattr(returned, "loss", None)
    return loss if isinstance(loss, Tensor) else None

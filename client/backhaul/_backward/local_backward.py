"""The backward of a segment on the trainer: in the place of a worker's, or beside it to recheck the worker's answer."""

from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from backhaul._backward import local_recompute
from backhaul._backward.checkpointed_call import CheckpointedCall
from backhaul._backward.lineage import Lineage
from backhaul._backward.local_recompute import outputs_here
from backhaul._backward.recheck import Rechecks, Rounding, differing, norm_of
from backhaul._backward.remote_side import RemoteSegment
from backhaul._backward.value_check import CheckpointError, Recomputed, check_recomputed, check_uses
from backhaul_runtime.errors import BackhaulError, RecheckError, WorkerLostError
from backhaul_runtime.program.program import Program
from backhaul_runtime.replay.replay import Contribution
from backhaul_runtime.tensors.digest import digest_of_tensor
from backhaul_runtime.tensors.random_projection import projections as projections_of
from backhaul_runtime.torch_internals.graph_entries import with_history_of


@dataclass(frozen=True, slots=True, eq=False)
class LocalBackward:
    """What the trainer needs to run the backward of a segment.

    Attributes:
        call: The call that the segment was recorded from.
        program: The program that recomputes the segment.
        lineage: Provides the values of the program's sources.
        use_counts: The number of contributions to each source, then to each cast, then to each output.
        options: Options of the call for its recomputation.
    """

    call: CheckpointedCall
    program: Program
    lineage: Lineage
    use_counts: Sequence[int]
    options: local_recompute.ReplayOptions

    def gradients(
        self, values: Sequence[Tensor], gradients: Mapping[int, Tensor], ways: Mapping[int, Tensor] | None = None
    ) -> list[Contribution]:
        """Runs the segment's backward. Returns one contribution for each use of a source, cast or output.

        Args:
            values: The values of the sources.
            gradients: The gradients of the program's outputs, by the output's position.
            ways: For a backward that is differentiated itself, see `gradients_here`.
        """
        contributions = self._contributions(values, gradients, ways)
        if ways is not None and self._counts_of(contributions) != [*self.use_counts]:
            contributions = self._at_uses_of_forward(values, gradients, contributions)
        check_uses(self.call.name, "on the trainer", self.use_counts, contributions)
        return contributions

    def _contributions(
        self, values: Sequence[Tensor], gradients: Mapping[int, Tensor], ways: Mapping[int, Tensor] | None
    ) -> list[Contribution]:
        return local_recompute.gradients_here(
            self.call.name, self.program, self.call.recording, values, gradients, self.options, ways=ways
        )

    def _counts_of(self, contributions: Sequence[Contribution]) -> list[int]:
        counts = [0] * len(self.use_counts)
        for contribution in contributions:
            counts[contribution.source] += 1
        return counts

    def _at_uses_of_forward(
        self, values: Sequence[Tensor], gradients: Mapping[int, Tensor], contributions: Sequence[Contribution]
    ) -> list[Contribution]:
        """Returns contributions that can be differentiated, one for each use in forward.

        Sources that have the history of others are no leaves, so autocast casts them at each use and not once. The bits
        then come from a backward in which they are leaves. The first contribution to a source has the history of all.
        """
        exact = self._contributions(values, gradients, None)
        counts, histories = self._counts_of(contributions), dict[int, Tensor]()
        for source, gradient in ((one.source, one.gradient) for one in contributions):
            if gradient is not None and counts[source] != self.use_counts[source]:
                histories[source] = histories[source] + gradient if source in histories else gradient
        left = iter([one for one in contributions if counts[one.source] == self.use_counts[one.source]])
        joined = []
        for source, gradient in ((one.source, one.gradient) for one in exact):
            if counts[source] == self.use_counts[source]:
                joined.append(next(left))
            elif gradient is not None and source in histories:
                joined.append(Contribution(source, with_history_of(gradient, histories.pop(source))))
            else:
                joined.append(Contribution(source, gradient))
        return joined

    def repeats(
        self,
        remote: RemoteSegment,
        gradients: Mapping[int, Tensor],
        contributions: Sequence[Contribution],
        summed: Set[int],
    ) -> bool:
        """Whether the trainer gets the same gradients as the worker. False also if it can't compute them.

        Args:
            remote: The worker's side that has returned them.
            gradients: The gradients of the program's outputs, by the output's position.
            contributions: What the worker has returned for them.
            summed: The sources whose contributions the worker has added up.

        Raises:
            RecheckError: The trainer cannot repeat its own computation.
            WorkerLostError: The worker's gradients are wrong, and it is out of the session. See NOTE [Recheck].
        """
        if self.program.functions:  # their backward is the user's code, and would run on the trainer too
            self.call.log.not_rechecked("it runs custom functions")
            return False
        try:
            values = self.lineage.values()
            ours = self.gradients(values, gradients)
        except Exception as error:  # a trainer without free memory, for example, needs the worker all the more
            message = error.message if isinstance(error, BackhaulError) else f"{type(error).__name__}: {error}"
            self.call.log.not_rechecked(message.partition("\n")[0])
            return False
        # Without this setting the backward of some kernels adds in no fixed order on a GPU, such as fused attention.
        is_exact = remote.is_exact and (
            not self.call.recording.accelerators or torch.are_deterministic_algorithms_enabled()
        )
        difference = differing(ours, contributions, summed, is_exact=is_exact)
        if difference is not None:
            again = self.gradients(values, gradients)
            if not is_exact or differing(ours, again, (), is_exact=True) is not None:  # kernels that add in no order
                rounding = self._rounding(values, gradients, ours)
                if differing(ours, again, (), is_exact=False, rounding=rounding) is not None:
                    raise RecheckError(
                        f"segment {self.call.name}: the trainer has computed its gradients twice, and they differ by "
                        "more than rounding does. Look for a damaged device: what this machine computes can't be "
                        "trusted",
                        segment=self.call.name,
                    )
                difference = differing(ours, contributions, summed, is_exact=False, rounding=rounding)
        if difference is not None:
            source, distance = difference
            raise _expelled(
                remote,
                f"the worker {remote.worker} has returned wrong gradients for segment {self.call.name}: that of source "
                f"{source} is {distance:.1e} of its norm away from what the trainer has computed twice",
            )
        self.call.log.rechecked()
        return True

    def repeats_unseen(
        self,
        remote: RemoteSegment,
        rechecks: Rechecks,
        gradients: Mapping[int, Tensor],
        digests: Sequence[bytes],
        outputs: Sequence[Tensor],
    ) -> bool:
        """Whether the trainer gets what a worker has computed of a call that the trainer has not run.

        Its gradients are in sums on the worker. So their digests are compared, which it has returned before it knew
        that the call was drawn. False also if the trainer can't compute them, or not with the same bits each time.

        Args:
            remote: The worker's side that has returned them.
            rechecks: Learns of a worker that is out.
            gradients: The gradients of the program's outputs, by the output's position.
            digests: The digest of each contribution; empty for none.
            outputs: The values of the program's outputs.

        Raises:
            WorkerLostError: The worker's gradients are wrong, and it is out of the session. See NOTE [Recheck].
        """

        def run() -> list[bytes]:
            values = self.lineage.values()
            own = outputs_here(self.call.name, self.program, self.call.recording, values, range(len(outputs)))
            computed = [own[position] for position in range(len(outputs))]
            contributions = self.gradients(values, gradients)
            return [
                *(b"" if one.gradient is None else digest_of_tensor(one.gradient) for one in contributions),
                *map(digest_of_tensor, computed),
            ]

        try:
            ours = run()
        except Exception as error:  # a trainer without free memory, for example, needs the worker all the more
            message = error.message if isinstance(error, BackhaulError) else f"{type(error).__name__}: {error}"
            self.call.log.not_rechecked(message.partition("\n")[0])
            return False
        theirs = [*digests, *map(digest_of_tensor, outputs)]
        if ours != theirs:
            if ours != run():
                self.call.log.not_rechecked("the trainer's kernels do not repeat their own bits")
                return False
            different = sum(one != other for one, other in zip(ours, theirs, strict=False))
            why = (
                f"the worker {remote.worker} has returned wrong gradients for the micro-batch {self.call.name}: "
                f"{different} of {len(ours)} tensors differ from what the trainer has computed twice"
            )
            rechecks.expel(remote.worker, why)
            remote.expel(why)
            raise WorkerLostError(why, status="LOST")
        self.call.log.rechecked()
        return True

    def _rounding(
        self, values: Sequence[Tensor], gradients: Mapping[int, Tensor], ours: Sequence[Contribution]
    ) -> Rounding | None:
        """Returns how far rounding carries in the segment's backward; None if an op refuses other inputs."""
        known = [*gradients.values(), *(one.gradient for one in ours if one.gradient is not None)]
        with suppress(Exception):  # such as a probability that is above 1 now
            shaken = local_recompute.shaken_gradients_here(
                self.program, self.call.recording, values, gradients, self.options
            )
            return Rounding(shaken, max(map(norm_of, known), default=0.0))
        return None


def check_arrived(call: CheckpointedCall, remote: RemoteSegment, index: int, tensor: Tensor) -> None:
    """Compares a saved tensor that a worker has returned with that of forward (Rule 4 of NOTE [Recheck]).

    Args:
        call: The call of the segment.
        remote: The worker's side that has returned the tensor.
        index: The position of the tensor among those that autograd saved.
        tensor: The tensor as it has arrived.

    Raises:
        WorkerLostError: The tensor is another, whatever digest the worker has declared. The worker is out.
    """
    saved = call.recording.saved[index]
    if saved.is_undefined:
        return
    digest = digest_of_tensor(tensor)
    projections = () if remote.is_exact else [projections_of([tensor])]
    try:
        check_recomputed(call.name, [saved], Recomputed([digest], projections))
    except CheckpointError:
        raise _expelled(
            remote,
            f"the worker {remote.worker} has returned wrong activations for segment {call.name}: saved tensor {index} "
            "is not what the worker has declared",
        ) from None


def _expelled(remote: RemoteSegment, why: str) -> WorkerLostError:
    """Takes a worker out of the session. Returns the error for its segment."""
    if remote.rechecks is not None:
        remote.rechecks.expel(remote.worker, why)
    remote.expel(why)
    return WorkerLostError(why, status="LOST")

"""A segment on a worker, as its frame sees it."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import TypeVar

from torch import Tensor

from backhaul._calls import Stream, longest_run_s
from backhaul._link import Generation, Link
from backhaul._report import SegmentLog
from backhaul._upload import Save, Uploader
from backhaul_proto.v1 import segment_pb2
from backhaul_runtime import ambient
from backhaul_runtime.bundle import decode_view, unbundle
from backhaul_runtime.digest import content_digest, tensor_address
from backhaul_runtime.errors import TensorsMissingError, WorkerLostError
from backhaul_runtime.framing import Parcel
from backhaul_runtime.layout import layout_of
from backhaul_runtime.program_codec import encode_state
from backhaul_runtime.replay import Contribution

T = TypeVar("T")
_REPEATABLE = {"UNAVAILABLE", "CANCELLED", "UNKNOWN", "INTERNAL", ""}


class SavedSegment:
    """A segment that was handed to an uploader. Its end releases what the worker has of it.

    Args:
        link: To its worker.
        uploader: Of that link.
        save: As queued.
        log: Told of bytes.
        use_counts: Contributions expected for each source.
        expected_s: What a replay with its backward should take.
        upcoming: Gives the segments that will be asked for after this one.
    """

    def __init__(
        self,
        link: Link,
        uploader: Uploader,
        save: Save,
        log: SegmentLog,
        use_counts: Sequence[int],
        expected_s: float,
        upcoming: Callable[[], list[int]],
    ) -> None:
        self._link = link
        self._uploader = uploader
        self._save = save
        self._log = log
        self._use_counts = use_counts
        self._expected_s = expected_s
        self._upcoming = upcoming
        self._backwards = itertools.count(1)

    @property
    def generation(self) -> Generation:
        """Where it was saved."""
        return self._save.generation

    def __del__(self) -> None:
        self._save.is_released = True
        self._uploader.release(self._save.generation, self._save.segment)

    def backward(self, gradients: Mapping[int, Tensor], state: ambient.State) -> tuple[list[bytes], list[Contribution]]:
        """See `RemoteSegment`."""
        parcels = {}
        for position, gradient in gradients.items():
            layout = layout_of(gradient)
            parcels[position] = Parcel(gradient, layout, tensor_address(layout, content_digest(gradient, layout)))
        request = segment_pb2.BackwardRequest(
            key=self._key(segment_pb2.OPERATION_BACKWARD),
            gradients=[
                segment_pb2.OutputGradient(output=position, tensor=parcel.address)
                for position, parcel in parcels.items()
            ],
            upcoming_segments=self._upcoming(),
            expected_s=self._expected_s,
            ambient_state=encode_state(state),
        )

        def attempt() -> tuple[segment_pb2.BackwardResult, list[Tensor]]:
            self._uploader.put(self.generation, parcels.values(), self._sent)
            return self._stream(self._link.stubs(self.generation).segments.Backward, request)

        def ask() -> tuple[segment_pb2.BackwardResult, list[Tensor]]:
            try:
                return attempt()
            except TensorsMissingError:  # given up by the worker, in which the uploader still believes
                self._uploader.unlearn(parcel.address for parcel in parcels.values())
                return attempt()

        result, tensors = self._repeated(ask)
        views = {
            index: decode_view(contribution.view)
            for index, contribution in enumerate(result.contributions)
            if contribution.HasField("view")
        }
        found = unbundle(tensors, list(views.values()))
        contributions = [
            Contribution(contribution.source, found.get(index))
            for index, contribution in enumerate(result.contributions)
        ]
        self._check_uses(contributions)
        return list(result.saved_digests), contributions

    def recompute(self, positions: Sequence[int]) -> tuple[int, dict[int, Tensor]]:
        """See `RemoteSegment`."""
        request = segment_pb2.RecomputeRequest(
            key=self._key(segment_pb2.OPERATION_RECOMPUTE),
            positions=positions,
            upcoming_segments=self._upcoming(),
            expected_s=self._expected_s,
        )
        result, tensors = self._repeated(
            lambda: self._stream(self._link.stubs(self.generation).segments.Recompute, request)
        )
        found = unbundle(tensors, [decode_view(view) for view in result.views])
        if set(found) != set(positions):
            raise WorkerLostError(f"the worker sent tensors {sorted(found)} where {sorted(positions)} were asked for")
        return result.saved_count, found

    def _key(self, operation: "segment_pb2.Operation.ValueType") -> segment_pb2.OperationKey:
        return segment_pb2.OperationKey(
            session=self.generation.session,
            segment=self._save.segment,
            backward=next(self._backwards),
            operation=operation,
        )

    def _repeated(self, ask: Callable[[], T]) -> T:
        """Asks once more where only the connection broke: the key makes it the same request to the worker."""
        self._wait_until_saved()
        try:
            return ask()
        except WorkerLostError as error:
            self._link.trouble(self.generation, error)
            if error.status not in _REPEATABLE or not self._link.recovered(self.generation):
                raise
        try:
            return ask()
        except WorkerLostError as error:
            self._link.trouble(self.generation, error)
            raise

    def _wait_until_saved(self) -> None:
        deadline = monotonic() + longest_run_s(self._expected_s)

        def check() -> None:
            self._link.stubs(self.generation)
            if monotonic() > deadline:
                raise WorkerLostError("sending the segment takes longer than recomputing it here", status="BUSY")

        self._uploader.watch.wait(self._save.saved, check)

    def _stream(self, method: object, request: object) -> tuple[T, list[Tensor]]:
        stream: Stream[T] = Stream(method, request, self._link.pool, self._expected_s, self._link.silence_s)
        try:
            return stream.wait()
        finally:
            self._log.traffic(down_bytes=stream.received_bytes)
            self._uploader.learn(self.generation, stream.addresses)

    def _sent(self, size_bytes: int) -> None:
        self._log.traffic(up_bytes=size_bytes)

    def _check_uses(self, contributions: Sequence[Contribution]) -> None:
        found = [contribution.source for contribution in contributions]
        due = [source for source, count in enumerate(self._use_counts) for _ in range(count)]
        if found != due:
            raise WorkerLostError(f"the worker returned contributions to sources {found} where {due} were due")

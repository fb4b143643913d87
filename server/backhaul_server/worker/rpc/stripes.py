"""The striped transfers that are in progress on a worker, see NOTE [Stripes] in backhaul_runtime.wire.stripes."""

import asyncio
from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from backhaul_runtime.errors import BackhaulError, TransferError
from backhaul_runtime.wire.splicing import Batch, TensorMessage
from backhaul_runtime.wire.stripes import can_stripe, stripes
from backhaul_runtime.wire.tensor_batches import OutgoingTensor
from backhaul_server.worker.rpc.uploads import TensorUpload

JOIN_S = 10.0
"""Seconds that a lane waits for an upload which no message has declared yet. The lane may be the faster connection."""
KEPT_ENDED = 256
"""The number of ended uploads that are remembered, so that a lane which is too late for one of them does not wait."""

_Key: TypeAlias = tuple[str, int]
"""Names a transfer: the id of its session, and its number there."""


class JoinableUpload:
    """An upload whose pieces come over several connections. Event loop only.

    Args:
        upload: Receives the pieces of all connections, and stores the tensors at its end.
    """

    def __init__(self, upload: TensorUpload) -> None:
        self._upload = upload
        self._changed = asyncio.Event()
        self._has_ended = False
        self._error: BackhaulError | None = None

    async def add(self, carried: TensorMessage[Any]) -> None:
        """Adds the pieces of a message. Raises TransferError after the end, and raises as `TensorUpload.add` does."""
        if self._has_ended:
            raise TransferError("a lane has pieces of an upload that has ended")
        try:
            await self._upload.add(carried)
        finally:
            self._changed.set()

    def fail(self, error: BackhaulError) -> None:
        """Ends the wait of `completed` with an error."""
        self._error = self._error or error
        self._changed.set()

    def end(self) -> None:
        """Refuses all further pieces."""
        self._has_ended = True

    async def completed(self, silence_s: float) -> None:
        """Waits until all bytes of all tensors have come, and refuses further pieces from then on.

        Raises:
            TransferError: No message has come for `silence_s` seconds, or one of the messages was wrong.
            BackhaulError: A lane was refused.
        """
        while self._error is None and not self._upload.are_complete:
            self._changed.clear()
            try:
                async with asyncio.timeout(silence_s):
                    await self._changed.wait()
            except TimeoutError:
                raise TransferError(f"pieces of a striped upload were missing for {silence_s:g} s") from None
        if self._error is not None:
            raise self._error
        self.end()


class StripedTransfers:
    """The striped transfers of all sessions. Event loop only."""

    def __init__(self) -> None:
        self._uploads: dict[_Key, JoinableUpload] = {}
        self._ended: OrderedDict[_Key, None] = OrderedDict()
        self._answers: dict[_Key, Generator[Batch]] = {}
        self._declared: dict[_Key, asyncio.Event] = {}

    @contextmanager
    def uploading(self, session_id: str, number: int, upload: TensorUpload) -> Iterator[JoinableUpload]:
        """Lets lanes join an upload whose tensors have been declared. Raises TransferError for a number in use."""
        key = session_id, number
        if key in self._uploads:
            raise TransferError(f"two striped uploads have the number {number}")
        striped = self._uploads[key] = JoinableUpload(upload)
        if key in self._declared:
            self._declared.pop(key).set()
        try:
            yield striped
        finally:
            striped.end()
            del self._uploads[key]
            self._ended[key] = None
            if len(self._ended) > KEPT_ENDED:
                self._ended.popitem(last=False)

    async def upload(self, session_id: str, number: int) -> JoinableUpload:
        """Returns the upload that a lane names. Waits a moment for one that has not been declared yet.

        Raises TransferError if there is no such upload.
        """
        key = session_id, number
        if key not in self._uploads and key not in self._ended:
            declared = self._declared.setdefault(key, asyncio.Event())
            try:
                async with asyncio.timeout(JOIN_S):
                    await declared.wait()
            except TimeoutError:
                pass
            finally:
                if self._declared.get(key) is declared:
                    del self._declared[key]
        striped = self._uploads.get(key)
        if striped is None:
            raise TransferError(f"a lane has pieces of upload {number}, which has ended or was never declared")
        return striped

    @contextmanager
    def answering(
        self, session_id: str, number: int, outgoing_tensors: Sequence[OutgoingTensor]
    ) -> Iterator[tuple[Batch, Iterator[Batch]] | None]:
        """Offers the pieces of an answer to lanes until it ends.

        Yields the declarations and the pieces; None if the answer must not be striped.

        Raises TransferError for a number in use.
        """
        key = session_id, number
        if not number or not can_stripe(outgoing_tensors):
            yield None
            return
        if key in self._answers:
            raise TransferError(f"two striped answers have the number {number}")
        declaring, pieces = stripes(outgoing_tensors)
        self._answers[key] = pieces
        try:
            yield declaring, pieces
        finally:
            del self._answers[key]
            pieces.close()

    def answer(self, session_id: str, number: int) -> Iterator[Batch]:
        """Returns the pieces of an answer, of which a lane may take some. There are none if the answer has ended."""
        return self._answers.get((session_id, number), iter(()))

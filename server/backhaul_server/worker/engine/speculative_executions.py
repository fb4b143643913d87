"""The executor's part of speculative work, see NOTE [Speculation]: a replay, or a chain of backwards.

The event loop constructs a speculative execution and reads what it has made. In between the executor's thread calls
`work`.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from backhaul_runtime.tensors.durations import wait_s
from backhaul_server.worker.engine import executions
from backhaul_server.worker.engine.executions import LiveReplay
from backhaul_server.worker.engine.segment import Segment, SpeculativeBackward
from backhaul_server.worker.engine.speculation import predictions

logger = logging.getLogger("backhaul.worker")


class SpeculativeReplay:
    """A replay of a segment.

    Args:
        segment: The segment to replay. It may be released before the executor begins.
        charged_bytes: The bytes that the execution is charged with.
        must_yield: Returns whether the execution must end because a request waits (Rule 4).
        is_measured: Whether the replay measures its footprint.
    """

    def __init__(
        self, segment: Segment, charged_bytes: int, must_yield: Callable[[], bool], *, is_measured: bool
    ) -> None:
        self._segment = segment
        self._charged_bytes = charged_bytes
        self._must_yield = must_yield
        self._is_measured = is_measured
        self._made: LiveReplay | None = None

    def work(self) -> None:
        """Replays the segment, unless it was released. Executor's thread only."""
        segment, inputs = self._segment, self._segment.inputs
        segment.bounds.begin(self._charged_bytes, self._must_yield)
        try:
            if inputs is not None:
                ready = inputs.replay(keep_saved=not inputs.program.outputs, is_measured=self._is_measured)
                # Otherwise replays would queue up on an accelerator, and a request would run after all of them.
                wait_s(ready.took)
                self._made = ready
        except Exception:  # Rule 3
            logger.debug("A speculative replay failed.", exc_info=True, extra=segment.about)

    def take(self) -> LiveReplay | None:
        """Returns the replay, once; None if it failed."""
        made, self._made = self._made, None
        return made


class SpeculativeBackwards:
    """The predicted backward of a segment, and those that follow from it.

    Args:
        chain: The segment, and the predecessors that follow it. All have a replay.
        charged_bytes: The bytes that each of their executions is charged with.
        must_yield: Returns whether the execution must end because a request waits (Rule 4).

    Attributes:
        made: The backwards that have run, in the order of the chain.
    """

    def __init__(self, chain: Sequence[Segment], charged_bytes: Sequence[int], must_yield: Callable[[], bool]) -> None:
        self._chain = chain
        self._charged_bytes = charged_bytes
        self._must_yield = must_yield
        self.made: list[SpeculativeBackward] = []

    def work(self) -> None:
        """Runs the backwards until one fails. Executor's thread only."""
        speculation = self._chain[0].speculation
        try:
            for segment, charged_bytes in zip(self._chain, self._charged_bytes, strict=True):
                (ready, segment.ready), inputs = (segment.ready, None), segment.inputs
                # The event loop may have released the segment, or the backward before it returned no gradient.
                if inputs is None or ready is None or speculation is None:
                    segment.ready = ready
                    break
                segment.bounds.begin(charged_bytes, self._must_yield)
                backward, gradients = speculation.inputs, speculation.gradients
                result = executions.backward(inputs, ready, backward, gradients, segment.chained)
                self.made.append(replace(speculation, result=result))
                speculation = next((following for _, following in predictions(segment, result, backward)), None)
        except Exception:  # Rule 3
            failed = self._chain[len(self.made)]
            logger.debug("A speculative backward of %s failed.", failed.name, exc_info=True)

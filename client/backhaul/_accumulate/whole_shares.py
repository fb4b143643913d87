"""How many of a block's first micro-batches workers compute whole. Pure."""

from collections.abc import Sequence

LEARNING = 3
"""The calls of a kind that run on the trainer before its program is known, see NOTE [Graphs], Rule 5."""


RETRY_BLOCKS = 16
"""After so many blocks without the workers' help, their speed is measured again."""


def whole_share(micro_batches: int, remote_s: float, here_s: float) -> int:
    """Returns how many of a block's first micro-batches workers should compute, so that the block is short.

    Args:
        micro_batches: The number of micro-batches of the block.
        remote_s: Seconds that workers take for one, together.
        here_s: Seconds that the trainer takes for one.
    """
    return min(
        range(micro_batches + 1), key=lambda share: (max(share * remote_s, (micro_batches - share) * here_s), share)
    )


class WholeShares:
    """Chooses the workers' share of each block from what the blocks before took."""

    def __init__(self) -> None:
        self._micro_batches = 0  # of the last block
        self._remote_s = self._here_s = 0.0
        self._is_learning = False
        self._alone = 0  # blocks since workers got any

    def first(self) -> int:
        """Returns how many of the first micro-batches of the next block workers should get."""
        if not self._micro_batches or self._is_learning:
            return LEARNING
        # Until both have been measured, workers together are taken to be as fast as the trainer.
        here_s = self._here_s or self._remote_s or 1.0
        share = whole_share(self._micro_batches, self._remote_s or here_s, here_s)
        self._alone = 0 if share else self._alone + 1
        return 1 if self._alone >= RETRY_BLOCKS else share

    def learning(self) -> None:
        """Notes that a call ran here because its program was not known."""
        self._is_learning = True

    def measured(self, remote: int, here: int, remote_s: float, here_s: Sequence[float]) -> None:
        """Notes what a block took.

        Args:
            remote: The number of micro-batches that workers have computed.
            here: The number of the others.
            remote_s: Seconds that workers took for one; 0 if they computed none.
            here_s: Seconds of each micro-batch that the trainer computed beside them.
        """
        self._micro_batches = remote + here
        self._is_learning = self._is_learning and not remote
        self._alone = 0 if remote else self._alone
        self._remote_s = _mean(self._remote_s, remote_s)
        if remote and here_s:
            self._here_s = _mean(self._here_s, sum(here_s) / len(here_s))


def _mean(before_s: float, now_s: float) -> float:
    return (before_s + now_s) / 2 if before_s and now_s else now_s or before_s

"""A trainer process. It trains all variants in turns, as lines on its stdin say, and answers each with a line of JSON.

`python -m backhaul_lab.experiment.training.trainer` imports torch, reads its settings from the first line, answers when
it is ready, and ends when its stdin is closed.
"""

import json
import sys
from collections import Counter
from typing import IO, TYPE_CHECKING, Any

from backhaul_lab.experiment.plan.spec import BACKHAUL, NONE, VARIANTS
from backhaul_lab.harness.processes import answers_only

if TYPE_CHECKING:
    from backhaul._session import Session


class Trainer:
    """The variants of one trainer, and its session.

    Args:
        settings: What the runner wrote: `model`, `cell`, `seed`, and the arguments and the `Settings` of `connect`.
        output: Where answers are written.
    """

    def __init__(self, settings: dict[str, Any], output: IO[str]) -> None:
        import torch

        import backhaul
        from backhaul_lab.experiment.training.variants import ExperimentVariant

        torch.set_num_threads(1)
        self._output = output
        self.session: Session = backhaul.connect(
            **settings["connect"], settings=backhaul.Settings(**settings["settings"])
        )
        self._variants: dict[str, ExperimentVariant] = {}
        cell = settings["model"], settings["cell"], settings["seed"]
        for name in VARIANTS:
            self._variants[name] = ExperimentVariant(name, *cell, self.session if name == BACKHAUL else None)

    def answer(self, command: str, *arguments: Any) -> dict[str, Any]:
        """Executes a command of the runner.

        Args:
            command: "turn", "compare", "peak" or "report".
            *arguments: For a turn the variant, the number of steps, and the steps in whose middle the runner is asked
                to let something happen.
        """
        if command == "turn":
            return self._turn(*arguments)
        if command == "compare":
            from backhaul_lab.experiment.training.variants import unequal

            return {"unequal": unequal(list(self._variants.values()))}
        if command == "peak":
            return {name: variant.peak_bytes() for name, variant in self._variants.items()}
        reasons: Counter[str] = Counter()
        for segment in self.session.report().segments:
            reasons.update(segment.reasons)
        parameters = self._variants[NONE].parameters
        return {
            "run": self.session.run,
            "reasons": reasons,
            "parameter_bytes": sum(parameter.nbytes for parameter in parameters),
        }

    def _turn(self, name: str, steps: int, eventful: list[int]) -> dict[str, Any]:
        before = self.session.report()
        turn: dict[str, Any] = dict(self._variants[name].turn(steps, eventful, self._happens))
        after = self.session.report()
        for count in ("up_bytes", "down_bytes", "remote", "fallbacks"):
            turn[count] = getattr(after, count) - getattr(before, count)
        return turn

    def _happens(self) -> None:
        """Reports to the runner that a step is in its middle, and waits until the runner has acted."""
        self.write({"middle": True})
        sys.stdin.readline()

    def write(self, answer: dict[str, Any]) -> None:
        """Writes an answer."""
        self._output.write(json.dumps(answer) + "\n")
        self._output.flush()

    def close(self) -> None:
        """Closes the session."""
        self.session.close()


def main() -> None:
    """Serves the runner until stdin is closed."""
    output = answers_only()
    import torch  # noqa: F401  it takes seconds, during which the workers start

    line = sys.stdin.readline()
    if not line:
        return
    trainer = Trainer(json.loads(line), output)
    try:
        trainer.write({"ready": True})
        while line := sys.stdin.readline():
            trainer.write(trainer.answer(*json.loads(line)))
    finally:
        trainer.close()


if __name__ == "__main__":
    main()

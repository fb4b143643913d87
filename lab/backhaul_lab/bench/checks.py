"""Measures what recording and digests add to a step, without any transfers.

Nothing is checkpointed: autograd keeps its saved tensors, so that a step differs from a plain one only by the checks.
One thread does all work, so CPU time is measured.
"""

from collections.abc import Callable
from functools import partial
from time import process_time

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from backhaul.demo.model import Block
from backhaul_lab.bench.outcomes import Outcome, of_rounds
from backhaul_lab.harness.rounds import Alternative, Plan, added_by, interleave
from backhaul_lab.harness.stage import Stage
from backhaul_lab.harness.training import DROPOUT, LARGE, SMALL, WIDTH, compare_gradients
from backhaul_runtime.program.op_list import allowed_ops
from backhaul_runtime.record.recorder import Recorder
from backhaul_runtime.record.recording import Recording
from backhaul_runtime.tensors.digest import address_of, content_digest, saved_digest
from backhaul_runtime.tensors.layout import copy_exact, layout_of

BLOCKS = 4
PLAN = Plan(most=15, warm=1, limit_s=20.0)

BlockForward = Callable[[Block, Tensor, list[object]], Tensor]
"""A function that runs a block. It appends objects to the list that must stay alive until backward."""


def measure_large(stage: Stage) -> list[Outcome]:
    """Measures the figure checks_large."""
    return [_measure("checks_large", stage, LARGE, steps=1)]


def measure_small(stage: Stage) -> list[Outcome]:
    """Measures the figure checks_small."""
    return [_measure("checks_small", stage, SMALL, steps=8)]


def _measure(name: str, stage: Stage, tokens: tuple[int, int], steps: int) -> Outcome:
    blocks = [Block(WIDTH, DROPOUT) for _ in range(BLOCKS)]
    x = torch.randn(*tokens, WIDTH, requires_grad=True)
    gradients_of: dict[str, list[Tensor]] = {}

    def measured(variant: str) -> float:
        taken_s = sum(_step(blocks, x, VARIANTS[variant]) for _ in range(steps))
        tensors = (x, *(parameter for block in blocks for parameter in block.parameters()))
        gradients_of[variant] = [tensor.grad for tensor in tensors if tensor.grad is not None]
        return taken_s

    def compare() -> None:
        for variant, gradients in gradients_of.items():
            compare_gradients(f'"{variant}" and "plain"', gradients, gradients_of["plain"])

    variants = [Alternative(variant, partial(measured, variant)) for variant in VARIANTS]
    rounds = interleave(variants, [stage.trainer], PLAN, compare)
    others = {variant: rounds.spread(added_by(variant, "plain")).value for variant in VARIANTS if variant != "plain"}
    note = ", ".join(f"{variant} {value:+.1%}" for variant, value in others.items())
    return of_rounds(name, rounds, added_by("recorded", "plain"), note)


def _step(blocks: list[Block], x: Tensor, forward: BlockForward) -> float:
    """Runs forward and backward. Returns seconds of CPU time."""
    x.grad = None
    for block in blocks:
        block.zero_grad()
    torch.manual_seed(0)
    alive: list[object] = []
    began_s = process_time()
    y = x
    for block in blocks:
        y = forward(block, y, alive)
    y.sum().backward()  # type: ignore[no-untyped-call]
    taken_s = process_time() - began_s
    for item in alive:
        if isinstance(item, RemovableHandle):
            item.remove()
    refusals = [item.refusal for item in alive if isinstance(item, Recording) and item.refusal]
    assert not refusals, refusals  # A refused recording costs less.
    return taken_s


def _plain(block: Block, x: Tensor, alive: list[object]) -> Tensor:
    return block(x)  # type: ignore[no-any-return]


def _digested(block: Block, x: Tensor, alive: list[object]) -> Tensor:
    """Runs a block with a digest of each tensor that autograd saves."""
    digests: list[bytes] = []
    alive.append(digests)

    def pack(tensor: Tensor) -> Tensor:
        layout = layout_of(tensor)
        digests.append(saved_digest(layout, content_digest(tensor, layout)))
        return tensor

    with saved_tensors_hooks(pack, _identity):
        return block(x)  # type: ignore[no-any-return]


def _recorded(block: Block, x: Tensor, alive: list[object], unpack: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Runs a block under the recorder with its digests and its copy of the argument, as a segment's forward does."""

    def pack(tensor: Tensor) -> Tensor:
        recorder.note_saved(tensor)
        return tensor

    recorder = Recorder([x], allowed_ops(), lambda tensor, layout, _: copy_exact(tensor, layout), pack)
    with saved_tensors_hooks(pack, unpack or _identity), recorder:
        y = block(x)
    alive += (recorder.recording, recorder.finish([y]))
    return y  # type: ignore[no-any-return]


def _bytes_of_gradients(block: Block, x: Tensor, alive: list[object]) -> Tensor:
    """Runs a block recorded and digests each gradient in backward, as determinism_check="bytes" does on arrival."""
    y = _recorded(block, x, alive)
    alive += [tensor.register_hook(_digest) for tensor in (x, *block.parameters())]  # type: ignore[no-untyped-call]
    return y


def _bytes_of_activations(block: Block, x: Tensor, alive: list[object]) -> Tensor:
    """Runs a block recorded and digests each saved tensor again in backward."""

    def unpack(tensor: Tensor) -> Tensor:
        _digest(tensor)
        return tensor

    return _recorded(block, x, alive, unpack)


def _digest(tensor: Tensor) -> None:
    address_of(tensor)


def _identity(tensor: Tensor) -> Tensor:
    return tensor


VARIANTS: dict[str, BlockForward] = {
    "plain": _plain,
    "digested": _digested,
    "recorded": _recorded,
    "bytes of gradients": _bytes_of_gradients,
    "bytes of activations": _bytes_of_activations,
}

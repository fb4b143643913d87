"""What recording and digests add to a step, apart from all that travels: `make bench`.

Nothing is checkpointed here: what autograd saves stays where it is, so that a step differs from a plain one by the
checks alone. Variants take turns within a round and are compared within it. A round in which wall time exceeds CPU time
by 5 % had a noisy neighbour and doesn't count.
"""

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter, process_time

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from backhaul.demo.model import Block
from backhaul_runtime.digest import address_of, content_digest, saved_digest
from backhaul_runtime.layout import copy_exact, layout_of
from backhaul_runtime.op_list import allowed_ops
from backhaul_runtime.recorder import Recorder
from backhaul_runtime.recording import Recording

LAYERS = 8
WIDTH = 512
DROPOUT = 0.1
SIZES = {(4, 256): 15, (1, 64): 60}  # batch and context: rounds
ENOUGH = 7
NOISY = 1.05

Run = Callable[[Block, Tensor, list[object]], Tensor]
"""Calls a block, with a list of what is to live until backward."""


def plainly(block: Block, x: Tensor, kept: list[object]) -> Tensor:
    """As without Backhaul."""
    return block(x)  # type: ignore[no-any-return]


def digested(block: Block, x: Tensor, kept: list[object]) -> Tensor:
    """With a digest of each tensor that autograd saves."""
    digests: list[bytes] = []
    kept.append(digests)

    def pack(tensor: Tensor) -> Tensor:
        layout = layout_of(tensor)
        digests.append(saved_digest(layout, content_digest(tensor, layout)))
        return tensor

    with saved_tensors_hooks(pack, _as_it_is):
        return block(x)  # type: ignore[no-any-return]


def recorded(block: Block, x: Tensor, kept: list[object]) -> Tensor:
    """With the recorder, its digests and its copy of the argument, as a segment's forward has them."""
    return _recorded(block, x, kept, _as_it_is)


def _recorded(block: Block, x: Tensor, kept: list[object], unpack: Callable[[Tensor], Tensor]) -> Tensor:
    def pack(tensor: Tensor) -> Tensor:
        recorder.note_saved(tensor)
        return tensor

    recorder = Recorder([x], allowed_ops(), lambda tensor, layout, _: copy_exact(tensor, layout), pack)
    with saved_tensors_hooks(pack, unpack), recorder:
        y = block(x)
    kept += (recorder.recording, recorder.finish([y]))
    return y  # type: ignore[no-any-return]


def bytes_of_activations(block: Block, x: Tensor, kept: list[object]) -> Tensor:
    """Recorded, and each saved tensor digested again in backward, as determinism_check="bytes" does on arrival."""

    def unpack(tensor: Tensor) -> Tensor:
        address_of(tensor)
        return tensor

    return _recorded(block, x, kept, unpack)


def bytes_of_gradients(block: Block, x: Tensor, kept: list[object]) -> Tensor:
    """Recorded, and each gradient of a parameter and of the input digested in backward, likewise."""
    y = _recorded(block, x, kept, _as_it_is)
    kept += [tensor.register_hook(_digest_too) for tensor in (x, *block.parameters())]
    return y


def _digest_too(gradient: Tensor) -> None:
    address_of(gradient)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


VARIANTS: dict[str, Run] = {
    "no checks": plainly,
    "digests": digested,
    "recording and digests": recorded,
    "and bytes, gradients": bytes_of_gradients,
    "and bytes, activations": bytes_of_activations,
}


def step(blocks: Sequence[Block], x: Tensor, run: Run) -> tuple[float, float]:
    """Forward and backward. Returns seconds of wall time and of CPU time."""
    for block in blocks:
        block.zero_grad()
    torch.manual_seed(0)
    kept: list[object] = []
    wall_s, cpu_s = perf_counter(), process_time()
    y = x
    for block in blocks:
        y = run(block, y, kept)
    y.sum().backward()  # type: ignore[no-untyped-call]
    found = perf_counter() - wall_s, process_time() - cpu_s
    for item in kept:
        if isinstance(item, RemovableHandle):
            item.remove()
    refusals = [item.refusal for item in kept if isinstance(item, Recording) and item.refusal]
    assert not refusals, refusals  # what is refused costs less
    return found


def measure(batch: int, context: int, rounds: int) -> None:
    """Prints what each variant takes for one size."""
    blocks = [Block(WIDTH, DROPOUT) for _ in range(LAYERS)]
    x = torch.randn(batch, context, WIDTH, requires_grad=True)
    names = list(VARIANTS)
    for run in VARIANTS.values():
        step(blocks, x, run)
    quiet: list[dict[str, float]] = []
    for number in range(rounds):
        order = names[number % len(names) :] + names[: number % len(names)]
        found = {name: step(blocks, x, VARIANTS[name]) for name in order}
        if all(wall_s <= NOISY * cpu_s for wall_s, cpu_s in found.values()):
            quiet.append({name: cpu_s for name, (_, cpu_s) in found.items()})
    print(f"\n{batch} x {context} tokens, {len(quiet)} of {rounds} rounds without a noisy neighbour")
    if len(quiet) < ENOUGH:
        print(f"inconclusive: {ENOUGH} are needed")
        return
    for name in names:
        taken_ms = median(each[name] for each in quiet) * 1e3
        added = sorted(each[name] / each[names[0]] - 1 for each in quiet)
        quarter = len(added) // 4
        spread = f"half of the rounds {added[quarter]:+.1%} to {added[-1 - quarter]:+.1%}"
        print(f"  {name:22} {taken_ms:8.1f} ms", f"{median(added):+7.1%}   {spread}" if name != names[0] else "")


def main() -> None:
    """Measures both sizes."""
    torch.set_num_threads(1)
    print(f"{LAYERS} blocks of width {WIDTH}, forward and backward, one thread, torch {torch.__version__}")
    for (batch, context), rounds in SIZES.items():
        measure(batch, context, rounds)


main()

"""A call of a known program notes what a recorded call would note, with fewer objects."""

import pytest
import torch
from torch import Tensor, nn

from support.bits import differing, plainly, seed_generators
from support.compiled import MARKS, WIDTH, block_like, inputs, known, own, step
from support.devices import DEVICE
from support.loopback import Loopback

pytestmark = MARKS


@pytest.mark.slow
def test_what_a_known_call_notes_is_what_a_recorded_one_notes() -> None:
    remote, block, memory = Loopback(), block_like(), torch.randn(2, 64, WIDTH, device=DEVICE)
    for _ in range(4):
        own(remote)(block, memory[0].detach().requires_grad_())
    noted = []
    for checkpoint in (own(remote), remote.checkpoint):
        seed_generators(0)
        checkpoint(block, memory[1].detach().requires_grad_())  # at another place in its storage
        noted.append(remote.recordings[-1])
    assert known(remote) == 2
    first, second = noted
    assert list(first.saved) == list(second.saved)
    assert first.saved[-2:] == second.saved[-2:]
    assert any(saved.source >= 0 and saved.offset for saved in first.saved)
    assert [source.named for source in first.sources] == [source.named for source in second.sources]


def test_all_uses_of_a_boundary_share_a_stand_in() -> None:
    def used_often(x: Tensor) -> Tensor:
        return weight * x + (x.exp() + x) * second.sin()

    remote = Loopback()
    weight, second = (nn.Parameter(inputs(WIDTH).detach()) for _ in range(2))
    module = nn.Module()
    module.weight, module.second, module.forward = weight, second, used_often
    x = inputs() * 1
    for checkpoint in (remote.checkpoint, own(remote)):
        nodes = [node for node, _ in checkpoint(module, x).grad_fn.next_functions if node is not None]
        behind = [[following for following, _ in node.next_functions] for node in dict.fromkeys(nodes)]
        assert sum(x.grad_fn in following for following in behind) == 1
    assert not differing(step(plainly, block_like(), x), step(own(remote), block_like(), x))

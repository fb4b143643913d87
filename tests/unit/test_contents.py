"""Digests that are taken once while parameters must not change."""

import torch
from torch import Tensor, nn

from backhaul_runtime.record.contents import Contents, FixedDigests
from backhaul_runtime.tensors.deferred_digest import Digest
from backhaul_runtime.tensors.digest import content_digest
from backhaul_runtime.tensors.layout import layout_of


def taken(parameter: Tensor, fixed: FixedDigests) -> Digest:
    """Returns the digest that a call takes of a parameter which it captures."""
    contents, layout = Contents(fixed), layout_of(parameter)
    digest = contents.digest(parameter, layout)
    contents.fix(parameter, layout, digest)
    return digest


def test_a_digest_is_taken_once_until_it_is_forgotten() -> None:
    parameter, fixed = nn.Parameter(torch.zeros(4)), FixedDigests()
    before = taken(parameter, fixed)
    parameter.data.add_(1)
    assert taken(parameter, fixed) == before
    assert fixed.changed() is parameter
    fixed.forget()
    assert taken(parameter, fixed) == content_digest(parameter, layout_of(parameter)) != before
    assert fixed.changed() is None


def test_memory_that_a_parameter_has_left_may_change() -> None:
    parameter, fixed = nn.Parameter(torch.zeros(4)), FixedDigests()
    buffers = torch.zeros(4), torch.zeros(4)
    for buffer in buffers:
        parameter.data = buffer
        before = taken(parameter, fixed)
    buffers[0].add_(1)
    parameter.data = buffers[0]
    assert taken(parameter, fixed) == content_digest(parameter, layout_of(parameter)) != before
    assert fixed.changed() is None


def test_another_parameter_with_the_same_memory_hides_no_write() -> None:
    parameter, fixed = nn.Parameter(torch.zeros(4)), FixedDigests()
    taken(parameter, fixed)
    taken(nn.Parameter(parameter.data), fixed)
    parameter.data.add_(1)
    assert fixed.changed() is parameter


def test_the_memory_of_a_parameter_that_is_gone_may_change() -> None:
    memory, fixed = torch.zeros(4), FixedDigests()
    before = taken(nn.Parameter(memory.data), fixed)
    memory.data.add_(1)
    parameter = nn.Parameter(memory.data)
    assert taken(parameter, fixed) == content_digest(parameter, layout_of(parameter)) != before
    assert fixed.changed() is None

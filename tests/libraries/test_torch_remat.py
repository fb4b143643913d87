"""examples/integrations/with_torch_remat.py, and what torch_remat's own functions would do."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul import Decision, Session
from support.bits import differing
from support.libraries import assert_trains_equally
from support.processes import WorkerProcess

torch_remat = pytest.importorskip("torch_remat")
remat = pytest.importorskip("backhaul.integrations.torch_remat")
REGIONS = [(True, True), (False, True), (True, False), (False, False)]


def test_the_example_trains_as_without_backhaul(worker: WorkerProcess) -> None:
    report = assert_trains_equally("torch_remat", worker.address)
    assert report.segments[0].decisions == {Decision.ACTIVATIONS: 40}


def block(library: Any, first: bool, second: bool, x: Tensor, w: Tensor, scale: float = 1.0) -> Tensor:
    y = library.region(torch.matmul, "product", recompute=first)(x, w)
    library.recompute_needs_tensor(y)
    y = y.relu() * scale
    z = library.region(lambda y: (y @ w).sigmoid(), "gate", recompute=second)(y)
    library.recompute_needs_tensor(z)
    return z * y


def gradients(library: Any, first: bool, second: bool) -> list[Tensor]:
    torch.manual_seed(0)
    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    y = library.checkpoint(region_name="block")(block)(library, first, second, x.cos(), w, scale=2.0)
    return [y, *torch.autograd.grad(y.sum(), [x, w])]


@pytest.mark.parametrize(("first", "second"), REGIONS)
def test_gradients_are_those_of_torch_remat(first: bool, second: bool, session: Session) -> None:
    assert differing(gradients(remat, first, second), gradients(torch_remat, first, second)) == []
    expected = Decision.GRADIENTS if first and second else Decision.ACTIVATIONS
    assert session.report().segments[0].decisions == {expected: 1}


def test_keyword_arguments_with_names_of_options_reach_the_function(session: Session) -> None:
    def scaled(x: Tensor, *, debug: Tensor, strict: bool) -> Tensor:
        return x * debug if strict else x

    x, debug = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    y = remat.checkpoint()(scaled)(x, debug=debug, strict=True)
    assert differing(torch.autograd.grad(y.sum(), [x, debug]), [debug.detach(), x.detach()]) == []


def test_code_that_imports_torch_remat_itself_can_be_redirected(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gradients(torch_remat, False, True)
    monkeypatch.setattr(torch_remat, "checkpoint", remat.checkpoint)
    monkeypatch.setattr(torch_remat, "region", remat.region)
    assert differing(gradients(torch_remat, False, True), expected) == []
    assert session.report().remote == 1


def test_all_other_names_are_those_of_torch_remat() -> None:
    public = {name for name in dir(torch_remat) if not name.startswith("_")}
    assert public <= set(dir(remat))
    assert remat.is_recomputing() is False
    assert remat.recompute_needs_tensor is torch_remat.recompute_needs_tensor


def test_saved_tensors_hooks_see_what_regions_keep(session: Session) -> None:
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    torch.manual_seed(0)
    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    call = remat.checkpoint(region_name="block", saved_tensors_hooks=(pack, lambda tensor: tensor))(block)
    ours = torch.autograd.grad(call(remat, False, True, x.cos(), w).sum(), [x, w])
    assert differing(ours, torch.autograd.grad(block(torch_remat, True, True, x.cos(), w).sum(), [x, w])) == []
    assert len(packed) == 2  # the operands of the product


def test_without_a_session_the_first_call_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backhaul._api._opened", [])
    with pytest.raises(backhaul.SessionClosedError, match="call backhaul.connect"):
        remat.checkpoint(region_name="block")(nn.Linear(2, 2))(torch.randn(1, 2))

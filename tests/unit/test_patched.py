"""`patched`: calls of torch's checkpoint become segments, whoever makes them and however they got the function."""

import inspect
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint as by_name
from torch.utils.checkpoint import checkpoint_sequential

from backhaul import NotRemoteError, NotRemoteWarning
from backhaul._torch_api.patched import patched
from support.loopback import Loopback

LAYER = nn.Linear(3, 3)


def by_attribute(x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(LAYER, x, use_reentrant=False)


def by_default(x: Tensor, checkpoint: Callable[..., Any] = torch.utils.checkpoint.checkpoint) -> Tensor:
    return checkpoint(LAYER, x, use_reentrant=True)


def holding(checkpoint: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(LAYER, x, use_reentrant=False)


HOLDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "attribute": by_attribute,
    "global": lambda x: by_name(LAYER, x, use_reentrant=False),
    "partial": partial(by_name, LAYER, use_reentrant=False),
    "default": by_default,
    "closure": holding(by_name),
    "torch's wrapper": checkpoint_wrapper(LAYER),
    "checkpoint_sequential": lambda x: checkpoint_sequential([LAYER, torch.sin], 2, x, use_reentrant=False),
}


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, requires_grad=True)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    before = vars(inspect.unwrap(by_name)).keys() - {"__dynamo_disable"}, inspect.unwrap(by_name).__code__
    signature = inspect.signature(by_name)
    yield
    assert torch.utils.checkpoint.checkpoint is by_name
    assert (vars(inspect.unwrap(by_name)).keys() - {"__dynamo_disable"}, inspect.unwrap(by_name).__code__) == before
    assert inspect.signature(by_name) == signature


@pytest.mark.parametrize("holder", HOLDERS)
def test_whoever_has_torchs_function_is_redirected(holder: str, loopback: Loopback, x: Tensor) -> None:
    HOLDERS[holder](x)
    with patched(loopback.checkpoint):
        HOLDERS[holder](x).sum().backward()
    HOLDERS[holder](x).sum().backward()
    assert loopback.report().remote == 1


def test_what_is_made_meanwhile_is_torchs_own_afterwards(loopback: Loopback, x: Tensor) -> None:
    with patched(loopback.checkpoint):
        kept = partial(torch.utils.checkpoint.checkpoint, LAYER, use_reentrant=False)
        kept(x).sum().backward()
        pickle.loads(pickle.dumps(kept))(x).sum().backward()
    kept(x).sum().backward()
    assert loopback.report().remote == 2


def test_the_signature_is_torchs(loopback: Loopback, x: Tensor) -> None:
    signature = inspect.signature(by_name)
    with patched(loopback.checkpoint):
        assert inspect.signature(by_name) == signature
        by_attribute(x)


def test_an_error_leaves_the_block_as_it_is(loopback: Loopback) -> None:
    with pytest.raises(ZeroDivisionError), patched(loopback.checkpoint, strict=True):
        raise ZeroDivisionError


def test_the_inner_block_decides(x: Tensor) -> None:
    outer, inner = Loopback(), Loopback()
    with patched(outer.checkpoint):
        with patched(inner.checkpoint):
            by_attribute(x).sum().backward()
        by_attribute(x).sum().backward()
    assert (outer.report().remote, inner.report().remote) == (1, 1)


def test_a_block_in_a_block_speaks_for_both(loopback: Loopback, x: Tensor) -> None:
    with patched(loopback.checkpoint), patched(loopback.checkpoint):
        by_attribute(x)
    assert loopback.report().segments[0].calls == 1


def test_blocks_of_two_threads_end_in_any_order(x: Tensor) -> None:
    first, second = Loopback(), Loopback()
    entered, left = threading.Event(), threading.Event()

    def train() -> None:
        with patched(first.checkpoint):
            by_attribute(x)
            entered.set()
            assert left.wait(240)

    thread = threading.Thread(target=train)
    thread.start()
    assert entered.wait(240)
    with patched(second.checkpoint):
        by_attribute(x)
        left.set()
        thread.join(240)
        by_attribute(x).sum().backward()
    assert [loopback.report().segments[0].calls for loopback in (first, second)] == [1, 2]


def test_a_block_without_a_call_warns(loopback: Loopback, x: Tensor) -> None:
    with pytest.warns(NotRemoteWarning, match="nothing called .* use session.wrap") as caught, patched(print):
        LAYER(x).sum().backward()
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.raises(NotRemoteError, match="gradient_checkpointing_enable"), patched(print, strict=True):
        LAYER(x).sum().backward()
    with patched(loopback.checkpoint, strict=True), torch.no_grad():
        by_attribute(x)  # a call, and nothing to recompute


def test_a_function_that_another_library_put_there_may_not_be_redirected(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", lambda *args, **kwargs: calls.append(args))
    with pytest.raises(RuntimeError, match="which another library has installed.*session.wrap"), patched(print):
        pass
    monkeypatch.undo()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch warns itself while it compiles
@pytest.mark.parametrize("compiles_before", [False, True])
def test_what_torch_compile_captures_it_recomputes_itself(compiles_before: bool, loopback: Loopback, x: Tensor) -> None:
    def layer(x: Tensor, **given: Any) -> Tensor:
        assert given == {"scale": 2}, "torch's options are not the function's arguments"
        return LAYER(x).tanh() * given["scale"]

    def step(x: Tensor) -> Tensor:
        return by_name(layer, x.cos(), scale=2, use_reentrant=False).sin()

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    if compiles_before:
        compiled(x)
    expected = torch.autograd.grad((LAYER(x.cos()).tanh() * 2).sin().sum(), x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with patched(loopback.checkpoint):
            ours = torch.autograd.grad(compiled(x).sum(), x)
    assert torch.equal(ours[0], expected[0])
    assert NotRemoteWarning in {warning.category for warning in caught}
    assert loopback.report().segments == ()


def test_contexts_are_passed_on(loopback: Loopback, x: Tensor) -> None:
    with patched(loopback.checkpoint):
        by_name(torch.sin, x, use_reentrant=False, context_fn=lambda: (nullcontext(), nullcontext())).sum().backward()
    (segment,) = loopback.report().segments
    assert list(segment.reasons) == ["it has a context_fn, which is code"]

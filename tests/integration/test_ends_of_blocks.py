"""Ends of accumulation blocks: the order of hooks, all gradients or none, and functions that need complete ones."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul import Session
from support.bits import differing
from support.blocks import loop

WIDTH = 8


class Layers(nn.ModuleList):
    """Three linear layers, whose types a checker knows."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def weight(self, number: int) -> Tensor:
        return next(list(self.children())[number].parameters())


def block_of(session: Session | None) -> contextlib.AbstractContextManager[Any]:
    return session.accumulate() if session else loop()


def trained(session: Session | None, blocks: nn.ModuleList, micro_batches: int = 3) -> list[Tensor | None]:
    """Gradients after a block."""
    checkpoint = session.checkpoint if session else lambda layer, x: layer(x)
    torch.manual_seed(1)
    with block_of(session) as block:
        for _ in range(micro_batches):
            x = torch.randn(4, WIDTH)
            for layer in blocks:
                x = checkpoint(layer, x)
            block.backward(x.square().mean())
    return [parameter.grad for parameter in blocks.parameters()]


@pytest.mark.parametrize("undivided", [(0,), (1,), (2,), (0, 2), (0, 1, 2), ()])
def test_hooks_before_the_first_segment_see_micro_batches_in_their_order(
    session: Session, undivided: tuple[int, ...]
) -> None:
    def run(session: Session | None) -> Tensor | None:
        blocks, scale = Layers(), [1.0]
        embedding = nn.Embedding(9, WIDTH)
        checkpoint = session.checkpoint if session else lambda layer, x: layer(x)

        def hook(gradient: Tensor) -> Tensor:
            scale[0] *= 0.5
            return gradient * scale[0]

        with block_of(session) as block:
            for number in range(3):
                x = embedding(torch.randint(0, 9, (4,)))
                x.register_hook(hook)
                outputs = []
                for layer in blocks:
                    x = checkpoint(layer, x)
                    outputs.append(x)
                more = outputs[0].square().mean() if number in undivided else 0
                block.backward(x.square().mean() + more)
        return embedding.weight.grad

    assert differing([run(session)], [run(None)]) == []


def raising(*_: Any) -> None:
    raise ValueError("of a hook")


def accumulation_node(parameter: Tensor) -> Any:
    grad_fn: Any = parameter.expand_as(parameter).grad_fn
    return grad_fn.next_functions[0][0]


def fails_in_node(parameter: Tensor) -> Any:
    node = accumulation_node(parameter)
    node.register_hook(raising)
    return node


def fails_in_pre_hook(parameter: Tensor) -> Any:
    node = accumulation_node(parameter)
    node.register_prehook(raising)
    return node


def fails_after_accumulation(parameter: Tensor) -> Any:
    return parameter.register_post_accumulate_grad_hook(raising)


def is_read_only(parameter: Tensor) -> None:
    parameter.grad = torch.ones(1).expand_as(parameter)


@pytest.mark.parametrize("begins_with_gradients", [False, True])
@pytest.mark.parametrize("fail", [fails_in_node, fails_in_pre_hook, fails_after_accumulation, is_read_only])
def test_a_block_leaves_all_gradients_or_none(
    session: Session, fail: Callable[[Tensor], Any], begins_with_gradients: bool
) -> None:
    blocks = Layers()
    if begins_with_gradients:
        trained(None, blocks)
    kept = fail(blocks.weight(1))
    present = [parameter.grad for parameter in blocks.parameters()]
    before = [None if gradient is None else gradient.clone() for gradient in present]
    with pytest.raises((ValueError, RuntimeError)):
        trained(session, blocks)
    assert [parameter.grad for parameter in blocks.parameters()] == present  # the same tensors
    assert differing(present, before) == []
    del kept


def test_a_block_after_one_that_failed_has_the_bits_of_a_loop(session: Session) -> None:
    blocks, twin = Layers(), Layers()
    handle = blocks.weight(1).register_post_accumulate_grad_hook(raising)
    with pytest.raises(ValueError, match="of a hook"):
        trained(session, blocks)
    handle.remove()
    assert differing(trained(session, blocks), trained(None, twin)) == []


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_block_may_end_inside_of_a_mode(
    session: Session, mode: Callable[[], contextlib.AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session._shares["recompute"], "trainers_share", lambda: 1)
    blocks, twin = Layers(), Layers()
    accumulation = session.accumulate()
    torch.manual_seed(1)
    block = accumulation.__enter__()
    for _ in range(3):
        x = torch.randn(4, WIDTH)
        for layer in blocks:
            x = session.checkpoint(layer, x)
        block.backward(x.square().mean())
    with mode():
        accumulation.__exit__(None, None, None)
    assert differing([parameter.grad for parameter in blocks.parameters()], trained(None, twin)) == []
    assert not any(parameter.grad.is_inference() for parameter in blocks.parameters() if parameter.grad is not None)


NEEDS_COMPLETE = {
    "clip_grad_norm": lambda parameters: nn.utils.clip_grad_norm(parameters, 1.0),
    "clip_grad_norm_": lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0),
    "clip_grads_with_norm_": lambda parameters: nn.utils.clip_grads_with_norm_(parameters, 1.0, torch.ones(())),
    "clip_grad_value_": lambda parameters: nn.utils.clip_grad_value_(parameters, 1.0),
    "get_total_norm": lambda parameters: nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]),
}
"""Functions of torch.nn.utils that read or clip gradients."""
OTHERS = {
    *("convert_conv2d_weight_memory_format", "convert_conv3d_weight_memory_format", "fuse_conv_bn_eval"),
    *("fuse_conv_bn_weights", "fuse_linear_bn_eval", "fuse_linear_bn_weights", "parameters_to_vector"),
    *("parametrizations", "parametrize", "remove_spectral_norm", "remove_weight_norm", "rnn", "skip_init"),
    *("spectral_norm", "stateless", "vector_to_parameters", "weight_norm"),
}
SCALER = {"unscale_", "step"}
SCALER_OTHERS = {
    *("scale", "update", "get_scale", "is_enabled", "state_dict", "load_state_dict", "get_growth_factor"),
    *("set_growth_factor", "get_backoff_factor", "set_backoff_factor", "get_growth_interval", "set_growth_interval"),
}


def test_every_function_of_torch_about_gradients_is_known() -> None:
    """A new one must be refused inside of blocks, or listed among the others."""
    assert set(nn.utils.__all__) == NEEDS_COMPLETE.keys() | OTHERS
    assert set(torch.amp.__all__) == {"autocast", "custom_bwd", "custom_fwd", "is_autocast_available", "GradScaler"}
    assert {name for name in vars(torch.amp.GradScaler) if not name.startswith("_")} == SCALER | SCALER_OTHERS


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.clip_grad_norm` is now deprecated")
@pytest.mark.parametrize("name", NEEDS_COMPLETE)
def test_functions_that_need_complete_gradients_are_refused_in_a_block(session: Session, name: str) -> None:
    blocks = Layers()
    function = NEEDS_COMPLETE[name]
    with pytest.raises(backhaul.AccumulationError, match="clipping gradients"), session.accumulate() as block:
        x = session.checkpoint(blocks[0], torch.randn(4, WIDTH))
        block.backward(x.square().mean())
        function(list(blocks.parameters()))
    trained(None, blocks)
    function(list(blocks.parameters()))  # after the block it is torch's own again

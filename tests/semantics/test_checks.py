"""What a recomputation that goes another way is told, and what selective checkpointing keeps."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torchs
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

import backhaul
from backhaul import CheckpointError, Decision, Session
from support.bits import Checkpoint, differing, plainly
from support.calls import WIDTH, TimesOne, inputs, same, torch_checkpoint

SIN, MM = torch.ops.aten.sin.default, torch.ops.aten.mm.default
Step = Callable[[Tensor], Tensor]


class Changing:
    """Goes one way the first time it is called and another way from then on."""

    def __init__(self, first: Step, later: Step) -> None:
        self._first, self._later = first, later
        self._calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self._calls += 1
        x = TimesOne.apply(x)
        return (self._first if self._calls == 1 else self._later)(x)


def mismatch(checkpoint: Checkpoint, fn: Changing, **options: Any) -> torchs.CheckpointError:
    x, _ = inputs()
    y = checkpoint(fn, x, **options)
    with pytest.raises(torchs.CheckpointError) as caught:
        y.sum().backward()
    assert x.grad is None
    return caught.value


def fewer() -> Changing:
    return Changing(lambda x: x.sin().sin().exp(), lambda x: x.sin().exp())


def more() -> Changing:
    return Changing(lambda x: x.sin().exp(), lambda x: x.sin().sin().exp())


def test_s34_fewer_tensors_on_recomputation(session: Session) -> None:
    theirs, ours = str(mismatch(torch_checkpoint, fewer())), mismatch(session.checkpoint, fewer())
    assert "saved during forward: 4" in theirs
    assert "saved during recomputation: 3" in theirs
    assert isinstance(ours, CheckpointError)
    assert (ours.saved_forward, ours.saved_recomputed) == (4, 3)
    assert "saved 4 tensors" in str(ours)
    assert "saved 3" in str(ours)


@pytest.mark.parametrize("early_stop", [True, False])
def test_s34_more_tensors_on_recomputation(early_stop: bool, session: Session) -> None:
    ours = mismatch(session.checkpoint, more(), early_stop=early_stop)
    assert isinstance(ours, CheckpointError)
    assert "saved 3 tensors" in str(ours)
    assert "saved 4" in str(ours)
    assert "more tensors during recomputation" in str(mismatch(torch_checkpoint, more(), early_stop=False))


OTHER_METADATA: dict[str, tuple[Step, Step, str, str]] = {
    "shape": (lambda x: x.sin().exp(), lambda x: x[:1].sin().exp(), "[2, 8]", "[1, 8]"),
    "dtype": (lambda x: x.sin().exp(), lambda x: x.double().sin().exp(), "float32", "float64"),
    "device": (lambda x: x.sin().exp(), lambda x: x.to("meta").sin().exp(), "cpu", "meta"),
}


@pytest.mark.parametrize("what", OTHER_METADATA)
def test_s34_other_metadata_on_recomputation(what: str, session: Session) -> None:
    first, later, forward, recomputed = OTHER_METADATA[what]
    theirs = str(mismatch(torch_checkpoint, Changing(first, later)))
    ours = mismatch(session.checkpoint, Changing(first, later))
    assert isinstance(ours, CheckpointError)
    assert all(side in message for side in (forward, recomputed) for message in (theirs, str(ours)))
    assert "tensor at position 1" in theirs
    assert ours.positions == [1, 2]  # the first is what TimesOne saved


def test_s34_other_metadata_is_not_let_through_without_a_determinism_check(session: Session) -> None:
    first, later, *_ = OTHER_METADATA["shape"]
    error = mismatch(session.checkpoint, Changing(first, later), determinism_check="none")
    assert isinstance(error, CheckpointError)


@pytest.mark.parametrize("by_setting", [False, True])
def test_s35_debug_shows_the_operators_of_both_runs(by_setting: bool, session: Session) -> None:
    fn = Changing(lambda x: x.sin().exp().exp(), lambda x: x.cos().exp())
    with torchs.set_checkpoint_debug_enabled(True if by_setting else None):
        error = mismatch(session.checkpoint, fn, debug=not by_setting)
    assert isinstance(error, CheckpointError)
    assert isinstance(error.__cause__, CheckpointError)
    lines = str(error).lower().splitlines()
    forward = [i for i, line in enumerate(lines) if "aten.sin.default" in line]
    recomputed = [i for i, line in enumerate(lines) if "aten.cos.default" in line]
    assert any("forward" in line for line in lines[: forward[0]])
    assert any("recomputation" in line for line in lines[forward[-1] : recomputed[-1]])


def test_s35_the_setting_turns_it_off_too(session: Session) -> None:
    for checkpoint in (torch_checkpoint, session.checkpoint):
        with torchs.set_checkpoint_debug_enabled(False):
            error = mismatch(checkpoint, fewer(), debug=True)
        assert error.__cause__ is None


def test_s35_debug_calls_fn_again_and_gives_the_same_gradients(session: Session, returns: str) -> None:
    x, _ = inputs()
    calls: list[int] = []

    def fn(x: Tensor) -> Tensor:
        calls.append(1)
        return x.sin().exp()

    session.checkpoint(fn, x, debug=True, returns=returns).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])
    assert len(calls) == 2
    assert session.report().segments[0].decisions == {Decision.TRAINER: 1}


def test_s35_debug_by_setting_with_a_context_of_the_callers_own_is_refused(checkpoint: Checkpoint) -> None:
    for call in (torch_checkpoint, checkpoint):
        with (
            torchs.set_checkpoint_debug_enabled(True),
            pytest.raises(ValueError, match="debug=True is incompatible with non-default context_fn"),
        ):
            call(torch.sin, inputs()[0], context_fn=lambda: None)


def test_s36_a_checkpoint_error_is_a_runtime_error_and_torchs() -> None:
    assert issubclass(CheckpointError, RuntimeError)
    assert issubclass(CheckpointError, torchs.CheckpointError)
    assert issubclass(CheckpointError, backhaul.BackhaulError)


# Selective checkpointing

WEIGHTS = 64


def selective(policy: Any, **options: Any) -> Callable[[], Any]:
    return partial(torchs.create_selective_checkpoint_contexts, policy, **options)


def products(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).sin() @ w).sin().exp()


def operands() -> tuple[Tensor, Tensor]:
    return torch.randn(WEIGHTS, WEIGHTS, requires_grad=True), torch.randn(WEIGHTS, WEIGHTS, requires_grad=True)


def for_products(answer: Any, otherwise: Any = CheckpointPolicy.PREFER_RECOMPUTE) -> Callable[..., Any]:
    return lambda ctx, op, *args, **kwargs: answer if op is MM else otherwise


KEPT = {
    "a list": [MM],
    "True": for_products(True, otherwise=False),
    **{
        policy.name: for_products(policy)
        for policy in CheckpointPolicy
        if policy.name.endswith("_SAVE") or policy.name.endswith("_CPU_OFFLOAD")
    },
}
NOT_KEPT = {
    "False": for_products(False),
    "an empty list": [],
    "MUST_RECOMPUTE": for_products(CheckpointPolicy.MUST_RECOMPUTE),
    "PREFER_RECOMPUTE": for_products(CheckpointPolicy.PREFER_RECOMPUTE),
}


def down_bytes(session: Session, returns: str, **options: Any) -> int:
    """What comes back for a call whose gradients are right and which a worker recomputed with activations."""
    x, w = operands()
    before = session.report()
    found = torch.autograd.grad(session.checkpoint(products, x, w, returns=returns, **options).sum(), [x, w])
    assert differing(found, torch.autograd.grad(products(x, w).sum(), [x, w])) == []
    after = session.report()
    assert after.remote == before.remote + 1
    assert Decision.GRADIENTS not in after.segments[0].decisions
    assert after.segments[0].reasons == {}
    return after.down_bytes - before.down_bytes


TWO_PRODUCTS = 2 * WEIGHTS * WEIGHTS * 4


@pytest.mark.parametrize("policy", KEPT)
def test_s37_what_the_policy_keeps_does_not_come_back(policy: str, session: Session) -> None:
    whole = down_bytes(session, "activations")
    kept = down_bytes(session, "activations", context_fn=selective(KEPT[policy]))
    assert whole - kept > 0.95 * TWO_PRODUCTS


@pytest.mark.parametrize("asked", ["gradients", "auto"])
def test_s37_a_policy_means_activations(asked: str, session: Session) -> None:
    whole = down_bytes(session, "activations")
    assert whole - down_bytes(session, asked, context_fn=selective([MM])) > 0.95 * TWO_PRODUCTS


@pytest.mark.parametrize("policy", NOT_KEPT)
def test_s37_what_it_does_not_keep_comes_back(policy: str, session: Session) -> None:
    whole = down_bytes(session, "activations")
    found = down_bytes(session, "auto", context_fn=selective(NOT_KEPT[policy]))
    assert abs(found - whole) < 0.05 * whole


def test_s37_the_policy_is_asked_about_each_op_in_forward_alone(checkpoint: Checkpoint) -> None:
    asked: dict[Checkpoint, list[str]] = {}
    for call in (torch_checkpoint, checkpoint):
        seen = asked[call] = []

        def policy(
            ctx: Any, op: Any, *args: Any, seen: Any = seen, call: Any = call, **kwargs: Any
        ) -> CheckpointPolicy:
            if call is checkpoint:  # some of torch's own versions ask again in backward, and give no output
                assert not ctx.is_recompute
                assert isinstance(ctx.op_output, Tensor)
            if not ctx.is_recompute:
                seen.append(str(op))
            return CheckpointPolicy.MUST_SAVE if op is MM else CheckpointPolicy.PREFER_RECOMPUTE

        x, w = operands()
        call(products, x, w, context_fn=selective(policy)).sum().backward()
    theirs, ours = asked.values()
    assert "aten.mm.default" in theirs
    assert ours == theirs


def test_s37_offloaded_tensors_are_copies_of_their_own(session: Session) -> None:
    x, w = operands()
    packed: list[Tensor] = []
    outputs: list[Tensor] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        outputs.extend([ctx.op_output] if op is MM else [])
        return CheckpointPolicy.MUST_CPU_OFFLOAD if op is MM else CheckpointPolicy.MUST_RECOMPUTE

    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        y = session.checkpoint(products, x, w, context_fn=selective(policy))
    kept = [tensor for tensor in packed if any(torch.equal(tensor, output) for output in outputs)]
    assert len(kept) == 2
    assert not {tensor.data_ptr() for tensor in kept} & {output.data_ptr() for output in outputs}
    y.sum().backward()


@pytest.mark.parametrize("policy", [torch.ops.aten.mm, "mm"])
def test_s37_bad_lists_are_torchs_errors(policy: Any, checkpoint: Checkpoint) -> None:
    for call in (torch_checkpoint, checkpoint):
        with pytest.raises(ValueError, match="Expected op in `op_list` to be an OpOverload"):
            call(products, *operands(), context_fn=selective([policy]))
        with pytest.raises(TypeError, match="policy_fn_or_list must be either a function or a list of ops"):
            call(products, *operands(), context_fn=selective(3))


def mutates(x: Tensor) -> Tensor:
    kept = x.sin()
    kept.mul_(2)
    return kept.exp().cos()


def test_s37_a_kept_tensor_that_is_mutated_is_torchs_error(checkpoint: Checkpoint) -> None:
    for call in (torch_checkpoint, checkpoint):
        y = call(mutates, inputs()[0], context_fn=selective([SIN]))
        with pytest.raises(RuntimeError, match="Tensor cached during selective activation checkpoint has been mutated"):
            y.sum().backward()


def test_s37_unless_that_is_allowed(checkpoint: Checkpoint) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        x, _ = inputs()
        options = {"context_fn": selective([SIN], allow_cache_entry_mutation=True)}
        checkpoint(mutates, x, **({} if checkpoint is plainly else options)).sum().backward()
        return [x.grad]

    same(case, checkpoint)


def test_s37_what_is_allowed_gives_no_wrong_gradient(checkpoint: Checkpoint) -> None:
    def fn(x: Tensor) -> Tensor:
        kept = x.sin()
        y = kept.cos()
        kept.mul_(2)
        return y

    y = checkpoint(fn, inputs()[0], context_fn=selective([SIN], allow_cache_entry_mutation=True))
    with pytest.raises(CheckpointError, match="which a policy keeps"):
        y.sum().backward()


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.MUST_SAVE])
def test_s37_everything_is_kept(policy: CheckpointPolicy, checkpoint: Checkpoint) -> None:
    """Copying to the host is no write of the function's, and what is expanded comes back so."""

    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        x, w = operands()
        options = {} if checkpoint is plainly else {"context_fn": selective(lambda *_, **__: policy)}
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: torch.empty_like(t).copy_(t), lambda t: t)
        with hooks if checkpoint is not plainly else nullcontext():
            y = checkpoint(lambda x: products(x, w).sum().sin().expand(3, 4).exp(), x, **options)
        z = checkpoint(lambda x: products(x, w).sum().sin().expand(3, 4).exp(), x, **options)
        (y.sum() + z.sum()).backward()
        return [x.grad, w.grad]

    same(case, checkpoint)


def test_s37_sparse_tensors_are_not_kept(checkpoint: Checkpoint) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        matrix, (x, w) = torch.eye(WEIGHTS).to_sparse(), operands()
        options = {"context_fn": selective(lambda *_, **__: CheckpointPolicy.MUST_SAVE)}
        fn = lambda x: torch.sparse.mm(matrix * 2, x.sin() @ w).exp()  # noqa: E731
        checkpoint(fn, x, **({} if checkpoint is plainly else options)).sum().backward()
        return [x.grad, w.grad]

    same(case, checkpoint)


def test_s37_a_second_backward_works(checkpoint: Checkpoint) -> None:
    x, w = operands()
    y = checkpoint(products, x, w, context_fn=selective([MM]))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    (expected,) = torch.autograd.grad(products(x, w).sum(), x)
    assert torch.equal(x.grad, expected + expected)
    theirs = torch_checkpoint(products, x, w, context_fn=selective([MM]))
    theirs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="Trying to backward an extra time"):
        theirs.sum().backward()


class Entered:
    """A context that counts, and sets a scale that the function reads."""

    scale = 1.0

    def __init__(self, scale: float = 1.0) -> None:
        self.count = 0
        self._scale = scale

    def __enter__(self) -> None:
        self.count += 1
        Entered.scale = self._scale

    def __exit__(self, *exception: object) -> None:
        Entered.scale = 1.0


def test_s37_a_context_of_the_callers_own_calls_fn_again(session: Session, returns: str) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        forward, recomputation, calls = Entered(), Entered(), []
        linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()

        def fn(h: Tensor) -> Tensor:
            calls.append(1)
            return linear(h).sin() * Entered.scale

        options = {} if checkpoint is plainly else {"context_fn": lambda: (forward, recomputation), "returns": returns}
        checkpoint(fn, h, **options).sum().backward()
        if checkpoint is not plainly:
            assert (forward.count, recomputation.count, len(calls)) == (1, 1, 2)
        return [x.grad, linear.weight.grad]

    same(case, session.checkpoint)
    (segment,) = session.report().segments
    assert segment.decisions == {Decision.TRAINER: 1}
    assert any("context_fn" in reason for reason in segment.reasons)


def test_s37_the_value_check_applies_to_it(session: Session) -> None:
    x, _ = inputs()
    y = session.checkpoint(lambda x: (x * Entered.scale).sin().exp(), x, context_fn=lambda: (Entered(), Entered(2.0)))
    with pytest.raises(CheckpointError, match="differ between forward and recomputation"):
        y.sum().backward()
    assert x.grad is None

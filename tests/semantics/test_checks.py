"""What a recomputation that goes another way is told, and what selective checkpointing keeps."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torchs
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

import backhaul
from backhaul import CheckpointError, Decision, Session
from backhaul._torch_api.call_options import DETERMINISM_CHECKS
from backhaul_runtime.replay.replay import Replay
from support.bits import Checkpoint, differing, grad_of, plainly
from support.calls import WIDTH, TimesOne, as_without_checkpointing, inputs, same, seed, torch_checkpoint
from support.devices import DEVICE, NO_SPARSE, on_the_host
from support.unseen import replace_unseen

SIN, MM = torch.ops.aten.sin.default, torch.ops.aten.mm.default
Step = Callable[[Tensor], Tensor]


def unseen(x: Tensor) -> Tensor:
    """Writes what no program tells: its recomputation gives other values."""
    y = x.sin()
    replace_unseen(y, 0, 5)
    return y.exp().sin()


def mismatch(session: Session, fn: Step = unseen, **options: Any) -> Any:
    x, _ = inputs()
    y = session.checkpoint(fn, x, **options)
    with pytest.raises(torchs.CheckpointError) as caught:
        y.sum().backward()
    assert x.grad is None
    assert isinstance(caught.value, CheckpointError)
    return caught.value


@pytest.mark.parametrize(("count", "change"), [(2, "fewer"), (4, "more")])
def test_fewer_or_more_tensors_on_recomputation(
    count: int, change: str, session: Session, returns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = vars(Replay)["digests"].fget
    assert digests is not None
    changed = (
        (lambda replay: digests(replay)[:-1]) if change == "fewer" else (lambda replay: [*digests(replay), b"more"])
    )
    monkeypatch.setattr(Replay, "digests", property(changed))
    session.close()  # the trainer recomputes
    error = mismatch(session, lambda x: x.sin().sin().exp(), returns=returns)
    assert (error.saved_forward, error.saved_recomputed) == (3, count)
    assert "saved 3 tensors" in str(error)
    assert f"saved {count}" in str(error)


@pytest.mark.parametrize("check", DETERMINISM_CHECKS)
def test_other_values_are_not_let_through_whatever_the_determinism_check(
    check: str, session: Session, returns: str
) -> None:
    error = mismatch(session, returns=returns, determinism_check=check)
    assert error.positions == [1, 2]  # sin saved what it was given, exp what it returned
    assert "2 of 3 tensors differ between forward and recomputation on the trainer" in str(error)
    assert str(error).count("saved by aten.") == 2
    assert session.report().segments[0].fallbacks == 1  # after the worker's values had differed too


@pytest.mark.parametrize("by_setting", [False, True])
def test_debug_shows_the_operators_of_both_runs(by_setting: bool, session: Session) -> None:
    with torchs.set_checkpoint_debug_enabled(True if by_setting else None):
        error = mismatch(session, debug=not by_setting)
    assert isinstance(error.__cause__, CheckpointError)
    lines = str(error).splitlines()
    forward, recomputation = lines.index("Ops of forward:"), lines.index("Ops of recomputation:")
    in_forward, in_recomputation = lines[forward:recomputation], lines[recomputation:]
    for op in ("sin", "exp"):
        assert any(f"aten.{op}.default(float32[2, 8]) -> float32[2, 8]  at {__file__}" in line for line in in_forward)
        assert any(f"aten.{op}.default" in line for line in in_recomputation)


def test_the_setting_turns_debug_off_too(session: Session) -> None:
    with torchs.set_checkpoint_debug_enabled(False):
        error = mismatch(session, debug=True)
    assert error.__cause__ is None


def test_debug_recomputes_on_the_trainer_and_gives_the_same_gradients(session: Session, returns: str) -> None:
    x, _ = inputs()
    session.checkpoint(lambda x: x.sin().exp(), x, debug=True, returns=returns).sum().backward()
    assert torch.equal(grad_of(x), torch.autograd.grad(x.sin().exp().sum(), x)[0])
    assert session.report().segments[0].decisions == {Decision.TRAINER: 1}


def test_debug_by_setting_with_a_context_of_the_callers_own_is_refused(checkpoint: Checkpoint) -> None:
    for call in (torch_checkpoint, checkpoint):
        with (
            torchs.set_checkpoint_debug_enabled(True),
            pytest.raises(ValueError, match="debug=True is incompatible with non-default context_fn"),
        ):
            call(torch.sin, inputs()[0], context_fn=lambda: None)


def test_a_checkpoint_error_is_a_runtime_error_and_torchs() -> None:
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
    ours = torch.autograd.grad(session.checkpoint(products, x, w, returns=returns, **options).sum(), [x, w])
    assert differing(ours, torch.autograd.grad(products(x, w).sum(), [x, w])) == []
    after = session.report()
    assert after.remote == before.remote + 1
    assert Decision.GRADIENTS not in after.segments[0].decisions
    assert after.segments[0].reasons == {}
    return after.down_bytes - before.down_bytes


TWO_PRODUCTS = 2 * WEIGHTS * WEIGHTS * 4


@pytest.mark.parametrize("policy", KEPT)
def test_what_the_policy_keeps_does_not_come_back(policy: str, session: Session) -> None:
    whole = down_bytes(session, "activations")
    kept = down_bytes(session, "activations", context_fn=selective(KEPT[policy]))
    assert whole - kept > 0.95 * TWO_PRODUCTS


@pytest.mark.parametrize("asked", ["gradients", "auto"])
def test_a_policy_means_activations(asked: str, session: Session) -> None:
    whole = down_bytes(session, "activations")
    assert whole - down_bytes(session, asked, context_fn=selective([MM])) > 0.95 * TWO_PRODUCTS


@pytest.mark.parametrize("policy", NOT_KEPT)
def test_what_the_policy_does_not_keep_comes_back(policy: str, session: Session) -> None:
    whole = down_bytes(session, "activations")
    returned_bytes = down_bytes(session, "auto", context_fn=selective(NOT_KEPT[policy]))
    assert abs(returned_bytes - whole) < 0.05 * whole


def test_the_policy_is_asked_about_each_op_in_forward_alone(checkpoint: Checkpoint) -> None:
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


def test_offloaded_tensors_are_copies_of_their_own(session: Session) -> None:
    x, w = operands()
    packed: list[Tensor] = []
    outputs: list[Tensor] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        outputs.extend([ctx.op_output] if op is MM else [])
        return CheckpointPolicy.MUST_CPU_OFFLOAD if op is MM else CheckpointPolicy.MUST_RECOMPUTE

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = session.checkpoint(products, x, w, context_fn=selective(policy))
    kept = [tensor for tensor in packed if any(torch.equal(tensor.cpu(), output.cpu()) for output in outputs)]
    assert len(kept) == 2
    assert not {tensor.data_ptr() for tensor in kept} & {output.data_ptr() for output in outputs}
    y.sum().backward()


@pytest.mark.parametrize("policy", [torch.ops.aten.mm, "mm"])
def test_bad_lists_of_a_policy_are_torchs_errors(policy: Any, checkpoint: Checkpoint) -> None:
    for call in (torch_checkpoint, checkpoint):
        with pytest.raises(ValueError, match="Expected op in `op_list` to be an OpOverload"):
            call(products, *operands(), context_fn=selective([policy]))
        with pytest.raises(TypeError, match="policy_fn_or_list must be either a function or a list of ops"):
            call(products, *operands(), context_fn=selective(3))


def mutates(x: Tensor) -> Tensor:
    kept = x.sin()
    kept.mul_(2)
    return kept.exp().cos()


def test_a_kept_tensor_that_is_mutated_is_torchs_error(checkpoint: Checkpoint) -> None:
    for call in (torch_checkpoint, checkpoint):
        y = call(mutates, inputs()[0], context_fn=selective([SIN]))
        with pytest.raises(RuntimeError, match="Tensor cached during selective activation checkpoint has been mutated"):
            y.sum().backward()


@as_without_checkpointing
def test_a_kept_tensor_may_be_mutated_if_that_is_allowed(checkpoint: Checkpoint) -> list[Tensor | None]:
    x, _ = inputs()
    options = {"context_fn": selective([SIN], allow_cache_entry_mutation=True)}
    checkpoint(mutates, x, **({} if checkpoint is plainly else options)).sum().backward()
    return [x.grad]


def test_a_mutation_that_is_allowed_gives_no_wrong_gradient(checkpoint: Checkpoint) -> None:
    def fn(x: Tensor) -> Tensor:
        kept = x.sin()
        y = kept.cos()
        kept.mul_(2)
        return y

    y = checkpoint(fn, inputs()[0], context_fn=selective([SIN], allow_cache_entry_mutation=True))
    with pytest.raises(CheckpointError, match="was kept on the trainer"):
        y.sum().backward()


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.MUST_SAVE])
@as_without_checkpointing
def test_a_policy_may_keep_everything(policy: CheckpointPolicy, checkpoint: Checkpoint) -> list[Tensor | None]:
    """Copying to the host is no write of the function's, and what is expanded comes back so."""
    x, w = operands()
    options = {} if checkpoint is plainly else {"context_fn": selective(lambda *_, **__: policy)}
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: torch.empty_like(t).copy_(t), lambda t: t)
    with hooks if checkpoint is not plainly else nullcontext():
        y = checkpoint(lambda x: products(x, w).sum().sin().expand(3, 4).exp(), x, **options)
    z = checkpoint(lambda x: products(x, w).sum().sin().expand(3, 4).exp(), x, **options)
    (y.sum() + z.sum()).backward()
    return [x.grad, w.grad]


@on_the_host(NO_SPARSE)
@as_without_checkpointing
def test_a_policy_keeps_no_sparse_tensors(checkpoint: Checkpoint) -> list[Tensor | None]:
    matrix, (x, w) = torch.eye(WEIGHTS).to_sparse(), operands()
    options = {"context_fn": selective(lambda *_, **__: CheckpointPolicy.MUST_SAVE)}
    fn = lambda x: torch.sparse.mm(matrix * 2, x.sin() @ w).exp()  # noqa: E731
    checkpoint(fn, x, **({} if checkpoint is plainly else options)).sum().backward()
    return [x.grad, w.grad]


def test_a_second_backward_under_a_policy_works(checkpoint: Checkpoint) -> None:
    x, w = operands()
    y = checkpoint(products, x, w, context_fn=selective([MM]))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    (expected,) = torch.autograd.grad(products(x, w).sum(), x)
    assert torch.equal(grad_of(x), expected + expected)
    theirs = torch_checkpoint(products, x, w, context_fn=selective([MM]))
    theirs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="Trying to backward an extra time"):
        theirs.sum().backward()


@pytest.mark.parametrize("custom", [False, True], ids=["program", "kept from a custom function on"])
def test_what_a_policy_must_save_does_not_run_again_on_the_trainer(custom: bool, session: Session) -> None:
    session.close()
    ran = []
    for call in (torch_checkpoint, session.checkpoint):
        (x, w), seen = operands(), Operators()
        fn = (lambda x: TimesOne.apply(products(x, w)).exp()) if custom else lambda x: products(x, w)  # noqa: B023
        y = call(fn, x, context_fn=selective([MM]))
        with seen:
            y.sum().backward()
        assert torch.equal(
            grad_of(x), torch.autograd.grad(products(x, w).exp().sum() if custom else products(x, w).sum(), x)[0]
        )
        ran.append([seen.seen.count(str(op)) for op in (MM, SIN)])
    theirs, ours = ran
    assert theirs[0] == ours[0] == 4  # those of backward itself
    assert ours[1] <= theirs[1]


def with_a_cast_from_before(checkpoint: Checkpoint) -> list[Tensor | None]:
    """Forward takes it from autocast's cache, a recomputation makes it."""
    (x, w), policy = operands(), selective([torch.ops.aten._to_copy.default])
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        before = x.detach() @ w
        y = checkpoint(lambda x: (x @ w).float().sin(), x * 2, context_fn=policy)
    (before.float() + y).sum().backward()
    return [x.grad, w.grad]


def with_an_op_that_fails(checkpoint: Checkpoint) -> list[Tensor | None]:
    """Below autograd some of it has run by then."""
    x, w = operands()

    def fn(x: Tensor) -> Tensor:
        with suppress(RuntimeError):
            nn.functional.linear(x.unsqueeze(1), w * 2, torch.zeros(3))
        return (x @ w).exp() @ w

    checkpoint(fn, x * 1, context_fn=selective([MM])).sum().backward()
    return [x.grad, w.grad]


def with_a_kept_result_that_is_written_to(checkpoint: Checkpoint) -> list[Tensor | None]:
    x, _ = operands()
    policy = selective([torch.ops.aten.add.Tensor], allow_cache_entry_mutation=True)

    def fn(x: Tensor) -> Tensor:
        y = x * 2 + 1
        before = y.exp()
        return y.sin_() * before

    checkpoint(fn, x * 1, context_fn=policy).sum().backward()
    return [x.grad]


@pytest.mark.parametrize(
    "case", [with_a_cast_from_before, with_an_op_that_fails, with_a_kept_result_that_is_written_to]
)
def test_where_kept_results_do_not_fit_the_ops_run_again(case: Any, session: Session) -> None:
    def without_policy(fn: Step, x: Tensor, context_fn: object) -> Tensor:
        return fn(x)

    session.close()
    seed()
    expected = case(without_policy)
    seed()
    assert differing(case(session.checkpoint), expected) == []


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


def test_contexts_of_the_callers_own_are_entered_once_each(session: Session, returns: str) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        forward, recomputation, calls = Entered(), Entered(2.0), []
        linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()

        def fn(h: Tensor) -> Tensor:
            calls.append(1)
            return linear(h).sin() * Entered.scale

        options = {} if checkpoint is plainly else {"context_fn": lambda: (forward, recomputation), "returns": returns}
        checkpoint(fn, h, **options).sum().backward()
        if checkpoint is not plainly:
            assert (forward.count, recomputation.count, len(calls)) == (1, 1, 1)
        return [x.grad, linear.weight.grad]

    same(case, session.checkpoint)
    (segment,) = session.report().segments
    assert segment.decisions == {Decision.TRAINER: 1}
    assert any("context_fn" in reason for reason in segment.reasons)


class Operators(TorchDispatchMode):
    """Notes what runs in it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(op))
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("saved_here", [False, True], ids=["recomputed", "kept"])
def test_dispatch_modes_see_the_functions_ops_alone(saved_here: bool, session: Session) -> None:
    """As under torch's checkpoint, which detaches what a recomputation saves. Nothing is recomputed of what is kept."""
    seen = []
    for call in (torch_checkpoint, session.checkpoint):
        forward, recomputation = Operators(), Operators()
        x, _ = inputs()
        y = call(
            lambda x: TimesOne.apply(x).exp() if saved_here else x.exp(),
            x,
            context_fn=lambda: (forward, recomputation),  # noqa: B023
        )
        seen.append(list(forward.seen))
        y.sum().backward()
        seen.append(list(recomputation.seen))
    assert seen[2] == seen[0]
    assert seen[3] == ([] if saved_here else seen[1])

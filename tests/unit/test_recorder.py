"""The recorder alone: what it notes, what it refuses and by which sign, and that it changes nothing."""

import gc
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F  # noqa: N812  torch's own name for it
from torch.utils import _pytree as pytree

from backhaul._forward import graph_cut
from backhaul_runtime.program.codec import encode_program
from backhaul_runtime.program.op_list import allowed_ops
from backhaul_runtime.program.program import Program
from backhaul_runtime.record.recorder import Recorder
from backhaul_runtime.tensors.layout import MAX_RANK, copy_exact
from backhaul_runtime.torch_internals import pre_dispatch
from support.interrupts import interrupted_at


def record(fn: Callable[..., Any], *args: Any, allowed: frozenset[str] | None = None) -> tuple[Recorder, Program]:
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    recorder = Recorder(tensors, allowed or allowed_ops(), lambda tensor, layout, _: copy_exact(tensor, layout))

    def pack(tensor: Tensor) -> Tensor:
        recorder.note_saved(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), recorder:
        returned = fn(*args)
    outputs = [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return recorder, recorder.finish(outputs)


def refusal(fn: Callable[..., Any], *args: Any) -> str:
    recorder, _ = record(fn, *args)
    assert recorder.recording.refusal is not None
    return recorder.recording.refusal


def why_not_cut(fn: Callable[..., Tensor], x: Tensor) -> str:
    recorder = Recorder([x], allowed_ops(), lambda tensor, layout, _: copy_exact(tensor, layout))
    with recorder:
        returned = fn(x)
    assert recorder.recording.refusal is None
    return graph_cut.why_not_cut(recorder, [returned])


def test_composite_ops_are_noted_not_their_parts() -> None:
    _, program = record(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), torch.randn(2, 4))
    assert [node.op for node in program.nodes] == ["aten.layer_norm.default", "aten.linear.default"]
    assert [source.requires_grad for source in program.sources] == [False, True, True, True, True]


def test_equal_layers_have_one_program_whatever_their_weights() -> None:
    programs = [record(nn.TransformerEncoderLayer(8, 2, 16), torch.randn(3, 2, 8))[1] for _ in range(2)]
    assert len({encode_program(program) for program in programs}) == 1


@pytest.mark.parametrize("other", [2.0, 3, True])
def test_another_number_makes_another_program(other: object) -> None:
    x = torch.randn(2, 4, requires_grad=True)
    programs = [record(lambda x, s=s: x * s, x)[1] for s in (2, other)]
    assert len({encode_program(program) for program in programs}) == 2


def test_nothing_of_the_call_is_changed() -> None:
    module = nn.TransformerEncoderLayer(8, 2, 16)
    x = torch.randn(3, 2, 8)
    torch.manual_seed(1)
    plain, state = module(x), torch.get_rng_state()
    torch.manual_seed(1)
    recorder = Recorder([x], allowed_ops(), lambda tensor, layout, _: copy_exact(tensor, layout))
    with recorder:
        recorded = module(x)
    assert torch.equal(plain, recorded)
    assert torch.equal(state, torch.get_rng_state())


def test_a_mode_that_an_interrupt_has_kept_from_being_left() -> None:
    recorder = Recorder([], allowed_ops(), lambda tensor, layout, _: copy_exact(tensor, layout))
    recorder.__enter__()
    record(torch.sin, torch.randn(3, requires_grad=True))
    assert not torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch)
    assert not torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PythonDispatcher)


def test_exceptions_of_the_call_leave_it_unchanged_and_nothing_switched_on() -> None:
    with pytest.raises(ZeroDivisionError):
        record(lambda x: x + 1 / 0, torch.randn(2))
    recorder, _ = record(lambda x: x * 2, torch.randn(2, requires_grad=True))
    torch.ones(2) + 1
    assert len(recorder.call.builder.program().nodes) == 1


def test_an_op_whose_exception_is_caught_is_not_noted() -> None:
    weight = torch.ones(3)

    def fn(x: Tensor) -> Tensor:
        try:
            torch.mm(x, x)
        except RuntimeError:
            return x * weight
        return x

    recorder, program = record(fn, torch.randn(2, 3, requires_grad=True))
    assert [node.op for node in program.nodes] == ["aten.mul.Tensor"]
    assert program.saved_count == len(recorder.recording.saved) == 1  # mm had saved its operands


def test_arguments_are_copied_and_parameters_are_not() -> None:
    linear, x = nn.Linear(4, 4), torch.randn(2, 4)
    recorder, _ = record(linear, x)
    held = [source.value.data_ptr() for source in recorder.recording.sources]
    assert held[0] != x.data_ptr()
    assert held[1:] == [linear.weight.data_ptr(), linear.bias.data_ptr()]


def test_what_an_op_writes_to_is_copied_before() -> None:
    norm = nn.BatchNorm1d(4)
    recorder, _ = record(norm, torch.randn(8, 4))
    written = [source for source in recorder.recording.sources if source.is_written]
    assert [tuple(source.value.shape) for source in written] == [(), (4,), (4,)]
    assert torch.equal(written[1].value, torch.zeros(4))
    assert norm.running_mean is not None
    assert not torch.equal(norm.running_mean, torch.zeros(4))


@pytest.mark.slow
def test_intermediate_tensors_are_not_kept() -> None:
    alive: list[int] = []

    def fn(x: Tensor) -> Tensor:
        y = x * 2
        reference = weakref.ref(y.untyped_storage())
        y = y + 1
        gc.collect()
        alive.append(reference() is not None)
        return y

    record(fn, torch.randn(1000))
    assert alive == [False]


def test_what_the_recorder_does_not_see_takes_torchs_own_way() -> None:
    def function(x: Tensor) -> Tensor:
        with torch._C._DisableTorchDispatch():
            torch.sin(x.detach())
        return torch.sin(x)

    x = torch.randn(2, requires_grad=True)
    recorded = [record(function, x)[1] for _ in range(2)]
    traced = make_fx(torch.sin, pre_dispatch=True)(x)
    recorded.append(record(function, x)[1])
    assert [[node.op for node in program.nodes] for program in recorded] == [["aten.sin.default"]] * 3
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [torch.ops.aten.sin.default]


@pytest.mark.slow
def test_no_compiler_is_imported() -> None:
    record(nn.Linear(4, 4), torch.randn(2, 4))
    import subprocess

    code = (
        "import torch; from backhaul_runtime.record.recorder import Recorder; import sys\n"
        "with Recorder([], frozenset(['aten.ones.default']), None): torch.ones(2)\n"
        "sys.exit('torch._dynamo' in sys.modules or 'torch._inductor' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class _Twice(HigherOrderOperator):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x)


class Subclass(Tensor):
    pass


def test_every_refusal_has_its_sign() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    shared = torch.zeros(8)
    left, right = shared[:4], shared[4:]

    def writes_shared(x: Tensor) -> Tensor:
        y = x * left * right
        left.add_(1)
        return y

    def replaces(x: Tensor) -> Tensor:
        y = x * 2
        z = y + 1
        y.data = torch.zeros(4, 4)
        return y * z

    def inference(x: Tensor) -> Tensor:
        with torch.inference_mode():
            scale = torch.ones(4) * 2
        return x * scale.clone()

    assert "an alias of an interior tensor" in refusal(lambda x: x * torch.ones(4).as_subclass(Subclass), x)
    assert "aten.to_sparse.default is not on the list" in refusal(lambda x: torch.eye(4).to_sparse() @ x, x)
    assert "memory that two sources share" in refusal(writes_shared, x)
    assert "was replaced inside" in refusal(replaces, x)
    assert "inference mode" in refusal(inference, x)
    assert "alias of an interior tensor" in refusal(lambda x: (y := x * 2) * y.data, x)
    assert "hook was registered" in why_not_cut(lambda x: ((y := x * 2).register_hook(print), y)[1], x)
    assert "no recorded op returned one of its outputs" in why_not_cut(lambda x: x, x)


def test_what_came_before_a_refusal_is_a_program() -> None:
    weight, late = (torch.randn(4, requires_grad=True) for _ in range(2))

    def fn(x: Tensor) -> Tensor:
        y = F.dropout(x * weight).exp()
        return (y * torch.ones(4).as_subclass(Subclass)) * F.dropout(late * 2)

    recorder, program = record(fn, torch.randn(4))
    assert [node.op for node in program.nodes] == ["aten.mul.Tensor", "aten.dropout.default", "aten.exp.default"]
    assert program.outputs == ()
    assert program.saved_count == 3  # x, the dropout's mask and exp's result
    assert len(program.sources) == len(recorder.recording.sources) == 2
    assert len(recorder.recording.generator_states) == 1


def test_a_source_is_copied_before_it_is_written_to_also_after_a_refusal() -> None:
    buffer = torch.ones(2 << 20)  # too large to be copied at first use

    def fn(x: Tensor) -> Tensor:
        y = (x * buffer).exp()
        y = y * torch.ones(()).as_subclass(Subclass)
        buffer.zero_()
        return y

    recorder, _ = record(fn, torch.ones((), requires_grad=True))
    assert torch.equal(recorder.recording.sources[1].value, torch.ones(2 << 20))


def test_what_is_written_after_a_refusal_is_no_source() -> None:
    buffer = torch.ones(4)

    def fn(x: Tensor) -> Tensor:
        y = x.exp() * torch.ones(()).as_subclass(Subclass)
        buffer.zero_()
        return y

    recorder, _ = record(fn, torch.ones((), requires_grad=True))
    assert len(recorder.call.memory.sources.tensors) == 1


@pytest.mark.parametrize(
    "unused", [torch.eye(4).to_sparse(), torch.eye(4).as_subclass(Subclass)], ids=["sparse", "subclass"]
)
def test_an_argument_that_no_replay_can_have_hinders_no_write_elsewhere(unused: Tensor) -> None:
    buffer = torch.ones(4)
    recorder, _ = record(lambda x, _: (x * buffer.mul_(2)).exp(), torch.randn(4, requires_grad=True), unused)
    assert recorder.recording.refusal is None


def test_a_tensor_that_the_call_has_made_may_be_written_to_whatever_its_rank() -> None:
    def fn(x: Tensor) -> Tensor:
        made = torch.empty((1,) * MAX_RANK + (4,))
        return made.copy_(x).flatten().exp()

    recorder, _ = record(fn, torch.randn(4, requires_grad=True))
    assert recorder.recording.refusal is None


def test_an_argument_whose_base_is_written_to_first() -> None:
    """It would enter with the history of the write."""
    base = torch.randn(3, 4, requires_grad=True) * 2
    assert "memory that two sources share" in refusal(lambda row: (base.mul_(2), row.exp())[1], base[0])


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_view_from_outside_may_be_written_to_where_autograd_does_not_follow(requires_grad: bool) -> None:
    row = torch.randn(3, 4, requires_grad=requires_grad).mul(2)[0]

    def fn(x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not requires_grad):
            row.mul_(2)
        return (x * row).exp()

    recorder, _ = record(fn, torch.randn(4, requires_grad=True))
    assert recorder.recording.refusal is None


def test_an_op_off_the_list_is_named() -> None:
    recorder, program = record(torch.relu, torch.randn(2), allowed=frozenset(["aten.add.Tensor"]))
    assert program.nodes == ()
    assert recorder.recording.refusal == "the op aten.relu.default is not on the list of ops a worker runs"


def test_higher_order_ops_run_and_are_refused() -> None:
    twice = _Twice("twice")
    twice.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)(lambda x: x * 2)
    twice.py_impl(torch._C.DispatchKey.Autograd)(lambda x: x * 2)
    x = torch.randn(3, requires_grad=True)
    recorder, _ = record(lambda x: twice(x) + 1, x)
    assert recorder.recording.refusal == "the higher-order op twice"


def test_states_that_the_draw_before_leaves_are_not_sent() -> None:
    own = torch.Generator()

    def fn(x: Tensor) -> Tensor:
        own.set_state(torch.get_rng_state())
        x = nn.functional.dropout(x, 0.5) + nn.functional.dropout(x, 0.5)
        x = x * torch.rand(4, generator=own)
        own.set_state(torch.get_rng_state())
        x = x * torch.rand(4, generator=own)  # the default generator has this state too
        x = nn.functional.dropout(x, 0.5)
        torch.manual_seed(1)
        return nn.functional.dropout(x, 0.5)

    torch.manual_seed(0)
    recording = record(fn, torch.randn(4, requires_grad=True))[0].recording
    assert [bool(state) for state in recording.states_to_send] == [True, False, True, True, False, True]
    assert all(recording.generator_states)


def test_a_path_that_another_thread_has_stored_is_taken() -> None:
    """Torch itself raises an error if its cache of dispatch has got the path that it looks up after a miss."""
    record(torch.erfinv, torch.zeros(2, requires_grad=True))
    op, key = torch.ops.aten.erfinv.default, torch._C.DispatchKey.PreDispatch
    assert op._get_dispatch(key) is op._dispatch_cache[key]


def assert_in_no_mode() -> None:
    assert torch._C._is_multithreading_enabled()
    for key in (torch._C.DispatchKey.PreDispatch, torch._C.DispatchKey.PythonDispatcher):
        assert not torch._C._dispatch_tls_is_dispatch_key_included(key)


def test_ctrl_c_while_a_call_begins_leaves_nothing_behind() -> None:
    enter = pre_dispatch.PreDispatchMode.__enter__.__code__

    def counts(frame: FrameType) -> bool:
        return frame.f_code is enter

    number, x = 0, torch.ones(3, requires_grad=True)
    while interrupted_at(number, lambda: record(torch.sin, x), counts):
        number += 1
        assert_in_no_mode()
    assert number > 5


def test_ctrl_c_that_keeps_an_op_from_returning_to_the_mode_leaves_nothing_behind() -> None:
    def fn(_: Tensor) -> None:
        pre_dispatch._stack.set(pre_dispatch._OURS, None)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(fn, torch.ones(3, requires_grad=True))
    assert_in_no_mode()

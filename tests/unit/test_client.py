"""The client's small parts."""

import copy
import io
import itertools
import math
import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul import NotRemoteError, SettingError, WorkerLostError, wrap
from backhaul._config import Config, resolve
from backhaul._forward.checkpoint import name_of
from backhaul._torch_api.call_options import options_of
from backhaul._torch_api.wrap import SegmentModule, unwrap
from backhaul._worker_client.connection import deadlines
from backhaul._worker_client.connection.deadlines import Liveness, longest_execution_s, longest_queue_s
from conftest import QUIET_S
from support.loopback import Loopback


def test_silence_is_what_the_waiter_was_awake_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock here jumps at each reading, as if the trainer had been stopped for a minute in each slice."""
    minutes, checks = itertools.count(step=60.0), itertools.count()
    monkeypatch.setattr(deadlines, "monotonic", lambda: next(minutes))
    with pytest.raises(WorkerLostError, match="silent for 0.2 s") as caught:
        Liveness(0.2).wait(Future(), lambda: next(checks))
    assert caught.value.status == "SILENT"
    assert next(checks) == 2  # one in each slice of 0.1 s


def test_a_queue_that_is_longer_than_the_work_is_not_waited_for(usual_limits: None) -> None:
    assert (longest_queue_s(0.1), longest_queue_s(3.0)) == (1.0, 6.0)
    assert (longest_execution_s(0.1), longest_execution_s(3.0)) == (5.0, 12.0)


def test_a_time_that_is_unknown_limits_nothing() -> None:
    assert longest_queue_s(None) == longest_execution_s(None) == math.inf


def test_limits_do_not_expire_in_tests_that_are_not_about_them() -> None:
    assert longest_queue_s(0.0) == longest_execution_s(0.0) == resolve().silence_s == QUIET_S


@pytest.mark.slow
def test_signs_of_life_prolong_a_wait() -> None:
    watch = Liveness(0.3)
    future: Future[str] = Future()

    def live() -> None:
        for _ in range(6):
            threading.Event().wait(0.1)
            watch.sign()
        future.set_result("done")

    threading.Thread(target=live).start()
    assert watch.wait(future) == "done"


def test_options_are_not_the_functions_own_arguments() -> None:
    options, rest = options_of(Config(strict=True), {"use_reentrant": False, "early_stop": False, "mask": 3})
    assert rest == {"mask": 3}
    assert options.strict
    assert not options_of(Config(strict=True), {"strict": False})[0].strict
    with pytest.raises(ValueError, match="returns='both' is not one of"):
        options_of(Config(), {"returns": "both"})


def test_a_context_of_the_callers_own_runs_here(loopback: Loopback, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(3, requires_grad=True)
    for _ in range(2):
        loopback.checkpoint(torch.sin, x, debug=True).sum().backward()
    assert [record.getMessage() for record in caplog.records] == [
        "Segment sin is recomputed on the trainer: debug=True traces its recomputation"
    ]
    with pytest.raises(NotRemoteError, match="debug=True"):
        loopback.checkpoint(torch.sin, x, debug=True, strict=True)


def test_names_are_what_people_call_things() -> None:
    import functools

    linear = nn.Linear(2, 2)
    assert [name_of(f) for f in (linear, linear.forward, functools.partial(linear), torch.sin, lambda x: x)] == [
        "Linear",
        "Linear",
        "Linear",
        "sin",
        "test_names_are_what_people_call_things.<lambda>",
    ]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def test_wrapping_changes_no_name(loopback: Loopback) -> None:
    plain = Model()
    wrapped: Any = wrap(copy.deepcopy(plain), nn.Sequential, session=loopback.session)
    assert isinstance(wrapped.layers[0], SegmentModule)
    assert [n for n, _ in wrapped.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in wrapped.named_buffers()] == [n for n, _ in plain.named_buffers()]
    assert list(dict(wrapped.named_modules())) == list(dict(plain.named_modules()))
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    wrapped.load_state_dict(plain.state_dict())
    plain.load_state_dict(wrapped.state_dict())
    assert wrapped.get_parameter("layers.0.0.weight") is wrapped.layers[0][0].weight
    x = torch.randn(8, 4)
    assert torch.equal(wrapped(x), plain(x))
    assert loopback.report().segments[0].calls == 2


def test_wrapped_models_are_copied_and_saved(loopback: Loopback) -> None:
    wrapped: Any = wrap(Model(), nn.Sequential, session=loopback.session)
    copied = copy.deepcopy(wrapped)
    assert isinstance(copied.layers[1], SegmentModule)
    assert copied.layers[1][0].weight is not wrapped.layers[1][0].weight
    copied(torch.randn(8, 4)).sum().backward()
    assert loopback.report().remote == 2
    file = io.BytesIO()
    torch.save(wrapped, file)
    assert b"backhaul" not in file.getvalue()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded.layers[0]) is nn.Sequential
    assert list(loaded.state_dict()) == list(wrapped.state_dict())


def test_unwrapping_undoes_it(loopback: Loopback) -> None:
    model = Model()
    layers = list(model.layers)
    assert wrap(wrap(model, nn.Sequential, session=loopback.session), nn.Linear, session=loopback.session) is model
    assert isinstance(model.embed, SegmentModule)
    assert unwrap(model) is model
    assert list(model.layers) == layers
    assert not any(isinstance(module, SegmentModule) for module in model.modules())


def test_attributes_of_a_wrapped_module_are_those_inside(loopback: Loopback) -> None:
    wrapped: Any = wrap(Model(), nn.Sequential, session=loopback.session)
    inside = wrapped.layers[0]._checkpoint_wrapped_module
    wrapped.layers[0].scale = 3
    wrapped.layers[0].adapter = nn.Linear(4, 4)
    assert inside.scale == 3
    assert "adapter" in inside._modules
    del wrapped.layers[0].adapter
    assert not hasattr(inside, "adapter")
    assert not wrapped.layers[0].eval().training
    assert not inside[0].training


def test_arguments_of_a_wrapped_module_are_its_own_whatever_their_names(loopback: Loopback) -> None:
    class Named(nn.Linear):
        def forward(self, input: Tensor, **named: int) -> Tensor:
            return super().forward(input) * sum(named.values())

    model = nn.Sequential(Named(3, 3))
    names = ("strict", "returns", "durability", "debug", "session", "function", "context_fn", "own")
    given: dict[str, Any] = dict(zip(names, range(1, 9), strict=True))
    x = torch.randn(2, 3)
    expected = model[0](x, **given)
    wrapped: Any = wrap(model, Named, session=loopback.session, returns="gradients")
    assert torch.equal(wrapped[0](x, **given), expected)


def test_a_module_in_two_places_is_wrapped_in_both(loopback: Loopback) -> None:
    shared = nn.Sequential(nn.Linear(4, 4))
    model: Any = wrap(nn.ModuleList([shared, shared]), nn.Sequential, session=loopback.session)
    assert model[0] is model[1]
    assert isinstance(model[1], SegmentModule)
    unwrapped: Any = unwrap(model)
    assert unwrapped[1] is shared


def test_wrapping_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="Model has no unwrapped module"):
        wrap(Model(), nn.Conv2d)


@pytest.mark.parametrize(
    ("model", "given", "why"),
    [
        (nn.Linear, {}, "wrap got a type as the model"),
        (Model(), {"layers": [nn.Sequential]}, "must be a class of modules"),
        (Model(), {"layers": "Sequential"}, "must be a class of modules"),
        (Model(), {"layers": (nn.Sequential, 3)}, "must be a class of modules"),
        (Model(), {"segment_layers": 0}, "segment_layers=0 must be a whole number of at least 1"),
        (Model(), {"segment_layers": "2"}, "segment_layers='2' must be"),
        (Model(), {"segment_layers": 1.5}, "segment_layers=1.5 must be"),
        (Model(), {"kept_layers": -1}, "kept_layers=-1 must be a whole number of at least 0"),
        (Model(), {"kept_layers": 3}, "kept_layers=3 is more than the 2 modules .* `backhaul plan`"),
    ],
)
def test_wrong_arguments_of_wrap_are_named(model: Any, given: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingError, match=why):
        wrap(model, **{"layers": nn.Sequential, **given})


def test_wrapped_modules_are_known_to_others(loopback: Loopback) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    wrapped: Any = wrap(Model(), nn.Sequential, session=loopback.session, returns="activations")
    assert sum(isinstance(module, CheckpointWrapper) for module in wrapped.modules()) == 2


def test_torchs_own_wrapper_takes_our_checkpoint(loopback: Loopback) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    module = checkpoint_wrapper(nn.Linear(4, 4), checkpoint_fn=loopback.checkpoint)
    module(torch.randn(2, 4)).sum().backward()
    assert loopback.report().remote == 1


def test_without_a_session_there_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backhaul._api._opened", [])
    with pytest.raises(backhaul.SessionClosedError, match=r"call backhaul.connect\(\) first"):
        backhaul.checkpoint(torch.sin, torch.randn(2, requires_grad=True))


def test_a_report_reads_well(loopback: Loopback) -> None:
    x = torch.randn(3, requires_grad=True)
    loopback.checkpoint(torch.sin, x, returns="gradients").sum().backward()
    loopback.checkpoint(lambda x: (y := x * 2) * y.data, x).sum().backward()
    lines = str(loopback.report()).splitlines()
    assert lines[0].split() == ["segment", "calls", "gradients", "activations", "trainer", "kept", "wait", "up", "down"]
    assert lines[1].split()[:6] == ["sin", "1", "1", "0", "0", "0"]
    assert lines[3] == "  1 kept on the trainer: an alias of an interior tensor that no op made (.data, NumPy)"

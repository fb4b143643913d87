import dataclasses
import platform
import threading

import pytest
import torch

from backhaul import ProgramError
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.torch_internals.ambient_settings import Value


@pytest.mark.slow
def test_a_state_is_put_back() -> None:
    before = ambient_state.capture()
    with ambient_state.restored():
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(2)
        torch.use_deterministic_algorithms(True)
        torch.set_autocast_enabled("cpu", True)
        torch.backends.mkldnn.set_flags(_enabled=False)
        assert ambient_state.capture() != before
    assert ambient_state.capture() == before


def test_a_setting_that_cannot_be_put_back_keeps_no_other_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients left off, nothing would be trained any more."""
    threads = ambient_state.settings()["threads"]

    def failing() -> None:
        raise OSError("injected")

    broken = {**ambient_state.settings(), "threads": dataclasses.replace(threads, read=failing)}
    with pytest.raises(OSError, match="injected"), ambient_state.restored():
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)
        monkeypatch.setattr(ambient_state, "settings", lambda: broken)
    assert torch.is_grad_enabled() and not torch.are_deterministic_algorithms_enabled()


def test_a_state_is_applied_in_another_thread() -> None:
    with torch.autocast("cpu", dtype=torch.float16), torch.no_grad():
        state = ambient_state.capture()
    seen: list[object] = []

    def apply() -> None:
        ambient_state.apply(state, ambient_state.capture())
        seen.extend([torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")])

    thread = threading.Thread(target=apply)
    thread.start()
    thread.join()
    assert seen == [False, True, torch.float16]


def test_a_state_travels_by_name() -> None:
    state = ambient_state.capture()
    assert ambient_state.from_mapping(ambient_state.to_mapping(state)) == state
    assert ambient_state.from_mapping({"threads": 7})[list(ambient_state.settings()).index("threads")] == 7


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("no such setting", 1),
        ("threads", 0),
        ("threads", 1 << 40),
        ("threads", True),
        ("default_dtype", "torch.int64"),
        ("default_dtype", "os"),
        ("deterministic", 9),
        ("mkldnn_matmul_precision", "fastest"),
    ],
)
def test_values_that_can_not_be(name: str, value: Value) -> None:
    with pytest.raises(ProgramError):
        ambient_state.from_mapping({name: value})


def test_a_host_without_cuda_refuses_its_settings() -> None:
    with pytest.raises(ProgramError, match="no setting"):
        ambient_state.from_mapping({"cublas_fp16_reduction": "1,1"})


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have what is asked for here")
def test_a_setting_that_this_machine_does_not_have_is_refused() -> None:
    present = ambient_state.capture()
    state = ambient_state.from_mapping({**ambient_state.to_mapping(present), "cpu_fp16_reduction": True})
    with ambient_state.restored(), pytest.raises(ProgramError, match="cpu_fp16_reduction can't be True"):
        ambient_state.apply(state, present)

import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch

from backhaul import ProgramError
from backhaul_proto.v1 import program_pb2
from backhaul_runtime.program import codec
from backhaul_runtime.program.codec import decode_state, encode_state
from backhaul_runtime.program.op_list import allowed_ops
from backhaul_runtime.program.program import Program
from backhaul_runtime.record.recorder import Recorder
from backhaul_runtime.torch_internals import ambient_state


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
        ("sdp_priority", "0,x"),
        ("sdp_priority", "99"),
        ("mkldnn_matmul_precision", "fastest"),
    ],
)
def test_values_that_can_not_be(name: str, value: ambient_state.Value) -> None:
    with pytest.raises(ProgramError):
        ambient_state.from_mapping({name: value})


OTHER_VALUES = {
    "autocast_cuda": [True],
    "autocast_cuda_dtype": ["torch.float16", "torch.bfloat16", "torch.float32"],
    "cublas_fp16_reduction": ["1,1", "0,1", "0,0"],
    "cublas_bf16_reduction": ["1,1", "0,1", "0,0"],
    "blas_backend": ["Cublas", "Ck"],
    "linalg_backend": ["Default"],
    "sm_carveout": [-1, 0, 8],
    "cudnn_depthwise_kernel": ["auto", "cudnn", "native"],
}
"""What torch accepts in a build without CUDA's libraries. Other settings are booleans or precisions."""


@pytest.fixture
def as_with_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gives the process the settings that it has where CUDA is available."""
    caches = [ambient_state.settings, ambient_state._readers, ambient_state._place, ambient_state._autocast_switches]
    caches += [ambient_state._is_of_cuda, codec._decoded_state, codec.encode_state]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for cached in caches:
        cached.cache_clear()
    before = ambient_state.capture()
    yield
    ambient_state.apply(before, ambient_state.capture())
    monkeypatch.undo()
    for cached in caches:
        cached.cache_clear()


@pytest.mark.usefixtures("as_with_cuda")
@pytest.mark.filterwarnings("ignore")  # torch calls some of them experimental
@pytest.mark.parametrize("name", ambient_state.cuda_settings())
def test_each_setting_of_cuda_travels_with_each_value(name: str) -> None:
    setting, place = ambient_state.settings()[name], list(ambient_state.settings()).index(name)
    default = setting.read()
    if isinstance(default, bool):
        values: list[Any] = [not default, default]
    else:
        values = [*cast("list[Any]", OTHER_VALUES.get(name, ["none", "ieee", "tf32"])), default]
    for value in values:
        present = ambient_state.capture()
        sent = (*present[:place], value, *present[place + 1 :])
        received = decode_state(program_pb2.AmbientState.FromString(encode_state(sent).SerializeToString()))
        assert received == sent
        ambient_state.apply(received, present)
        assert setting.read() == value
        assert ambient_state.capture() == sent


@pytest.mark.usefixtures("as_with_cuda")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cublas_fp16_reduction", "1,0"),  # torch raises for it
        ("cublas_bf16_reduction", "1,1,1"),
        ("cublas_bf16_reduction", True),
        ("blas_backend", "__class__"),
        ("linalg_backend", "cusolver"),
        ("cuda_matmul_precision", "fastest"),
        ("cudnn_depthwise_kernel", ""),
        ("sm_carveout", "8"),
    ],
)
def test_values_that_cuda_can_not_have(name: str, value: ambient_state.Value) -> None:
    with pytest.raises(ProgramError):
        ambient_state.from_mapping({name: value})


@pytest.mark.usefixtures("as_with_cuda")
def test_settings_of_cuda_travel_only_with_programs_that_use_it() -> None:
    def recorded(fn: Callable[[torch.Tensor], torch.Tensor]) -> Program:
        x = torch.randn(3, requires_grad=True)
        recorder = Recorder([x], allowed_ops(), lambda tensor, layout, address: tensor)
        with recorder:
            fn(x)
        return recorder.so_far()

    program = recorded(torch.sin)
    assert ambient_state.to_mapping(program.ambient_states[0]).keys() == ambient_state._host_settings().keys()
    state = ambient_state.limited(ambient_state.capture(), program.ambient_states)
    assert not encode_state(state).settings.keys() & ambient_state.cuda_settings().keys()


def test_a_host_without_cuda_refuses_its_settings() -> None:
    with pytest.raises(ProgramError, match="no setting"):
        ambient_state.from_mapping({"cublas_fp16_reduction": "1,1"})

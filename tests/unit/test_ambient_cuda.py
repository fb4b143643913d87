"""The settings of CUDA, which torch can read and write on a machine without CUDA too."""

from collections.abc import Callable, Iterator

import pytest
import torch

from backhaul import ProgramError
from backhaul_runtime.program import codec
from backhaul_runtime.program.codec import decode_state, encode_state
from backhaul_runtime.program.op_list import allowed_ops
from backhaul_runtime.program.program import Program
from backhaul_runtime.record.recorder import Recorder
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.torch_internals.ambient_settings import Setting, Value, settings_of_all, settings_of_cuda

SWITCH = (True, False)
PRECISION = ("none", "ieee", "tf32")
VALUES: dict[str, tuple[Value, ...]] = {
    "autocast_cuda_dtype": ("torch.float16", "torch.bfloat16", "torch.float32"),
    "sdp_priority": ("1,2,0,3,4", "3,1,2,0,4"),
    "cublas_fp16_reduction": ("1,1", "0,1", "0,0"),
    "cublas_bf16_reduction": ("1,1", "0,1", "0,0"),
    "cuda_matmul_precision": PRECISION,
    "cudnn_conv_precision": PRECISION,
    "cudnn_rnn_precision": PRECISION,
    "blas_backend": ("Cublas", "Cublaslt"),
    "linalg_backend": ("Default", "Cusolver", "Magma"),
    "sm_carveout": ("None", "0", "12"),
    "cudnn_depthwise": ("auto", "cudnn", "native"),
    "cudnn_benchmark_limit": (10, 0, 3),
    "fa3_sdp": (False,),
}
"""The values of each setting that torch accepts. Settings that aren't listed are switches."""

LIBRARIES = [("blas_backend", "Cublaslt"), ("linalg_backend", "Cusolver"), ("linalg_backend", "Magma")]
"""Values that torch accepts only in a build that has the library."""

ABSENT = LIBRARIES if torch.version.cuda is None else []
CASES = [
    (name, value) for name in settings_of_cuda() for value in VALUES.get(name, SWITCH) if (name, value) not in ABSENT
]


CACHES = (
    ambient_state.settings,
    ambient_state._readers,
    ambient_state._place,
    ambient_state._autocast_switches,
    codec._decoded_state,
    codec.encode_state,
)


@pytest.fixture(autouse=True)
def as_with_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gives this process the settings that it has where CUDA is available, and restores their values."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for cached in CACHES:
        cached.cache_clear()
    before = ambient_state.capture()
    yield
    ambient_state.apply(before, ambient_state.capture())
    monkeypatch.undo()
    for cached in CACHES:
        cached.cache_clear()


def sent(values: dict[str, Value]) -> ambient_state.State:
    """Returns the state that a worker decodes from the settings of a trainer."""
    present = ambient_state.to_mapping(ambient_state.capture())
    return decode_state(encode_state(tuple({**present, **values}.values())))


@pytest.mark.parametrize(("name", "value"), CASES)
def test_each_value_of_a_setting_is_sent_and_applied(name: str, value: Value) -> None:
    state = sent({name: value})
    ambient_state.apply(state, ambient_state.capture())
    assert ambient_state.capture() == state
    assert ambient_state.to_mapping(state)[name] == value


def test_the_default_of_each_setting_is_one_of_its_values() -> None:
    values = ambient_state.to_mapping(ambient_state.capture())
    assert {
        name for name, value in values.items() if name in settings_of_cuda() and (name, value) not in CASES
    } == set()


@pytest.mark.parametrize("setting", settings_of_cuda().values(), ids=settings_of_cuda().keys())
def test_a_setting_takes_what_it_returns(setting: Setting) -> None:
    value = setting.read()
    assert type(value) in {bool, int, str}
    assert setting.is_possible(value)
    setting.write(value)
    assert setting.read() == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *ABSENT,
        ("cublas_fp16_reduction", "1,0"),
        ("cublas_fp16_reduction", "1,1,1"),
        ("cublas_bf16_reduction", ""),
        ("cublas_bf16_reduction", True),
        ("sdp_priority", "0,x"),
        ("sdp_priority", "1,2,0,3,4,4,4,4,4,4,4"),
        ("sdp_priority", "99"),
        ("cuda_matmul_precision", "bf16"),
        ("cudnn_conv_precision", "fastest"),
        ("blas_backend", "mkl"),
        ("linalg_backend", "__class__"),
        ("sm_carveout", "-1"),
        ("sm_carveout", "99999999999999999999"),
        ("sm_carveout", "\N{SUPERSCRIPT TWO}"),
        ("cudnn_depthwise", "fastest"),
        ("fa3_sdp", True),
        ("autocast_cuda_dtype", "torch.int64"),
    ],
)
def test_values_that_can_not_be(name: str, value: Value) -> None:
    with pytest.raises(ProgramError):
        ambient_state.from_mapping({name: value})


@pytest.mark.parametrize("older", ["medium", "high", "highest"])
def test_the_older_switch_of_tf32_agrees_with_the_newer_one(older: str) -> None:
    torch.set_float32_matmul_precision(older)
    state = ambient_state.capture()
    torch.set_float32_matmul_precision("high" if older == "highest" else "highest")
    ambient_state.apply(state, ambient_state.capture())
    assert torch.get_float32_matmul_precision() == older  # raises an exception if they differ, as cuBLAS's kernels do


def test_the_older_switch_of_cudnn_agrees_with_the_newer_ones() -> None:
    torch._C._set_cudnn_allow_tf32(True)
    state = ambient_state.capture()
    torch._C._set_cudnn_allow_tf32(False)
    ambient_state.apply(state, ambient_state.capture())
    assert torch.backends.cudnn.allow_tf32


def test_a_state_without_the_settings_of_cuda_leaves_them_alone() -> None:
    state = ambient_state.without_cuda(ambient_state.capture())
    torch._C._set_cudnn_enabled(False)
    ambient_state.apply(state, ambient_state.capture())
    assert decode_state(encode_state(state)) == state
    assert not torch.backends.cudnn.enabled


def recorded(function: Callable[[torch.Tensor], torch.Tensor]) -> Program:
    x = torch.randn(3, requires_grad=True)
    recorder = Recorder([x], allowed_ops(), lambda tensor, layout, address: tensor)
    with recorder:
        function(x)
    return recorder.call.builder.program()


def test_a_program_of_the_cpu_has_no_settings_of_cuda() -> None:
    program = recorded(torch.sin)
    state = ambient_state.as_far_as(ambient_state.capture(), program.ambient_states)
    assert ambient_state.to_mapping(program.ambient_states[0]).keys() == settings_of_all().keys()
    assert not encode_state(state).settings.keys() & settings_of_cuda().keys()

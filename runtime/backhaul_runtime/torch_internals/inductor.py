"""What Backhaul asks of torch's Inductor: to compile a graph, and what its kernels depend on.

Nothing here is imported from `torch._inductor` before it is used, because that import takes seconds.
"""

import copyreg
import hashlib
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from backhaul_runtime.torch_internals.private import OpOverload

_SETTINGS = {
    "deterministic": True,  # nothing is chosen by measuring, so two machines choose the same kernels
    "assert_indirect_indexing": True,  # an index out of range raises an error, as in eager mode
    "cpp_wrapper": False,
    "max_autotune": False,
}
"""The settings of Inductor for programs."""

_AOT_SETTINGS = {
    "donated_buffer": False,  # answers may still be sent from saved tensors, so a backward must not reuse their memory
    "force_non_lazy_backward_lowering": True,  # else the backward is compiled under the settings of its first run
}
"""The settings of AOTAutograd, which makes Inductor's forward and backward graphs."""

_PASSES = (
    *("pre_grad_custom_pass", "joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_pre_pass"),
    *("post_grad_custom_post_pass", "_pre_fusion_custom_pass", "_post_fusion_custom_pass"),
)
"""Settings that hold functions which change graphs. Inductor leaves them out where it lists its settings."""

Input = tuple[torch.device, torch.dtype, Sequence[int], Sequence[int]]
"""Device, dtype, sizes and strides of an input of a graph."""

_DIRECTORY = "TORCHINDUCTOR_CACHE_DIR"

_NO_PART_OF_KERNELS = ("compile_threads", "worker_start_method", "worker_log_path", "cache", "debug", "verbose")
"""What the names of settings begin with that do not change kernels."""

_NO_PART_OF_GRAPHS = ("cache", "debug")
"""Parts of the names of AOTAutograd's settings that do not change graphs."""


def _compiling() -> AbstractContextManager[Any]:
    """Returns the lock that torch.compile holds while it compiles, because what is set for that holds for all threads.

    It is reentrant: the garbage collector may run code of the user's inside.
    """
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


def wait_for_tracing() -> None:
    """Waits until no other thread traces a graph: torch raises an error in all threads that call compiled code then."""
    if is_fx_symbolic_tracing():
        with _compiling():
            pass


@dataclass(frozen=True, slots=True)
class CompiledFiles:
    """Files by which one process makes the functions that another one has compiled.

    Attributes:
        directory: Where they are; empty for Inductor's own place.
        are_made: Whether the other process has made them. Then nothing is compiled, and what is missing is an error.
    """

    directory: str
    are_made: bool


def compile_graph(
    graph: fx.GraphModule,
    inputs: Sequence[Input],
    requires_grad: Sequence[bool],
    files: CompiledFiles | None,
) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    """Compiles a graph, which it takes over, and its backward, under the present settings of torch.

    Args:
        graph: Calls ops of ATen.
        inputs: What the inputs are.
        requires_grad: Whether each input takes a gradient.
        files: The files that another process needs, or has made; None for neither.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    mode, examples = _examples(inputs)
    for example, needs in zip(examples, requires_grad, strict=True):
        example.requires_grad_(needs)
    context = torch._guards.TracingContext(mode)
    with (
        _compiling(),
        _keyed_alike(),
        nullcontext() if files is None else _exchanged_by(files),
        torch.enable_grad(),
        torch._guards.tracing(context),
        _patch(config, **_AOT_SETTINGS),
        # Keeps other graphs out, because the keys of Inductor's files do not show whether these reuse saved memory.
        _patch(torch.compiler.config, cache_key_tag="backhaul"),
    ):
        compiled: Any = compile_fx(graph, examples, config_patches=dict(_SETTINGS))
    return lambda tensors: compiled(*tensors)


def _examples(inputs: Sequence[Input]) -> tuple[Any, list[Tensor]]:
    """Returns a mode of fake tensors, which have storages but no memory, and one for each input of a graph."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        return mode, [
            torch.empty_strided(shape, strides, dtype=dtype, device=device) for device, dtype, shape, strides in inputs
        ]


def writes_to_inputs(
    graph: fx.GraphModule,
    inputs: Sequence[Input],
    written: Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Sequence[Tensor]],
) -> bool:
    """Whether a graph of ops of ATen writes to the memory of one of its inputs.

    Args:
        graph: The graph. It runs on tensors without memory.
        inputs: What the inputs are.
        written: Returns the tensors that an op with these arguments writes to.
    """
    mode, examples = _examples(inputs)
    given = {example.untyped_storage()._cdata for example in examples}
    has_written = False

    class Writes(fx.Interpreter):
        def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal has_written
            if isinstance(target, OpOverload):
                has_written |= any(one.untyped_storage()._cdata in given for one in written(target, args, kwargs))
            return super().call_function(target, args, kwargs)

    with mode, torch.no_grad():
        Writes(graph).run(*examples)
    return has_written


def may_differentiate() -> AbstractContextManager[Any]:
    """Returns a context in which a backward with `create_graph` may run. None of ours reuses saved memory."""
    from torch._functorch import config

    return _patch(config, donated_buffer=False)


def _patch(config: Any, **settings: Any) -> AbstractContextManager[Any]:
    patched: AbstractContextManager[Any] = config.patch(**settings)
    return patched


@contextmanager
def _keyed_alike() -> Iterator[None]:
    """Gives what Inductor keeps the same keys in each process. One thread at a time.

    A key is the hash of a pickle. In it, the name of a memory format depends on which module was the first to import
    torch, so a worker would not find what its child process has compiled.
    """
    before = copyreg.dispatch_table.pop(torch.memory_format, None)
    copyreg.dispatch_table[torch.memory_format] = lambda one: (resolve_name, (str(one),))
    try:
        yield
    finally:
        del copyreg.dispatch_table[torch.memory_format]
        if before is not None:
            copyreg.dispatch_table[torch.memory_format] = before


@contextmanager
def _exchanged_by(files: CompiledFiles) -> Iterator[None]:
    """Makes Inductor use files. The caller makes sure that nothing else is compiled meanwhile."""
    from torch._functorch import config
    from torch._inductor import compile_fx

    before, compiles = os.environ.get(_DIRECTORY), compile_fx.fx_codegen_and_compile
    if files.directory:
        os.environ[_DIRECTORY] = files.directory
    if files.are_made:
        compile_fx.fx_codegen_and_compile = _refuse_to_compile
    try:
        with _patch(config, strict_autograd_cache=True):  # raises an error where it could not write or read files
            yield
    finally:
        compile_fx.fx_codegen_and_compile = compiles
        if files.directory and before is None:
            del os.environ[_DIRECTORY]
        elif before is not None:
            os.environ[_DIRECTORY] = before


def _refuse_to_compile(*_: Any, **__: Any) -> Any:
    raise RuntimeError("what another process has compiled is not in the files of Inductor")


def prepare(device: torch.device) -> dict[str, str]:
    """Imports what compiling needs, which takes seconds. Returns `facts`."""
    from torch._inductor import compile_fx  # noqa: F401
    from torch._inductor.codegen.common import init_backend_registration

    init_backend_registration()
    return facts(device)


def compile_for_training(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compiles a graph that torch.compile has captured, as its backend "inductor" does."""
    from torch._inductor.compile_fx import compile_fx

    with _compiling():
        compiled: Any = compile_fx(module, list(inputs))
    return compiled  # type: ignore[no-any-return]


def is_symbolic(tensor: Tensor) -> bool:
    """Whether sizes of an example of torch.compile stand for several numbers."""
    return any(isinstance(size, torch.SymInt) for size in tensor.shape)


def facts(device: torch.device) -> dict[str, str]:
    """Returns what the kernels depend on that Inductor would make now, beside the device and torch itself.

    Raises:
        Exception: There is no compiler.
    """
    from torch._functorch import config as aot
    from torch._inductor import config, cpu_vec_isa

    with _patch(config, **_SETTINGS), _patch(aot, **_AOT_SETTINGS):
        settings = config.save_config_portable() | {name: getattr(config, name, None) for name in _PASSES}
        graphs = aot.save_config_portable()
    chosen = [
        *((name, settings[name]) for name in settings if not name.rpartition(".")[2].startswith(_NO_PART_OF_KERNELS)),
        *((name, graphs[name]) for name in graphs if not any(part in name for part in _NO_PART_OF_GRAPHS)),
    ]
    made = {"inductor": hashlib.sha256(repr(sorted(chosen, key=repr)).encode()).hexdigest()[:16]}
    if device.type == "cpu":
        return made | {"compiler": _compiler(), "vectors": str(cpu_vec_isa.pick_vec_isa())}
    return made | {"triton": version("triton")}


@cache
def _compiler() -> str:
    from torch._inductor.cpp_builder import get_cpp_compiler

    asked = subprocess.run([get_cpp_compiler(), "--version"], capture_output=True, text=True, check=True, timeout=60)
    return asked.stdout.splitlines()[0]

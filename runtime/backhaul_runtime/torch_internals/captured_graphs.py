"""What Backhaul asks of torch.compile: to capture a call in one graph, and what it knows of a graph while it compiles.

Nothing here is imported from `torch._dynamo` before it is used, because that import takes a second.
"""

import operator
import re
import sys
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator


def name_of_compiled() -> str:
    """Returns a name for people of what is being compiled: the class of a module, or a function's qualified name."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    present = InstructionTranslator.current_tx()
    code = present.f_code
    # torch runs its own modules, such as nn.Sequential, in a function with the variable `fn`.
    owner = present.f_locals.get(code.co_varnames[0] if code.co_argcount else "fn")
    owner = getattr(owner, "__self__", owner)
    if isinstance(owner, nn.Module):
        return type(owner).__name__
    return str(getattr(code, "co_qualname", code.co_name)).replace("<locals>.", "")


def side_effect_of_compiled() -> str:
    """Returns what the call that is being compiled changes beside its results; empty if that is nothing.

    torch.compile does such things after the graph has run: it sets attributes and items, and registers hooks.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting

    effects = InstructionTranslator.current_tx().output.side_effects
    if effects.tensor_hooks or effects.save_for_backward:
        return "the hooks of a tensor, or what a custom function saves"
    existing = AttributeMutationExisting, ValueMutationExisting  # not what the call has made itself
    changed = [
        one
        for one in effects._get_modified_vars()
        if isinstance(one.mutation_type, existing) and not _is_restored(one, effects)
    ]
    names = [getattr(one.source, "name", "") for one in changed[:3]]
    return " and ".join(str(name() if callable(name) else name) for name in names)


def _is_restored(variable: Any, effects: Any) -> bool:
    """Whether a call only sets attributes of an object, and at its end to what they are now, as code around it does."""
    attributes = effects.store_attr_mutations.get(variable)
    if not attributes or not hasattr(variable, "value"):
        return False
    if hasattr(variable, "is_base_vt_modified") and variable.is_base_vt_modified(effects):
        return False
    return all(
        value.is_python_constant() and value.as_python_constant() is getattr(variable.value, name, attributes)
        for name, value in attributes.items()
    )


class TorchCompilation(NamedTuple):
    """What torch.compile did for a graph.

    Attributes:
        took_s: Seconds that it took.
        guard: The guard that no longer held, with the file and line of the user's code; empty for the first graph.
    """

    took_s: float
    guard: str


def compilation_now() -> str:
    """Returns torch's id of the compilation that this thread is in."""
    from torch._guards import CompileContext

    return str(CompileContext.current_compile_id())


def compilation(compile_id: str) -> TorchCompilation:
    """Returns what a compilation took that has ended, and why it was needed. torch keeps the last 64 of them."""
    from torch._dynamo.utils import get_compilation_metrics

    for metrics in reversed(get_compilation_metrics()):
        if metrics.compile_id == compile_id:
            return TorchCompilation((metrics.duration_us or 0) / 1e6, _guard_in(metrics.recompile_reason or ""))
    return TorchCompilation(0.0, "")


def _guard_in(reason: str) -> str:
    """Returns a guard as torch prints it, with its place but without the id before it and the line of code after it."""
    guard = re.sub(r"^\d+/\d+: ", "", reason.partition("\n")[0]).partition(" # ")[0].strip()
    places = re.findall(r'File "([^"]+)", line (\d+)', reason)
    return f"{guard} ({places[-1][0]}:{places[-1][1]})" if places else guard


def forward_of_graph(module: fx.GraphModule) -> Callable[..., Any]:
    """Returns the function that runs a graph, without what torch puts around it until its code is generated."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    _LazyGraphModule.force_recompile(module)
    return module.forward


def arguments_of_graph(module: fx.GraphModule) -> list[int]:
    """Returns the positions of the inputs that were passed to the compiled function, also inside containers.

    Attributes of what was passed, and what the function captures, are none of them.
    """
    return [position for position, links in enumerate(_origins(module)) if _is_passed(links)]


def why_no_list_of_calls(module: fx.GraphModule) -> str:
    """Returns the operator that makes a graph more than a list of calls of torch's functions; empty if none does.

    Higher-order operators hold graphs of their own, and transforms of torch.func reach over several calls. Both mean
    something else when their graph runs as it is: torch's checkpoint, for example, then draws other random numbers.
    flex_attention is none of these, because its graphs are functions of single numbers.
    """
    for node in module.graph.nodes:
        if node.op == "call_function" and (
            (isinstance(node.target, HigherOrderOperator) and not is_flex_attention(node.target))
            or "functorch" in str(getattr(node.target, "__module__", ""))
        ):
            return str(getattr(node.target, "__name__", node.target))
    return ""


def inline_checkpoints(module: fx.GraphModule) -> None:
    """Puts what torch's checkpoint runs into a graph, in the place of the operator that torch.compile makes of it."""
    from torch._higher_order_ops.wrap import tag_activation_checkpoint

    graph = module.graph
    while node := next((one for one in graph.nodes if one.target is tag_activation_checkpoint), None):
        body, *operands = node.args
        inside = getattr(module, body.target).graph
        placeholders = [one for one in inside.nodes if one.op == "placeholder"]
        with graph.inserting_before(node):
            results = graph.graph_copy(inside, dict(zip(placeholders, operands, strict=True)))
        for user in list(node.users):
            if user.target is operator.getitem and isinstance(results, (tuple, list)):
                user.replace_all_uses_with(results[user.args[1]])
                graph.erase_node(user)
        if node.users:
            node.replace_all_uses_with(results)
        graph.erase_node(node)
    module.recompile()


def is_flex_attention(target: Any) -> bool:
    """Whether what a node of a graph calls is flex_attention."""
    return isinstance(target, HigherOrderOperator) and str(target) == "flex_attention"


def holds_functions(module: fx.GraphModule) -> bool:
    """Whether a graph holds flex_attention, whose functions need a function mode of torch's own."""
    return any(is_flex_attention(node.target) for node in module.graph.nodes)


def compile_for_autograd(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compiles a graph by torch's backend "aot_eager", whose kernels are eager ones."""
    from torch._dynamo.backends.registry import lookup_backend

    compiled: Callable[..., Any] = lookup_backend("aot_eager")(module, inputs)
    return compiled


@cache
def keep_out(*packages: str) -> None:
    """Makes torch.compile run the code of packages as it is, where a function that it compiles leads into them."""
    from torch._dynamo import trace_rules

    for package in packages:
        trace_rules.add(package)


def draws_in_python(module: fx.GraphModule) -> bool:
    """Whether a graph takes a number that Python draws before the graph runs."""
    return any(type(links[-1]).__name__ == "RandomValueSource" for links in _origins(module) if links)


def numbers_of_graph(module: fx.GraphModule) -> dict[int, int]:
    """Returns how often a graph reads the value of each input that it uses for nothing else, by position.

    torch.compile passes a float of the user's code as such a tensor, once it has seen two values of it.
    """
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    return {
        position: len(node.users)
        for position, node in enumerate(placeholders)
        if node.users and all((user.op, user.target) == ("call_method", "item") for user in node.users)
    }


def _origins(module: fx.GraphModule) -> list[list[Any]]:
    """Returns for each input what torch knows of its origin, from the value back to a variable of the function."""
    origins = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            link, links = getattr(node.meta.get("grapharg"), "source", None), []
            while link is not None:
                links.append(link)
                link = getattr(link, "base", None)
            origins.append(links)
    return origins


def _is_passed(links: Sequence[Any]) -> bool:
    if not links or type(links[-1]).__name__ != "LocalSource" or links[-1].is_derefed_cell_contents:
        return False
    is_function = links[-1].local_name == _call.__code__.co_varnames[0]  # of `_call`, whose other variables it is given
    return not is_function and all("GetItem" in type(link).__name__ for link in links[:-1])


def backend_of(function: Any) -> Any:
    """Returns the backend of a function or module that torch.compile has returned, or of a module that was compiled.

    None for any other, and for a partial function.
    """
    backend = _wrapped_backend(function)
    return getattr(backend, "compiler_fn", backend)


def before_compilation(function: Any) -> tuple[Any, Mapping[str, Any]]:
    """Returns what torch.compile was given for what it has returned, and the options that it has for its backend."""
    options = getattr(_wrapped_backend(function), "kwargs", {}).get("options") or {}
    if isinstance(function, nn.Module):
        return vars(function)["_modules"].get("_orig_mod", function), options
    return function._torchdynamo_orig_callable, options


def _wrapped_backend(function: Any) -> Any:
    if "torch._dynamo.eval_frame" not in sys.modules:
        return None
    if isinstance(function, nn.Module):
        context = vars(function).get("dynamo_ctx")
        backend = _closure(function._compiled_call_impl) if context is None else context.callback
    else:
        backend = _closure(function) if getattr(function, "_is_torch_compile", False) else None
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    return backend


def _closure(compiled: Any) -> Any:
    """Returns the callback of a function that torch.compile has returned."""
    names = getattr(getattr(compiled, "__code__", None), "co_freevars", ())
    return compiled.__closure__[names.index("callback")].cell_contents if "callback" in names else None


Call = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Calls a function with positional and keyword arguments."""

Backend = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
"""Returns what is called in the place of a graph."""


def in_one_graph(key: Hashable, backend: Backend) -> Call:
    """Returns a compiled function that calls a function with these arguments.

    If torch.compile cannot capture a call whole, that raises before anything has run. `why_not_captured` explains it.

    Args:
        key: Functions with the same key share compiled graphs, and torch's limit of recompilations.
        backend: Returns what is called in the place of a graph.
    """
    compiled: Call = _compiled(key, backend, _call_whole)
    return compiled


def in_graphs(key: Hashable, backend: Backend) -> Call:
    """Returns what `in_one_graph` does, but a call that cannot be captured whole runs in several graphs, or in none."""
    compiled: Call = _compiled(key, backend, _call)
    return compiled


@cache
def _compiled(key: Hashable, backend: Any, call: Any) -> Any:
    # torch keeps graphs by the code object, and must not take this one for a part of a package that is kept out.
    own = types.FunctionType(call.__code__.replace(co_filename="<compiled segment>"), globals(), call.__name__)
    return torch.compile(own, backend=backend, fullgraph=call is _call_whole)


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def _call_whole(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Here torch has skipped the frame, as inside a dispatch mode, and runs it as it is.
    if not torch.compiler.is_compiling():
        raise _SkippedError
    return function(*args, **kwargs)


class _SkippedError(Exception):
    """torch.compile does not compile at present."""


def key_of(function: Callable[..., Any]) -> Hashable:
    """Returns the key of a function for `in_one_graph`: of a module its class, of a function its code."""
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, nn.Module):
        return (type(function),)
    return getattr(function, "__code__", type(function)), type(getattr(function, "__self__", None))


def with_own_settings() -> AbstractContextManager[Any]:
    """Returns a context in which compiled graphs get guards on the hooks of modules, which torch omits otherwise.

    They also get no record for the profiler, which would take time in each call.
    """
    from torch._dynamo import config

    patched: AbstractContextManager[Any] = config.patch(skip_nnmodule_hook_guards=False, record_runtime_overhead=False)
    return patched


def why_not_captured(error: Exception) -> tuple[str, bool]:
    """Returns why torch.compile has raised an error, in a sentence, and whether another call would fail as well."""
    from torch._dynamo import exc

    if isinstance(error, _SkippedError):
        return "torch.compile does not compile at present, as inside a dispatch mode", False
    if isinstance(error, exc.FailOnRecompileLimitHit):
        return f"torch.compile has compiled it {torch._dynamo.config.recompile_limit} times, its limit", True
    inner = getattr(error, "inner_exception", None) or error
    first = next((line.strip() for line in str(getattr(inner, "msg", inner)).splitlines() if line.strip()), "")
    stack = getattr(error, "real_stack", None)
    line = f" ({stack[-1].filename}:{stack[-1].lineno})" if stack else ""
    is_of_this_call = isinstance(error, exc.TorchRuntimeError)  # such as inputs of a wrong shape
    return (
        f"torch.compile cannot capture it whole: {first.rstrip('.') or type(inner).__name__}{line}",
        not is_of_this_call,
    )

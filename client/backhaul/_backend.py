"""The backend of torch.compile that is named "backhaul", found by torch through an entry point."""

from collections.abc import Callable, Mapping
from typing import Any, get_args

from torch import fx

from backhaul._api import present_target
from backhaul._forward.graph_backend import Kernels, compile_graph
from backhaul._forward.graphs import keep_own_code_out

KERNELS: tuple[Kernels, ...] = get_args(Kernels)

keep_own_code_out()  # torch.compile imports this module before it looks at the first function


def backend(
    module: fx.GraphModule, inputs: list[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Makes each call of a captured graph a segment of the current session. Without a session the graph simply runs.

    Used as `torch.compile(block, backend="backhaul")`. See docs/compiled.md.

    Args:
        module: The graph as torch.compile has captured it.
        inputs: Examples of its inputs.
        options: `{"kernels": "eager"}`, which is also the default, runs the functions that the user's code calls.
            `{"kernels": "inductor"}` compiles the graph as torch's own backend "inductor" does.

    Raises:
        ValueError: An option is unknown or has another value.
    """
    given = {"kernels": KERNELS[0], **(options or {})}
    for name, value in given.items():
        if name != "kernels" or value not in KERNELS:
            raise ValueError(f'options={{{name!r}: {value!r}}}: the only option is "kernels", one of {KERNELS}')
    return compile_graph(module, inputs, present_target, given["kernels"])


backend.makes_segments = True  # type: ignore[attr-defined]

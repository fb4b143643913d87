"""Writes docs/calculator.html from `backhaul._arithmetic`: `make docs`. `test_calculator.py` holds the two in sync.

The formulas and the table of outputs are translated from Python to JavaScript, so that no formula is written twice.
"""

import ast
import json
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from backhaul import _arithmetic as arithmetic

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/calculator.html"
TEMPLATE = Path(__file__).with_name("calculator_template.html")


@dataclass(frozen=True, slots=True)
class Input:
    """A field of the page.

    Attributes:
        name: The name in expressions.
        label: What people read.
        default: The value at first: the example of docs/arithmetic.md.
        factor: What the field's number is multiplied with for expressions.
    """

    name: str
    label: str
    default: float
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Output:
    """A result on the page.

    Attributes:
        name: The name, for later expressions.
        label: What people read.
        expression: A Python expression of inputs, formulas and earlier outputs.
        unit: How the number is shown: "ms", "s", "bytes", "ratio", "rate" or "count".
    """

    name: str
    label: str
    expression: str
    unit: str


INPUTS = (
    Input("layers", "Layers", 32),
    Input("parameters", "Parameters of a layer, millions", 218, 1e6),
    Input("width", "Width of the model", 4096),
    Input("value_bytes", "Bytes of a value", 2),
    Input("tokens", "Tokens of a micro-batch", 8192),
    Input("length", "Tokens of a sequence", 8192),
    Input("micro_batches", "Micro-batches of an optimizer step", 8),
    Input("backward", "Backward over forward: 1.05 for LoRA, 2 for full training", 1.05),
    Input("trained", "Trained part of the parameters, percent", 0.5, 1e-2),
    Input("trainer_flop_per_s", "Trainer, TFLOP/s that it reaches", 107, 1e12),
    Input("worker_flop_per_s", "One worker, TFLOP/s that it reaches", 107, 1e12),
    Input("workers", "Workers", 1),
    Input("bytes_per_s", "Link to a worker, Gbit/s", 10, 1.25e8),
    Input("recording", "Recording, percent of a forward", 5, 1e-2),
    Input("segment_layers", "Layers of a segment", 2),
    Input("host_bytes_per_s", "Link between GPU and host, GB/s", 25, 1e9),
)

OUTPUTS = (
    Output(
        "layer_s", "Forward of a layer", "layer_forward_s(parameters, tokens, length, width, trainer_flop_per_s)", "ms"
    ),
    Output("boundary_bytes", "A boundary", "tokens * width * value_bytes", "bytes"),
    Output("speed", "Speed of a worker relative to the trainer", "worker_flop_per_s / trainer_flop_per_s", "ratio"),
    Output("threshold", "Speed that loss.backward() needs", "blocking_threshold(backward)", "ratio"),
    Output("blocking", "Step with loss.backward() over torch's", "blocking_ratio(speed, backward, recording)", "ratio"),
    Output(
        "limit", "Limit of the speed-up in accumulation blocks", "deferred_limit(workers * speed, backward)", "ratio"
    ),
    Output(
        "deferred",
        "Step in accumulation blocks over torch's",
        "deferred_ratio(workers * speed, backward, recording)",
        "ratio",
    ),
    Output(
        "hiding",
        "Layers per segment that hide the link",
        "layers_that_hide_link(boundary_bytes, bytes_per_s, layer_s)",
        "count",
    ),
    Output(
        "even",
        "Bandwidth at which moving a segment takes as long as recomputing it",
        "break_even_bytes_per_s(boundary_bytes, segment_layers, layer_s)",
        "rate",
    ),
    Output("segments", "Segments", "ceil(layers / segment_layers)", "count"),
    Output("sent", "Traffic of a micro-batch", "traffic_bytes(boundary_bytes, segments, workers, 0)", "bytes"),
    Output(
        "derived", "The same with derived boundaries", "traffic_bytes(boundary_bytes, segments, workers, 1)", "bytes"
    ),
    Output(
        "memory",
        "Memory that each worker needs",
        "worker_memory_bytes(ceil(layers / workers), parameters * value_bytes, ceil(segments / workers), "
        f"boundary_bytes, ({arithmetic.SAVED_PER_BOUNDARY} + 1) * boundary_bytes * segment_layers)",
        "bytes",
    ),
    Output("trained_bytes", "Trained weights", "layers * parameters * trained * value_bytes", "bytes"),
    Output(
        "hiding_tokens",
        "Tokens of an optimizer step that hide the weights' traffic",
        "tokens_that_hide_weights(trained_bytes, bytes_per_s, layers * layer_s / tokens, backward)",
        "count",
    ),
    Output("torch_s", "Step with torch's checkpoint", "micro_batches * layers * layer_s * (2 + backward)", "s"),
    Output(
        "offload",
        "Step with activations offloaded to the host over torch's",
        f"offload_ratio({arithmetic.SAVED_PER_BOUNDARY} * boundary_bytes, host_bytes_per_s, layer_s, backward)",
        "ratio",
    ),
    Output(
        "parallel",
        "Step with data parallelism over torch's, if the model fits on each machine",
        "data_parallel_ratio(workers * speed, trained_bytes, bytes_per_s, torch_s, 0)",
        "ratio",
    ),
    Output(
        "core_sessions",
        "Sessions with loss.backward() that a worker's core serves at torch's pace",
        "sessions_per_worker(speed, backward)",
        "ratio",
    ),
    Output(
        "link_sessions",
        "Sessions with loss.backward() that a worker's link carries at torch's pace",
        "sessions_per_link(link_bytes(boundary_bytes, segments, workers, micro_batches, trained_bytes), "
        "torch_s, bytes_per_s)",
        "ratio",
    ),
    Output(
        "dashboard",
        "Cores of a dashboard of 1,000 workers with that many sessions, at most 1",
        "dashboard_cores(1000, 1000 * min(core_sessions, link_sessions))",
        "ratio",
    ),
)


def calculate(inputs: dict[str, float]) -> dict[str, float]:
    """Returns the outputs for the numbers in the fields of the page, as Python computes them."""
    names = {field.name: inputs[field.name] * field.factor for field in INPUTS}
    formulas = {name: getattr(arithmetic, name) for name in _formulas()}
    for output in OUTPUTS:
        names[output.name] = eval(output.expression, {**formulas, "ceil": ceil}, names)
    return {output.name: names[output.name] for output in OUTPUTS}


def page() -> str:
    """The page as it should be."""
    formulas = "\n".join(_function(node) for node in _formulas().values())
    inputs = [[field.name, field.label, field.default, field.factor] for field in INPUTS]
    outputs = ",\n".join(
        f"  [{json.dumps(output.name)}, {json.dumps(output.label)}, {json.dumps(output.unit)}, "
        f"({_NAMES}) => {_expression(ast.parse(output.expression, mode='eval').body)}]"
        for output in OUTPUTS
    )
    text = TEMPLATE.read_text(encoding="utf-8")
    text = text.replace("/*FORMULAS*/", formulas).replace("/*INPUTS*/", json.dumps(inputs, indent=2))
    return text.replace("/*OUTPUTS*/", outputs)


_NAMES = "{ " + ", ".join([field.name for field in INPUTS] + [output.name for output in OUTPUTS]) + " }"
_MATHS = {"min": "Math.min", "max": "Math.max", "ceil": "Math.ceil"}
_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_COMPARISONS = {ast.Gt: ">", ast.Lt: "<", ast.GtE: ">=", ast.LtE: "<="}


def _formulas() -> dict[str, ast.FunctionDef]:
    tree = ast.parse(Path(arithmetic.__file__).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def _function(node: ast.FunctionDef) -> str:
    names = ", ".join(argument.arg for argument in node.args.args)
    lines = [_statement(statement) for statement in node.body[1:]]  # the first one is the docstring
    return f"function {node.name}({names}) {{\n" + "\n".join(lines) + "\n}"


def _statement(node: ast.stmt) -> str:
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return f"  const {name} = {_expression(value)};"
        case ast.Return(value=ast.expr() as value):
            return f"  return {_expression(value)};"
    raise ValueError(f"{ast.unparse(node)} cannot be translated, see NOTE [One source]")


def _expression(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Constant(value=int() | float() as value):
            return repr(value)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return f"({_expression(left)} {_OPERATORS[type(op)]} {_expression(right)})"
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
            return f"({_expression(left)} {_COMPARISONS[type(op)]} {_expression(right)})"
        case ast.IfExp(test=test, body=body, orelse=other):
            return f"({_expression(test)} ? {_expression(body)} : {_expression(other)})"
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            return f"{_MATHS.get(name, name)}({', '.join(map(_expression, args))})"
    raise ValueError(f"{ast.unparse(node)} cannot be translated, see NOTE [One source]")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

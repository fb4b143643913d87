"""What holds for all threads: methods say which thread runs them, and locks are safe from Ctrl-C."""

import ast
from functools import cache
from pathlib import Path

from support.parsed_files import parsed

ROOT = Path(__file__).parents[2]


@cache
def modules() -> dict[str, ast.Module]:
    return {
        str(path.relative_to(ROOT)): parsed(path)
        for folder in ("client", "runtime", "server")
        for path in (ROOT / folder).rglob("*.py")
    }


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((argument.value for argument in call.keywords if argument.arg == name), None)


def targets(module: ast.Module) -> dict[str, str]:
    """Methods of the module that a thread runs, with the thread's name."""
    names = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "Thread":
            target, name = keyword(node, "target"), keyword(node, "name")
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self" and name is not None:
                names[target.attr] = ast.literal_eval(name)
    return names


def test_what_a_thread_runs_asserts_the_thread() -> None:
    count, offenders = 0, []
    for path, module in modules().items():
        decorators = {
            node.name: [ast.unparse(decorator) for decorator in node.decorator_list]
            for node in ast.walk(module)
            if isinstance(node, ast.FunctionDef)
        }
        of_threads = targets(module)
        count += len(of_threads)
        offenders += [
            (path, method) for method, thread in of_threads.items() if f"only_in({thread!r})" not in decorators[method]
        ]
    assert count >= 8
    assert offenders == []


UNSAFE = {
    "threading": {"Condition", "Event", "Semaphore", "BoundedSemaphore", "Barrier"},
    "queue": {"Queue", "LifoQueue", "PriorityQueue"},
    "concurrent.futures": None,  # all of it
}
"""Modules with what contains a threading.Condition: Rule 1 of NOTE [Interrupts]."""


def unsafe(module: ast.Module) -> set[str]:
    """What a module uses or imports of `UNSAFE`."""
    unsafe_names = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and (names := UNSAFE.get(ast.unparse(node.value))):
            unsafe_names |= {node.attr} & names
        if isinstance(node, ast.ImportFrom) and node.module in UNSAFE:
            imported = {alias.name for alias in node.names}
            unsafe_names |= imported & (UNSAFE[node.module] or imported)
        if isinstance(node, ast.Import):
            unsafe_names |= {alias.name for alias in node.names if alias.name.startswith("concurrent")}
    return unsafe_names


def test_a_lock_whose_exit_is_python_is_found() -> None:
    assert unsafe(ast.parse("import threading\nevent = threading.Event()")) == {"Event"}
    assert unsafe(ast.parse("from concurrent.futures import Future, wait")) == {"Future", "wait"}
    assert unsafe(ast.parse("import queue, threading\nqueue.SimpleQueue(), threading.Lock()")) == set()


def test_no_training_thread_takes_a_lock_whose_exit_is_python() -> None:
    offenders = {
        path: names
        for path, module in modules().items()
        if path.startswith(("client/", "runtime/")) and (names := unsafe(module))
    }
    assert offenders == {}

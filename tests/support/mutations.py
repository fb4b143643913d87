"""Removes each wait, record and stream context of the product in turn, and reports those that no test misses.

    PYTHONPATH=tests python -m support.simulated_cuda python -m support.mutations [FILE:LINE...]

Without arguments all sites are tried in turn. A mutant is a copy of the tree in a temporary directory. It is caught if
one of `TESTS` fails, or if they take `SLOWDOWN` times as long as in a copy without a mutation. That copy comes first,
and all tests must pass in it. The status is the number of survivors.
"""

import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = ("proto", "runtime", "client", "server", "lab")
REMOVED = {"wait_event", "wait_stream", "record_stream", "synchronize", "record"}
SLOWDOWN = 4
"""Allows for other programs on the machine. A mutant without a wait may hang for ever."""
TESTS = tuple(f"accelerators/test_{name}.py" for name in ("staging", "gradients", "waits", "faults", "two_devices"))


class Site(NamedTuple):
    """A call to remove, in a file of the tree, and the expression that takes its place."""

    path: str
    node: ast.Call
    replacement: str

    @property
    def name(self) -> str:
        """Returns the place as file:line."""
        return f"{self.path}:{self.node.lineno}"


def sites() -> Iterator[Site]:
    """Yields the calls on CUDA's streams and events that can be removed."""
    for folder in ("runtime", "client", "server"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            if "cuda" not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                    continue
                name = str(path.relative_to(ROOT))
                if node.func.attr in REMOVED:
                    yield Site(name, node, "None")
                elif node.func.attr == "stream" and "cuda" in ast.unparse(node.func):
                    yield Site(name, node, '__import__("contextlib").nullcontext()')


def mutated(site: Site) -> bytes:
    """Returns the text of the file without the call."""
    lines = (ROOT / site.path).read_bytes().splitlines(keepends=True)
    node = site.node
    assert node.end_lineno is not None
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    return before + site.replacement.encode() + after


def is_caught(site: Site, limit_s: float | None) -> bool:
    """Runs the tests on a copy of the tree without the call. None stands for no limit."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in (*PACKAGES, "tests"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", tree)
        shutil.copy(ROOT / "constraints.txt", tree)
        (tree / "build").symlink_to(ROOT / "build")  # kernels that are compiled already
        (tree / site.path).write_bytes(mutated(site))
        # The simulated device's sitecustomize.py stays first.
        paths = [os.environ["PYTHONPATH"].split(os.pathsep)[0], *(str(tree / package) for package in PACKAGES)]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-x", *(f"tests/{test}" for test in TESTS)],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            return process.wait(limit_s) != 0
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            return True


def main(chosen: list[str]) -> int:
    """Prints a line for each site. Returns the number of survivors."""
    first, began_s = next(sites()), time.monotonic()
    if is_caught(first._replace(replacement=ast.unparse(first.node)), None):
        sys.exit("The tests fail without a mutation: nothing can be said of mutants.")
    limit_s = SLOWDOWN * (time.monotonic() - began_s)
    survivors = 0
    for site in sites():
        if chosen and site.name not in chosen:
            continue
        caught = is_caught(site, limit_s)
        survivors += not caught
        sys.stdout.write(f"{'caught' if caught else 'SURVIVED'}  {site.name}  {ast.unparse(site.node)}\n")
        sys.stdout.flush()
    return survivors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

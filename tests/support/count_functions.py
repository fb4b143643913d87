"""Counts the functions of Backhaul that a tensor passes on its way to a worker, and its gradient on the way back.

    PYTHONPATH=tests python -m support.count_functions [--list]

A function counts if one of its arguments, or what it returns, is the tensor, holds it, or contains its bytes. The
object of a method does not count as an argument. Trainer and worker both count, each by a profile hook. The way up ends
where the worker begins to replay the program, and on the trainer where backward begins.
"""

import ctypes
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, MemberDescriptorType
from typing import Any

import torch
from google.protobuf.message import Message
from torch import Tensor

OURS = tuple(f"{Path(__file__).parents[2] / folder}/" for folder in ("client", "runtime", "server"))
REPLAY = "backhaul_runtime/replay/replay.py Replay.__init__"
DEEPEST, LONGEST, MOST_BYTES = 3, 64, 1 << 20
"""How deep, in collections how long, and in how many bytes a tensor is looked for."""
SHAPE = 16, 32


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Returns the tensor that goes up, what backward is given, and the gradient. Both processes make the same."""
    generator = torch.Generator().manual_seed(20)
    x = torch.randn(SHAPE, generator=generator, requires_grad=True)
    given = torch.randn(SHAPE, generator=generator)
    return x, given, torch.autograd.grad(x.sin(), x, given)[0]


class Passed:
    """A profile hook.

    Attributes:
        up: The functions that the tensor passed on its way up.
        back: The functions that the gradient passed.
    """

    def __init__(self) -> None:
        x, _, gradient = inputs()
        self.up, self.back = set[str](), set[str]()
        self._marks = {_first_bytes(x): self.up, _first_bytes(gradient): self.back}
        self._names: dict[CodeType, str] = {}
        self._own = threading.local()

    def __call__(self, frame: FrameType, event: str, returned: object) -> None:
        """Notes a function that is called or returns."""
        if event not in {"call", "return"} or getattr(self._own, "looks", False):
            return
        code = frame.f_code
        if code not in self._names:
            self._names[code] = _name(code)
        name = self._names[code]
        if name == REPLAY:
            self.arrived()
        elif not name:
            return
        self._own.looks = True  # reading a value may call functions of ours
        try:
            values = [returned]
            if event == "call":
                arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
                values = [frame.f_locals.get(argument) for argument in arguments if argument not in {"self", "cls"}]
            with torch._C.DisableTorchFunction():
                for data in (data for value in values for data in _bytes_in(value, DEEPEST)):
                    for mark, functions in self._marks.items():
                        if mark in data:
                            functions.add(name)
        finally:
            self._own.looks = False

    def arrived(self) -> None:
        """Ends the way up."""
        self._marks = {mark: functions for mark, functions in self._marks.items() if functions is self.back}

    def install(self) -> None:
        """Makes it the hook of this thread and of those that start later."""
        threading.setprofile(self)
        sys.setprofile(self)


def _name(code: CodeType) -> str:
    """Returns the name of a function of ours with its file; empty for another function."""
    path = next((code.co_filename.removeprefix(folder) for folder in OURS if code.co_filename.startswith(folder)), "")
    return path and f"{path} {code.co_qualname}"


def _bytes_in(value: object, depth: int) -> Iterator[bytes]:
    """Yields the bytes that a value is or holds: all of a buffer, and of a tensor the first."""
    if isinstance(value, Tensor):
        if value.device.type == "cpu" and value.layout is torch.strided and value.nbytes >= 32:
            try:
                yield _first_bytes(value)
            except RuntimeError:  # a tensor without memory of its own
                return
    elif isinstance(value, bytes | bytearray | memoryview):
        if len(value) <= MOST_BYTES:
            yield bytes(value)
    elif isinstance(value, Message):
        yield value.SerializePartialToString()
    elif depth and value is not None:
        for held in _held_by(value):
            yield from _bytes_in(held, depth - 1)


def _first_bytes(tensor: Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), 32)


def _held_by(value: object) -> list[object]:
    """Returns what a collection, a partial call or an object of ours holds."""
    if isinstance(value, Mapping) and type(value) is dict:
        return [*value.values()][:LONGEST]
    if isinstance(value, list | tuple | set | frozenset):
        return [*value][:LONGEST]
    if isinstance(value, partial):
        return [*value.args, *value.keywords.values()]
    if not type(value).__module__.startswith(("backhaul.", "backhaul_runtime", "backhaul_server")):
        return []
    slots = (member for kind in type(value).__mro__ for member in vars(kind).values())
    members = [member for member in slots if isinstance(member, MemberDescriptorType)]
    return [*vars(value).values()] if not members and hasattr(value, "__dict__") else _read(value, members)


def _read(value: object, members: list[MemberDescriptorType]) -> list[object]:
    held: list[object] = []
    for member in members:
        try:
            held.append(member.__get__(value))
        except AttributeError:  # a slot that is not set
            continue
    return held


def _serve(file: str, arguments: list[str]) -> int:
    """Is the worker's process, which writes what it counted."""
    from backhaul._cli.main import main

    sys.argv[1:] = arguments
    passed = Passed()
    passed.install()
    code: Any = main()
    sys.setprofile(None)
    Path(file).write_text(json.dumps([sorted(passed.up), sorted(passed.back)]), encoding="utf-8")
    return int(code or 0)


def count() -> tuple[set[str], set[str]]:
    """Returns the functions that a tensor passes on its way up, and those that its gradient passes back."""
    import backhaul
    from support.processes import WorkerProcess

    x, given, gradient = inputs()
    passed = Passed()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "worker"
        with WorkerProcess(program=(__file__, str(file))) as worker:
            passed.install()
            try:
                with backhaul.connect(worker.address) as session:
                    output = session.checkpoint(torch.sin, x, returns="gradients", strict=True)
                    while not any(known.segments for known in worker.telemetry().sessions):
                        time.sleep(0.01)
                    passed.arrived()
                    output.backward(given)
                    assert x.grad is not None
                    assert torch.equal(x.grad, gradient)
            finally:
                sys.setprofile(None)
                threading.setprofile(None)
            worker.end()
        up, back = json.loads(file.read_text(encoding="utf-8"))
    return passed.up.union(up), passed.back.union(back)


def main() -> None:
    """Prints the counts, and with --list the functions."""
    for way, functions in zip(("up", "back"), count(), strict=True):
        modules = {function.partition(" ")[0] for function in functions}
        sys.stdout.write(f"{way}: {len(functions)} functions in {len(modules)} modules\n")
        if "--list" in sys.argv:
            sys.stdout.writelines(f"    {function}\n" for function in sorted(functions))


if __name__ == "__main__":
    if "worker" in sys.argv:
        sys.exit(_serve(sys.argv[1], sys.argv[2:]))
    main()

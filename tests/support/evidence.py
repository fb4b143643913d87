"""Directories of evidence that tests record, verify, and change."""

import argparse
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from google.protobuf import json_format
from google.protobuf.message import Message

import backhaul
from backhaul._evidence.files import EvidenceName, file_of, object_of
from backhaul.demo.corpus import standard_library
from backhaul.demo.variants import DemoSettings, variants
from backhaul.verify import command
from backhaul_proto.v1 import evidence_pb2
from conftest import quiet

DEMO = DemoSettings(steps=2, layers=1, width=32, context=16, batch=4, micro_batches=2)
SEGMENTS = 3 * DEMO.steps * DEMO.layers * DEMO.micro_batches
"""The number of segments that the demo's three variants with Backhaul run."""

M = TypeVar("M", bound=Message)


def record_demo(directory: Path, worker: str) -> None:
    """Trains the variants of `backhaul demo`, and records all steps."""
    sessions = []

    def connect(_: str, returns: str) -> backhaul.Session:
        recording = quiet(evidence=str(directory), evidence_share=1.0)
        sessions.append(backhaul.connect(worker, returns=returns, settings=recording))  # type: ignore[arg-type]
        return sessions[-1]

    corpus = standard_library()
    trained = variants(DEMO, connect)
    for step in range(DEMO.steps):
        for variant in trained:
            variant.train(corpus, step)
            variant.compare(trained[0])
        for variant in trained:
            variant.finish()
    for session in sessions:
        session.close()
    assert all(variant.gradients_equal for variant in trained)


class Verified(NamedTuple):
    """What `backhaul verify` says of a directory.

    Attributes:
        code: The exit code of the command.
        shown: What it has printed.
        verdicts: Its verdicts, as in the JSON file.
        problems: What is wrong with the directory, beside single segments.
        notes: What else it knows of the directory.
    """

    code: int
    shown: str
    verdicts: list[dict[str, Any]]
    problems: list[str]
    notes: list[str]

    def of(self, name: EvidenceName) -> dict[str, Any]:
        """The verdict on the call that a file is about."""
        (verdict,) = [one for one in self.verdicts if (one["step"], one["session"], one["call"]) == name[:3]]
        return verdict

    @property
    def outcomes(self) -> set[str]:
        """The outcomes of all segments."""
        return {verdict["outcome"] for verdict in self.verdicts}


Verify = Callable[..., Verified]


def verify(directory: Path, folder: Path, capture: Callable[[], str], *options: str) -> Verified:
    """Runs the command in this process.

    Args:
        directory: The directory of evidence.
        folder: Where the JSON file is written.
        capture: Returns what was printed since it was called last.
        options: Further options of the command.
    """
    capture()
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    file = folder / "verdicts.json"
    file.unlink(missing_ok=True)
    code = command.run(parser.parse_args([str(directory), "--json", str(file), *options]))
    written = json.loads(file.read_text()) if file.exists() else {"segments": [], "problems": [], "notes": []}
    return Verified(code, capture(), written["segments"], written["problems"], written["notes"])


def copied(directory: Path, to: Path) -> Path:
    """A copy of a directory of evidence, for a test to change."""
    return Path(shutil.copytree(directory, to / "copy"))


def files_of(directory: Path) -> Iterator[tuple[EvidenceName, Path]]:
    """The files of a directory's steps with their names, in order."""
    for path in sorted(set((directory / "steps").iterdir()) - set(directory.rglob("*.tmp"))):
        name = EvidenceName.parse(path.name)
        assert name is not None
        yield name, path


def read(path: Path, kind: type[M]) -> M:
    """The message in a file of a step."""
    return json_format.Parse(path.read_bytes().partition(b"\n")[0], kind())


def rewrite(path: Path, message: Message) -> None:
    """Writes a message into a file of a step, with the digest that belongs to it."""
    path.write_bytes(file_of(message))


def add_object(directory: Path, content: bytes) -> bytes:
    """Adds an object to a directory. Returns its digest."""
    digest = object_of(content)
    (directory / "objects" / digest.hex()).write_bytes(content)
    return digest


def first_call(directory: Path, *, with_backward: bool = True) -> tuple[EvidenceName, evidence_pb2.EvidenceCall]:
    """The first call of a directory whose gradients come from a recomputation, or not."""
    for name, path in files_of(directory):
        if name.call and not name.backward:
            message = read(path, evidence_pb2.EvidenceCall)
            if message.has_backwards == with_backward:
                return name, message
    raise AssertionError("no such call was recorded")


def flip(path: Path, position: int, bit: int = 0) -> None:
    """Changes a bit of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)

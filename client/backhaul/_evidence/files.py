"""The files of a directory of evidence: how they are written so that none is ever torn, and how they are read.

NOTE [Evidence]
1. `format` says which version of the layout the directory has. `objects` has programs, elements of tensors, generator
   states and origins, each once, under the SHA-256 of its bytes. `steps` has one file for each call, for each backward
   and for the end of each step: a message of evidence.proto as JSON, and in a second line the SHA-256 of the first.
2. A file is written under a temporary name, flushed to the disk, and renamed. So each file is whole or absent. What a
   file names is written before the file itself.
3. No file names a path. An object's name follows from its digest, and all other names from numbers, so nothing in a
   directory leads out of it. Links are not followed.
4. Several sessions may write to one directory. `lock` has the bytes of all files, and is locked while a session writes.
   The number only bounds the directory: it is counted anew when a session begins, and nothing else reads it.
5. Nothing is ever deleted, except temporary files of a process that has died. Who wants to know what happened in a step
   must not find that a later one took its place.
"""

import hashlib
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import NamedTuple, TypeVar

from google.protobuf import json_format
from google.protobuf.message import Message

FORMAT = "backhaul evidence 1\n"
BLOCK_BYTES = 4096
"""A file takes whole blocks of a disk, so its bytes are rounded up to this number."""

MAX_MESSAGE_BYTES = 64 << 20
"""The most bytes of a file in `steps`. A call with 100,000 saved tensors takes about 20 MB."""

_END_BYTES = 16 * BLOCK_BYTES
"""What is left for the end of the last step. It says which calls the step has."""

_LOCK_S = 30.0
_POLL_S = 0.01
_DIGEST_BYTES = 32
_TEMPORARY = ".tmp"
_NAME = re.compile(r"(?P<step>\d{10})-(?P<session>[0-9a-f]{16})(?:-(?P<call>\d{8})(?:-(?P<backward>\d{4}))?)?")
_OBJECT = re.compile(r"[0-9a-f]{64}")

M = TypeVar("M", bound=Message)
Bytes = bytes | memoryview


class UnusableError(Exception):
    """Why something can't be evidence, or evidence can't be used, in a sentence. Raised and caught internally."""


class EvidenceName(NamedTuple):
    """The name of a file in `steps`.

    Attributes:
        step: Number of the step in the directory, from 0.
        session: Id of the session that wrote it.
        call: Number of the call in its step and session, from 1; 0 for the end of the step.
        backward: Number of the backward of the call, from 1; 0 for the call itself.
    """

    step: int
    session: str
    call: int = 0
    backward: int = 0

    def __str__(self) -> str:
        of_call = f"-{self.call:08d}" if self.call else ""
        return f"{self.step:010d}-{self.session}{of_call}" + (f"-{self.backward:04d}" if self.backward else "")

    @classmethod
    def parse(cls, text: str) -> "EvidenceName | None":
        """Returns the name that a text stands for; None if it stands for none."""
        if (match := _NAME.fullmatch(text)) is None:
            return None
        name = cls(int(match["step"]), match["session"], int(match["call"] or 0), int(match["backward"] or 0))
        return name if str(name) == text else None  # which rules out numbers in other scripts, and zeros


def object_of(content: Bytes) -> bytes:
    """Returns the digest that names an object: the SHA-256 of its bytes, 32 bytes."""
    return hashlib.sha256(content).digest()


class EvidenceWriter:
    """Writes to a directory of evidence. One thread uses it, and other processes may write to the same directory.

    Args:
        path: The directory. It is made if it is missing.
        limit_bytes: The most bytes that all its files may have together.

    Attributes:
        last_step: The number of the last step that the directory has; -1 if it has none.

    Raises:
        UnusableError: The directory has files of something else, or is of another version.
        OSError: The directory can't be made or written to.
    """

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self._path, self._limit_bytes, self._used_bytes = path, limit_bytes, 0
        self._objects, self._steps = path / "objects", path / "steps"
        path.mkdir(parents=True, exist_ok=True)
        others = [one for one in path.iterdir() if one.name != "lock" and not one.name.endswith(_TEMPORARY)]
        with self._locked():
            if others:
                check_format(path)
            else:
                self._write(path / "format", FORMAT.encode())
            for folder in (self._objects, self._steps):
                folder.mkdir(exist_ok=True)
                for temporary in folder.glob("*" + _TEMPORARY):
                    temporary.unlink()
            _flush_folder(path)
            self._used_bytes = sum(map(_file_bytes, [*self._objects.iterdir(), *self._steps.iterdir()]))
        names = [EvidenceName.parse(file.name) for file in self._steps.iterdir()]
        self.last_step = max([name.step for name in names if name is not None], default=-1)

    def has(self, digest: bytes) -> bool:
        """Whether the directory has an object."""
        return (self._objects / digest.hex()).exists()

    def write(
        self, objects: Mapping[bytes, Bytes], files: Mapping[EvidenceName, Message], *, is_end: bool = False
    ) -> bool:
        """Writes objects by their digests, then files by their names. Returns False if they do not fit the limit.

        Args:
            objects: The bytes of each object. Those that the directory has are not written again.
            files: The message of each file.
            is_end: Whether it is the end of a step, for which room is left.

        Raises:
            OSError: The disk is full or broken. The directory has nothing torn, and perhaps some of the objects.
        """
        texts = {name: file_of(message) for name, message in files.items()}
        with self._locked():
            missing = {digest: content for digest, content in objects.items() if not self.has(digest)}
            needed_bytes = sum(map(_rounded, map(len, [*missing.values(), *texts.values()])))
            left_bytes = 0 if is_end else _END_BYTES
            if self._used_bytes + needed_bytes + left_bytes > self._limit_bytes:
                return False
            for digest, content in missing.items():
                self._write(self._objects / digest.hex(), content)
                self._used_bytes += _rounded(len(content))
            if missing:
                _flush_folder(self._objects)
            for name, text in texts.items():
                self._write(self._steps / str(name), text)
                self._used_bytes += _rounded(len(text))
            _flush_folder(self._steps)
        return True

    def _write(self, path: Path, content: Bytes) -> None:
        temporary = path.with_name(path.name + _TEMPORARY)
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keeps other sessions from writing, and passes the number of bytes on to them (Rule 4)."""
        # Opened each time: a child of a fork has a copy of what is open, and would keep the lock of a dead parent.
        lock = os.open(self._path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            until_s = time.monotonic() + _LOCK_S
            while True:
                try:
                    flock(lock, LOCK_EX | LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until_s:
                        raise
                    time.sleep(_POLL_S)
            with suppress(ValueError):
                self._used_bytes = int(os.pread(lock, 32, 0))
            try:
                yield
            finally:
                number = b"%d" % self._used_bytes
                os.truncate(lock, os.pwrite(lock, number, 0))
        finally:
            os.close(lock)


class EvidenceReader:
    """Reads a directory of evidence, which is not trusted: each byte is checked before it is used.

    Args:
        path: The directory that the files are in.

    Attributes:
        read_objects: The digests of all objects that were read so far.

    Raises:
        UnusableError: It is no directory of evidence, or of another version.
    """

    def __init__(self, path: Path) -> None:
        check_format(path)
        self._path = path
        self.read_objects: set[bytes] = set()

    def names(self) -> tuple[list[EvidenceName], list[str]]:
        """Returns the names of the files in `steps`, in order, and those that are no such names."""
        named = [(text, EvidenceName.parse(text)) for text in self._names_in("steps")]
        return sorted(name for _, name in named if name is not None), [text for text, name in named if name is None]

    def unread_objects(self) -> Iterator[tuple[str, bytes | None]]:
        """Yields the names in `objects` of which nothing was read so far, with their digests; None for no such name."""
        for text in sorted(self._names_in("objects")):
            digest = bytes.fromhex(text) if _OBJECT.fullmatch(text) else None
            if digest is None or digest not in self.read_objects:
                yield f"objects/{text}", digest

    def message(self, name: EvidenceName, kind: type[M]) -> M:
        """Returns the message in a file of `steps`.

        Raises:
            UnusableError: The file is missing, or was changed.
        """
        where = f"steps/{name}"
        text, _, end = self._read("steps", str(name), MAX_MESSAGE_BYTES).partition(b"\n")
        if end != hashlib.sha256(text).hexdigest().encode() + b"\n":
            raise UnusableError(f"{where} was changed or cut off after it was written: its digest is another")
        return _parsed(text, kind, where)

    def object(self, digest: bytes, most_bytes: int, size_bytes: int | None = None) -> bytes:
        """Returns an object.

        Args:
            digest: The digest of the object.
            most_bytes: The most bytes that it may have.
            size_bytes: The bytes that it must have; None for any number.

        Raises:
            UnusableError: It is missing, was changed, or has another size.
        """
        if len(digest) != _DIGEST_BYTES:
            raise UnusableError(f"a file of the directory names an object by {len(digest)} bytes, not {_DIGEST_BYTES}")
        where = f"objects/{digest.hex()}"
        self.read_objects.add(digest)
        content = self._read("objects", digest.hex(), most_bytes)
        if object_of(content) != digest:
            raise UnusableError(f"{where} was changed or cut off after it was written: its digest is another")
        if size_bytes is not None and len(content) != size_bytes:
            raise UnusableError(f"{where} has {len(content)} bytes, and what names it needs {size_bytes}")
        return content

    def check_object(self, digest: bytes) -> None:
        """Raises UnusableError if an object is missing or was changed. Reads it in pieces."""
        name, content = digest.hex(), hashlib.sha256()
        for piece in self._pieces("objects", name):
            content.update(piece)
        if content.digest() != digest:
            raise UnusableError(f"objects/{name} was changed or cut off after it was written: its digest is another")

    def message_object(self, digest: bytes, kind: type[M]) -> M:
        """Returns the message in an object, as `object` does."""
        text = self.object(digest, MAX_MESSAGE_BYTES)
        return _parsed(text, kind, f"objects/{digest.hex()}")

    def _names_in(self, folder: str) -> list[str]:
        try:
            with _opened(self._path, folder) as opened, os.scandir(opened) as entries:
                return [entry.name for entry in entries if not entry.name.endswith(_TEMPORARY)]
        except OSError as error:
            raise UnusableError(f"{folder} can't be read: {error.strerror or error}") from None

    def _read(self, folder: str, name: str, most_bytes: int) -> bytes:
        content, size_bytes = [], 0
        for piece in self._pieces(folder, name):
            content.append(piece)
            size_bytes += len(piece)
            if size_bytes > most_bytes:
                raise UnusableError(f"{folder}/{name} has more than {most_bytes} bytes, and must not")
        return b"".join(content)

    def _pieces(self, folder: str, name: str) -> Iterator[bytes]:
        try:
            with _opened(self._path, folder) as opened:
                # Without O_NONBLOCK, opening a pipe would wait for its other end.
                file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=opened)
                try:
                    if not stat.S_ISREG(os.fstat(file).st_mode):
                        raise UnusableError(f"{folder}/{name} is no plain file, and is not read")
                    while piece := os.read(file, 1 << 20):
                        yield piece
                finally:
                    os.close(file)
        except FileNotFoundError:
            raise UnusableError(f"{folder}/{name} is missing") from None
        except OSError as error:
            is_link = (self._path / folder / name).is_symlink()
            why = "it is a link, which is not followed" if is_link else error.strerror or str(error)
            raise UnusableError(f"{folder}/{name} can't be read: {why}") from None


def check_format(path: Path) -> None:
    """Raises UnusableError if a path is no directory of evidence, or one of another version."""
    try:
        with (path / "format").open("rb") as file:
            text = file.read(len(FORMAT) + 100)
    except FileNotFoundError:
        what = "is no directory of evidence: it has no file named format" if path.is_dir() else "is no directory"
        raise UnusableError(f"{path} {what}. Name one that Settings(evidence=...) was given") from None
    except OSError as error:
        raise UnusableError(f"{path}/format can't be read: {error.strerror or error}") from None
    if text != FORMAT.encode():
        raise UnusableError(
            f"{path}/format says {text.decode(errors='replace')!r}, and this version of backhaul reads {FORMAT!r}. Use "
            "the version that wrote the directory, unless the file was changed"
        )


def _parsed(text: bytes, kind: type[M], where: str) -> M:
    try:
        return json_format.Parse(text, kind())
    except (json_format.ParseError, ValueError, RecursionError) as error:
        line = str(error).partition("\n")[0][:200]
        raise UnusableError(f"{where} is not what this version of backhaul writes: {line}") from None


def encoded(message: Message) -> bytes:
    """Returns a message as the bytes of an object."""
    return json_format.MessageToJson(message, preserving_proto_field_name=True, indent=None, sort_keys=True).encode()


def file_of(message: Message) -> bytes:
    """Returns a message as the bytes of a file in `steps` (Rule 1)."""
    text = encoded(message)
    return text + b"\n" + hashlib.sha256(text).hexdigest().encode() + b"\n"


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _file_bytes(path: Path) -> int:
    return _rounded(path.lstat().st_size)


def _flush_folder(path: Path) -> None:
    """Flushes the names in a folder to the disk."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def _opened(path: Path, folder: str) -> Iterator[int]:
    """Opens a folder of the directory, unless it is a link."""
    opened = os.open(path / folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield opened
    finally:
        os.close(opened)

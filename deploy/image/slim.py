"""Removes files from a virtual environment that an image needs only to build or test, and prints the sizes.

    python slim.py VENV [--for-compiling]

With --for-compiling what Inductor needs to compile and link stays: setuptools, headers, and the tables of torch's
libraries.
Bytecode is kept, because a read-only container cannot write it and would compile torch at every start.
"""

import shutil
import struct
import sys
from pathlib import Path

TOOLS = "tools that install packages"
HEADERS = "headers and tools to compile against torch and numpy"
REMOVED = {
    TOOLS: [
        "setuptools",
        "setuptools-*.dist-info",
        "_distutils_hack",
        "distutils-precedence.pth",
        "pkg_resources",
    ],
    "torch's own tests": [
        "torch/test",
        "torch/bin/*Test",
        "torch/bin/*_models",
        "torch/bin/*.ptl",
        "torch/bin/test_*",
    ],
    HEADERS: [
        "torch/bin/protoc*",
        "torch/include",
        "torch/share",
        "numpy/_core/include",
    ],
    "tests of other packages": [f"{package}/**/tests" for package in ("mpmath", "networkx", "numpy", "sympy")],
}
"""Patterns below site-packages. torch.testing is kept, because torch.utils.checkpoint imports it."""

STRIPPED = ["torch/lib/libtorch_cpu.so", "torch/lib/libtorch_python.so"]
"""Libraries whose symbol table for debuggers is a fifth of their size. The loader does not need that table."""

# Offset and struct format of fields of a 64-bit ELF header.
_MAGIC = b"\x7fELF\x02\x01"
_PROGRAM_HEADERS = (0x20, "<Q")
_SECTION_HEADERS = (0x28, "<Q")
_PROGRAM_HEADER_SIZE_AND_COUNT = (0x36, "<HH")
_SECTION_COUNT_AND_NAMES = (0x3C, "<HH")
_OFFSET_IN_FILE = (0x08, "<Q")
_SIZE_IN_FILE = (0x20, "<Q")


def main(venv: Path, *, for_compiling: bool = False) -> None:
    """Slims a virtual environment in place. See above for `for_compiling`."""
    (packages,) = venv.glob("lib/python3*/site-packages")
    before = size_bytes(venv)
    for what, patterns in REMOVED.items():
        if for_compiling and what in {TOOLS, HEADERS}:
            continue
        paths = [path for pattern in patterns for path in packages.glob(pattern)]
        _report(what, sum(map(size_bytes, paths)))
        for path in paths:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if not for_compiling:
        _report("symbols for debuggers", sum(strip_symbols(packages / name) for name in STRIPPED))
    print(f"slim: {before / 1e6:.0f} MB -> {size_bytes(venv) / 1e6:.0f} MB")


def strip_symbols(library: Path) -> int:
    """Truncates a shared library after its last loaded segment. Returns the number of removed bytes.

    Only sections that no process maps follow that segment: symbols for debuggers and the section table. `strip` of
    binutils does the same but would need another package in the build. Files other than little-endian 64-bit ELF files
    are not changed.
    """
    content = library.read_bytes()
    if not content.startswith(_MAGIC):
        return 0
    table, (size, count) = _field(content, _PROGRAM_HEADERS)[0], _field(content, _PROGRAM_HEADER_SIZE_AND_COUNT)
    end = table + size * count
    for header in range(table, end, size):
        (start,), (length,) = (_field(content, field, header) for field in (_OFFSET_IN_FILE, _SIZE_IN_FILE))
        end = max(end, start + length)
    with library.open("r+b") as file:
        file.truncate(end)
        for offset, form in (_SECTION_HEADERS, _SECTION_COUNT_AND_NAMES):
            file.seek(offset)
            file.write(bytes(struct.calcsize(form)))
    return len(content) - end


def size_bytes(path: Path) -> int:
    """Returns the size of a file, or of all files below a directory. Links count as 0 bytes."""
    if path.is_symlink():
        return 0
    return sum(map(size_bytes, path.iterdir())) if path.is_dir() else path.stat().st_size


def _field(content: bytes, field: tuple[int, str], base: int = 0) -> tuple[int, ...]:
    offset, form = field
    return struct.unpack_from(form, content, base + offset)


def _report(what: str, removed_bytes: int) -> None:
    print(f"slim: {what}: {removed_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]), for_compiling="--for-compiling" in sys.argv[2:])

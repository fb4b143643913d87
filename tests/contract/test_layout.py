"""Where things are, who may import whom, and what an import costs."""

import ast
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from support.parsed_files import parsed

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "backhaul_proto": ROOT / "proto/backhaul_proto",
    "backhaul_runtime": ROOT / "runtime/backhaul_runtime",
    "backhaul": ROOT / "client/backhaul",
    "backhaul_server": ROOT / "server/backhaul_server",
    "backhaul_lab": ROOT / "lab/backhaul_lab",
}
MAY_IMPORT = {
    "backhaul_proto": {"backhaul_proto"},
    "backhaul_runtime": {"backhaul_proto", "backhaul_runtime"},
    "backhaul": {"backhaul_proto", "backhaul_runtime", "backhaul"},
    "backhaul_server": {"backhaul_proto", "backhaul_runtime", "backhaul_server"},
    "backhaul_lab": {"backhaul_proto", "backhaul_runtime", "backhaul", "backhaul_server", "backhaul_lab"},
}
MODULES = [(name, path) for name, folder in PACKAGES.items() for path in sorted(folder.rglob("*.py"))]
PUBLIC = ["backhaul", "backhaul_runtime.errors"]


def imported(path: Path) -> set[str]:
    """Top-level names of what a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names.add((node.module or "").split(".")[0])
    return names


def test_imports_run_one_way() -> None:
    offenders = {
        str(path.relative_to(ROOT)): forbidden
        for package, path in MODULES
        if (forbidden := imported(path) & set(PACKAGES) - MAY_IMPORT[package])
    }
    assert offenders == {}


def test_mypy_checks_every_folder_of_tests() -> None:
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["packages"]
    assert {path.parent.name for path in (ROOT / "tests").glob("*/*.py")} == set(checked) - set(PACKAGES)


def test_the_runtime_knows_no_server_and_the_proto_no_torch() -> None:
    for package, path in MODULES:
        if package == "backhaul_runtime":
            assert not imported(path) & {"grpc", "fastapi", "uvicorn"}, path
        if package == "backhaul_proto":
            assert "torch" not in imported(path), path


@pytest.mark.parametrize("root", ["proto", "runtime", "client", "server", "lab"])
def test_a_source_root_is_no_package(root: str) -> None:
    assert not (ROOT / root / "__init__.py").exists()


@pytest.mark.parametrize("name", ["proto", "server", "client", "runtime", "tests", "docker-compose.yml", "Dockerfile"])
def test_what_must_be_at_the_top_is_there(name: str) -> None:
    assert (ROOT / name).exists()


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_sorted_and_there(name: str) -> None:
    module = import_module(name)
    assert module.__all__ == sorted(module.__all__)
    for public in module.__all__:
        member = getattr(module, public)
        assert member.__doc__ or member.__module__ == "torch.utils.checkpoint", public
    assert set(dir(module)) >= set(module.__all__)


def test_private_modules_of_the_client_are_named_so() -> None:
    names = {path.name for path in PACKAGES["backhaul"].glob("*.py")}
    assert {name for name in names if not name.startswith("_")} == set()


def modules_after(code: str) -> set[str]:
    """Top-level modules loaded after running some code in a fresh interpreter."""
    script = f"import sys\n{code}\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(process.stdout.splitlines()[-1].split())


HELP = "from contextlib import suppress\nfrom backhaul._cli.main import main\nwith suppress(SystemExit):\n    main({})"


WITHOUT_TORCH = [
    "import backhaul",
    HELP.format(["--help"]),
    HELP.format(["worker", "--help"]),
    HELP.format(["demo", "--help"]),
    HELP.format(["token", "/proc/version"]),
    HELP.format(["health", "127.0.0.1:1"]),
    HELP.format(["health", "http://127.0.0.1:1"]),
    HELP.format(["top", "--help"]),
    HELP.format(["simulate", "--help"]),
    HELP.format(["simulate", "--costs", "docs/simulation.json"]),
    "import backhaul_lab.simulate.predictions",
    HELP.format(["--version"]),
    "import backhaul_server.dashboard.http.app",
    "import backhaul_server.dashboard.command",
]
"""What users wait for, and what runs where there is no torch."""


@pytest.mark.slow
def test_what_needs_no_torch_does_not_import_it() -> None:
    script = (
        f"for code in {WITHOUT_TORCH!r}:\n    exec(code)\n    assert not {{'torch', 'numpy'}} & {{*sys.modules}}, code"
    )
    assert "backhaul_server" in modules_after(script)


@pytest.mark.slow
def test_the_client_needs_no_package_of_the_server() -> None:
    code = (
        "import builtins\n"
        "real = builtins.__import__\n"
        "def without(name, *rest):\n"
        "    if name.split('.')[0] in {'fastapi', 'uvicorn', 'pydantic', 'prometheus_client', 'grpc_health', "
        "'grpc_reflection', 'opentelemetry'}:\n"
        "        raise ImportError(name)\n"
        "    return real(name, *rest)\n"
        "builtins.__import__ = without\n"
        "import backhaul._session, backhaul.demo.variants, backhaul_server.worker.main\n"
    )
    assert "torch" in modules_after(code)


def test_importing_costs_no_thread_and_no_socket() -> None:
    code = (
        "import threading, os, backhaul\n"
        "assert threading.active_count() == 1\n"
        "assert not any(os.readlink(f'/proc/self/fd/{fd}').startswith('socket') "
        "for fd in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{fd}'))\n"
    )
    assert "grpc" not in modules_after(code)

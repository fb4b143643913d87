"""Tests of the wheel that users install, and of the distribution of the lab."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_wheel_holds_all_that_runs_and_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(ROOT)], check=True, timeout=120, cwd=tmp_path)
    (wheel,) = tmp_path.glob("backhaul-*-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0].split("-")[0] for name in names} == {
        "backhaul",
        "backhaul_proto",
        "backhaul_runtime",
        "backhaul_server",
    }
    for needed in (
        "backhaul/demo/model.py",
        "backhaul/py.typed",
        "backhaul_proto/v1/segment.proto",
        "backhaul_proto/v1/segment_pb2.pyi",
        "backhaul_runtime/program/ops.txt",
        "backhaul_server/dashboard/static/index.html",
        "backhaul_server/dashboard/static/js/page.js",
        "backhaul_server/dashboard/static/vendor/html_to_image/LICENSE",
        "backhaul_server/dashboard/static/vendor/html_to_image/html-to-image.js",
        "backhaul_server/dashboard/static/vendor/inter/LICENSE",
        "backhaul_server/dashboard/static/vendor/swagger_ui/LICENSE",
        "backhaul_server/dashboard/static/vendor/swagger_ui/swagger-ui-bundle.js",
        "backhaul_server/dashboard/static/vendor/uplot/LICENSE",
        "backhaul_server/dashboard/static/vendor/uplot/uPlot.iife.min.js",
    ):
        assert needed in names
    assert not [name for name in names if "__pycache__" in name or "test" in name]
    assert not [name for name in names if name.startswith(("backhaul/plan/", "backhaul/simulate/"))]
    metadata = next(name for name in names if name.endswith("METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    assert "Project-URL: Source, https://github.com/" in text
    addresses = re.findall(r"\]\(([^)]+)\)", text)
    assert len(addresses) > 10
    assert {address for address in addresses if not address.startswith("https://")} == set()
    assert "License-Expression: Apache-2.0" in text
    required = [line for line in text.splitlines() if line.startswith("Requires-Dist") and "extra" not in line]
    assert {line.split(": ")[1].split(">")[0].split("<")[0] for line in required} == {
        "grpcio",
        "numpy",
        "protobuf",
        "torch",
        "xxhash",
        "zstandard",
    }


@pytest.mark.slow
@pytest.mark.nightly
def test_the_wheel_of_the_lab_holds_its_commands(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(ROOT / "lab")], check=True, timeout=120, cwd=tmp_path)
    (wheel,) = tmp_path.glob("backhaul_lab-*-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"backhaul_lab"}
    commands = {name.split("/")[1] for name in names if name.endswith("/command.py")}
    assert commands == {"bench", "experiment", "plan", "simulate"}


def test_the_lab_has_the_version_of_the_project_and_needs_it() -> None:
    project, lab = (
        tomllib.loads((ROOT / file).read_text())["project"] for file in ("pyproject.toml", "lab/pyproject.toml")
    )
    assert lab["version"] == project["version"]
    assert project["optional-dependencies"]["lab"] == [f"{lab['name']}=={project['version']}"]
    assert lab["dependencies"] == [f"backhaul[server]=={project['version']}"]

"""The file between `backhaul plan` and `connect(plan=...)`."""

from pathlib import Path

import pytest

from backhaul._config import Settings, resolve
from backhaul._plan_file import read_plan, write_plan
from backhaul_runtime.errors import SettingError

SETTINGS = {"worker": "gpu-box:50051", "segment_layers": 4, "kept_layers": 2, "boundaries": "derive", "local": "keep"}


@pytest.fixture
def plan(tmp_path: Path) -> str:
    path = tmp_path / "plan.toml"
    write_plan(path, SETTINGS, {"training": {"model": 'a "quoted" name', "accumulates": True}, "prediction": {}})
    return str(path)


def test_a_session_gets_the_settings_of_its_plan(plan: str) -> None:
    config = resolve(plan=plan)
    assert {name: getattr(config, name) for name in SETTINGS} == SETTINGS
    assert config.returns == "auto"
    assert resolve(plan=Path(plan)) == config


def test_fields_and_the_environment_go_before_the_plan(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKHAUL_LOCAL", "recompute")
    config = resolve(Settings(segment_layers=1), plan=plan)
    assert (config.segment_layers, config.local, config.kept_layers) == (1, "recompute", 2)
    monkeypatch.setenv("BACKHAUL_PLAN", plan)
    assert resolve().kept_layers == 2


def test_a_missing_plan_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="nowhere.toml' cannot be read: No such file.*`backhaul plan`"):
        resolve(plan=str(tmp_path / "nowhere.toml"))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("version = ", "is not a plan"),
        ("\x00", "is not a plan"),
        ("[settings]\nlocal = 'keep'\n", "has version None"),
        ("version = 2\n[settings]\n", "has version 2"),
        ("version = 1\nsettings = 3\n[prediction]\n", "is cut off"),
        ("version = 1\n[settings]\nsegment_layers = 1", "is cut off: .*no \\[prediction\\] after"),
        ("version = 1\n", "is cut off"),
        ("version = 1\n[settings]\ntoken_file = '/etc/shadow'\n[prediction]\n", "has the setting 'token_file'"),
        ("version = 1\n[settings]\nsegment_layers = 'two'\n[prediction]\n", "segment_layers='two' must be of type int"),
        ("version = 1\n[settings]\nsegment_layers = 0\n[prediction]\n", "segment_layers=0 must be"),
        ("version = 1\n[settings]\nkept_layers = -1\n[prediction]\n", "kept_layers=-1 must not be negative"),
        ("version = 1\n[settings]\nboundaries = 'guess'\n[prediction]\n", "boundaries='guess' is not one of"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, content: str, why: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(content)
    with pytest.raises(SettingError, match=why):
        resolve(plan=str(path))


def test_a_plan_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SettingError, match="is not a plan"):
        read_plan(str(path))
    with pytest.raises(SettingError, match="cannot be read"):
        read_plan(str(tmp_path))

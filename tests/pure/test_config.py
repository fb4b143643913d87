import copy
import pickle
import sys
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from backhaul._config import ARGUMENTS, RARE, Config, Settings, refuse_unknown, resolve
from backhaul._plan_file import write_plan
from backhaul._setting import default_of, texts_of
from backhaul_runtime.process.settings import variable_of

OTHERS: dict[str, Any] = {
    "silence_s": 7.0,
    "tags": ("a", "b"),
    "traces": False,
    "notes": "more",
    "evidence": "folder",
    "evidence_share": 0.5,
}
"""Values of some fields. Others are one above their default, or the opposite, or the last choice."""


def other(name: str) -> Any:
    """A value of a setting that is not its default."""
    (field,) = (field for field in fields(Config) if field.name == name)
    default = default_of(field)
    if name in OTHERS:
        return OTHERS[name]
    if isinstance(default, bool):
        return not default
    if isinstance(default, float) and 0 < default < 1:  # a share
        return 1.0
    return default + 1 if isinstance(default, int | float) else field.type.__args__[-1]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", sorted(RARE))
def test_a_field_that_is_given_goes_before_the_environment_even_as_its_default(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    default, value = getattr(Config(), name), other(name)
    text = ",".join(value) if isinstance(value, tuple) else str(value)
    monkeypatch.setenv(variable_of(name), text)
    assert getattr(resolve(), name) == value
    assert getattr(resolve(Settings()), name) == value
    assert getattr(resolve(Settings(**{name: default})), name) == default
    monkeypatch.delenv(variable_of(name))
    assert getattr(resolve(Settings(**{name: value})), name) == value


def test_program_over_environment_over_plan_over_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tmp_path / "plan.toml"
    planned = {"worker": "plan:1", "returns": "activations", "segment_layers": 4, "kept_layers": 4, "local": "keep"}
    write_plan(plan, planned, {"prediction": {}})
    monkeypatch.setenv("BACKHAUL_WORKER", "environment:2")
    monkeypatch.setenv("BACKHAUL_RETURNS", "auto")
    monkeypatch.setenv("BACKHAUL_SEGMENT_LAYERS", "2")
    monkeypatch.setenv("BACKHAUL_KEPT_LAYERS", "2")
    resolved = resolve(Settings(segment_layers=1), worker="argument:3", returns=None, plan=plan)
    assert (resolved.worker, resolved.returns) == ("argument:3", "auto")
    assert (resolved.segment_layers, resolved.kept_layers, resolved.local) == (1, 2, "keep")
    assert (resolved.boundaries, resolved.strict) == ("auto", False)


def test_settings_know_which_fields_were_given() -> None:
    settings = Settings(silence_s=2.0, tags=["a", "b"])
    assert settings.given() == {"silence_s": 2.0, "tags": ("a", "b")}
    assert repr(settings) == "Settings(silence_s=2.0, tags=('a', 'b'))"
    assert settings.compression == "auto"
    for copied in (copy.copy(settings), copy.deepcopy(settings), pickle.loads(pickle.dumps(settings))):
        assert (copied, copied.given()) == (settings, settings.given())
    with pytest.raises(FrozenInstanceError):
        settings.silence_s = 3.0  # type: ignore[misc]


def test_each_setting_is_declared_once_with_a_text_and_a_default() -> None:
    said = texts_of(Settings) | texts_of(Config)
    assert texts_of(Settings).keys() == RARE
    assert {*ARGUMENTS} == texts_of(Config).keys()
    for field in fields(Config):
        assert len(said[field.name].split()) > 4
        assert getattr(Config(), field.name) == default_of(field)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "silence_s",
            "'silence_s': it is a field of Settings, as in connect.settings=backhaul.Settings.silence_s=....",
        ),
        ("silense_s", "'silense_s': did you mean 'silence_s', a field of Settings?"),
        ("tokenfile", "'tokenfile': did you mean 'token_file', an argument?"),
        ("setings", "'setings': did you mean 'settings', an argument?"),
        ("x", "'x': docs/configuration.md lists all settings"),
    ],
)
def test_an_unknown_name_raises_an_error_that_says_where_it_belongs(name: str, message: str) -> None:
    with pytest.raises(TypeError, match=f"connect\\(\\) has no argument {message}"):
        refuse_unknown(["worker", "settings", name])


def test_settings_are_settings() -> None:
    with pytest.raises(ValueError, match=r"settings={'silence_s': 60} must be a backhaul.Settings"):
        resolve({"silence_s": 60})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"returns": "gradient"}, "returns='gradient' is not one of 'auto'"),
        ({"silence_s": 0}, "silence_s=0 must be finite and greater than 0"),
        ({"silence_s": None}, "silence_s=None must be of type float"),
        ({"device": "tpu"}, "device='tpu' is not \"cpu\""),
        ({"memory_bytes": -1}, "memory_bytes=-1 must not be negative"),
        ({"memory_bytes": "2GiB"}, "memory_bytes='2GiB' must be of type int"),
        ({"plan": 3}, "plan=3 must be of type str"),
        ({"allow": 3}, "allow=3 must be of type tuple"),
        ({"allow": [3]}, "allow=.* has 3: write the name"),
        ({"allow": b"math"}, "allow=.* has 109: write the name"),
        ({"allow": ["--device"]}, "allow=.* has '--device': write the name"),
        ({"allow": ["two words"]}, "allow=.* has 'two words': write the name"),
        ({"allow": ["module:"]}, "allow=.* has 'module:': write the name"),
    ],
)
def test_values_that_can_not_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**given)


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKHAUL_SILENCE_S", "")
    assert resolve() == Config()


def test_traces_without_opentelemetry_name_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings(traces=True).traces
    for missing in ("opentelemetry", "opentelemetry.trace"):
        with monkeypatch.context() as context:
            for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
                context.delitem(sys.modules, name)
            context.setattr(sys, "meta_path", [Without(missing), *sys.meta_path])
            with pytest.raises(ValueError, match=r"pip install 'backhaul\[otel\]'"):
                Settings(traces=True)


class Without:
    """An import system that lacks a package."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, *_: object) -> None:
        if name == self.name:
            raise ModuleNotFoundError(name)


@pytest.mark.parametrize(("name", "text"), [("STRICT", "perhaps"), ("SILENCE_S", "long")])
def test_environment_that_can_not_be_read(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"BACKHAUL_{name}", text)
    with pytest.raises(ValueError, match=f"BACKHAUL_{name}='{text}'"):
        resolve()

import sys

import pytest

from backhaul._config import Config, resolve


def test_argument_over_environment_over_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKHAUL_SILENCE_S", "7")
    monkeypatch.setenv("BACKHAUL_STRICT", "yes")
    resolved = resolve(silence_s=3.0, strict=None)
    assert (resolved.silence_s, resolved.strict, resolved.returns) == (3.0, True, Config().returns)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"returns": "gradient"}, "returns='gradient' is not one of 'auto'"),
        ({"silence_s": 0}, "silence_s=0 must be finite and greater than 0"),
        ({"memory_bytes": -1}, "memory_bytes=-1 must not be negative"),
        ({"memory_bytes": "2GiB"}, "memory_bytes='2GiB' must be of type int"),
        ({"plan": 3}, "plan=3 must be of type str"),
        ({"allow": 3}, "allow=3 must be of type tuple"),
        ({"allow": [3]}, "allow has 3: write the name"),
        ({"allow": b"math"}, "allow has 109: write the name"),
        ({"allow": ["--device"]}, "allow has '--device': write the name"),
        ({"allow": ["two words"]}, "allow has 'two words': write the name"),
        ({"allow": ["module:"]}, "allow has 'module:': write the name"),
    ],
)
def test_values_that_can_not_be(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(**given)


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKHAUL_SILENCE_S", "")
    assert resolve() == Config()


def test_traces_without_opentelemetry_name_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(traces=True).traces
    for missing in ("opentelemetry", "opentelemetry.trace"):
        with monkeypatch.context() as context:
            for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
                context.delitem(sys.modules, name)
            context.setattr(sys, "meta_path", [Without(missing), *sys.meta_path])
            with pytest.raises(ValueError, match=r"pip install 'backhaul\[otel\]'"):
                resolve(traces=True)


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

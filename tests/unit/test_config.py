import pytest

from backhaul._config import Config, resolve


def test_argument_over_environment_over_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKHAUL_SILENCE_S", "7")
    monkeypatch.setenv("BACKHAUL_STRICT", "yes")
    found = resolve(silence_s=3.0, strict=None)
    assert (found.silence_s, found.strict, found.returns) == (3.0, True, Config().returns)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"returns": "gradient"}, "returns='gradient' is not one of 'auto'"),
        ({"silence_s": 0}, "silence_s=0 must be more than 0"),
        ({"memory_bytes": -1}, "memory_bytes=-1 must not be negative"),
    ],
)
def test_values_that_can_not_be(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(**given)


@pytest.mark.parametrize(("name", "text"), [("STRICT", "perhaps"), ("SILENCE_S", "long")])
def test_environment_that_can_not_be_read(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"BACKHAUL_{name}", text)
    with pytest.raises(ValueError, match=f"BACKHAUL_{name}='{text}'"):
        resolve()

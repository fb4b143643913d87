"""Which options a checkpointed call has: its own arguments, torch's global settings, and those of the session."""

from contextlib import nullcontext
from typing import Any

import pytest
from torch.utils.checkpoint import set_checkpoint_debug_enabled, set_checkpoint_early_stop

from backhaul._config import Config
from backhaul._torch_api.call_options import Options, names_of_torch, options_of

SESSION = Config(returns="activations", durability="host", strict=True)


def options(**kwargs: Any) -> Options:
    return options_of(SESSION, kwargs)[0]


def test_what_a_call_does_not_say_its_session_says() -> None:
    given, default = options(returns="gradients", durability="none", strict=False), options()
    assert (given.returns, given.durability, given.strict) == ("gradients", "none", False)
    assert (default.returns, default.durability, default.strict) == ("activations", "host", True)


@pytest.mark.parametrize("name", ["returns", "durability", "determinism_check"])
def test_an_unknown_value_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*one of "):
        options(**{name: "all"})


def test_names_that_only_our_checkpoint_has_are_arguments_where_code_is_written_for_torchs() -> None:
    given, rest = options_of(SESSION, {"returns": 3, "debug": True}, names_of_torch())
    assert rest == {"returns": 3}
    assert (given.returns, given.debug) == ("activations", True)


@pytest.mark.parametrize("setting", [True, False])
def test_torchs_settings_go_before_the_arguments(setting: bool) -> None:
    with set_checkpoint_debug_enabled(setting), set_checkpoint_early_stop(setting):
        given = options(debug=not setting, early_stop=not setting)
    assert (given.debug, given.early_stop) == (setting, setting)


def test_torchs_setting_for_debug_is_not_for_the_reentrant_form() -> None:
    """Which torch ignores there, so a call is not refused that torch takes."""
    with set_checkpoint_debug_enabled(True):
        assert not options(use_reentrant=True).debug


def test_debug_needs_the_default_contexts() -> None:
    assert options(debug=True).debug
    with pytest.raises(ValueError, match="debug=True is incompatible"):
        options(debug=True, context_fn=lambda: (nullcontext(), nullcontext()))

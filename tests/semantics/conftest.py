"""Ways to run a checkpointed call: recomputed on a worker, with either thing coming back, or kept on the trainer."""

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from backhaul import Session
from backhaul_runtime.program.custom.names import names
from conftest import RETURNS
from support.bits import Checkpoint
from support.calls import TimesOne, one
from support.loopback import Loopback


@pytest.fixture
def remote(request: pytest.FixtureRequest) -> Iterator[Loopback]:
    """A worker without a wire, whose operator allows the modules that the test's module names in ALLOWED."""
    loopback = Loopback(allow=request.module.ALLOWED)
    names.denied.clear()
    yield loopback
    names.denied.clear()
    assert loopback.changed() == []


@pytest.fixture(params=[*RETURNS, "kept"])
def anywhere(request: pytest.FixtureRequest, session: Session) -> Checkpoint:
    """Recomputes on the worker, or keeps activations here because of something that no program carries."""
    if request.param != "kept":
        return partial(session.checkpoint, returns=request.param)

    mark = one()

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        @functools.wraps(function)
        def with_mark(*args: Any, **kwargs: Any) -> Any:
            TimesOne.apply(mark)
            return function(*args, **kwargs)

        return session.checkpoint(with_mark, *args, **kwargs)

    return call

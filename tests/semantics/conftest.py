"""Ways to run a checkpointed call: recomputed on a worker, with either thing coming back, or kept on the trainer."""

import functools
import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from backhaul import Session
from conftest import RETURNS
from support.bits import Checkpoint
from support.calls import TimesOne, one
from support.processes import WorkerProcess


@pytest.fixture(autouse=True, scope="module")
def frozen(worker: WorkerProcess) -> Iterator[None]:
    """What is there before the first test is not looked through after each, which takes longer than most of them."""

    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


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

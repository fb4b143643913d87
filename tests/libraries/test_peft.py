"""examples/integrations/with_peft.py, with and without Backhaul."""

import pytest

from support.libraries import assert_trains_equally
from support.processes import WorkerProcess

pytest.importorskip("peft")


def test_the_example_trains_as_without_backhaul(worker: WorkerProcess) -> None:
    assert_trains_equally("peft", worker.address)

"""examples/integrations/with_lightning.py, with and without Backhaul."""

import pytest

from support.libraries import assert_trains_equally
from support.processes import WorkerProcess

pytest.importorskip("lightning")


def test_the_example_trains_as_without_backhaul(worker: WorkerProcess) -> None:
    assert_trains_equally("lightning", worker.address)

"""examples/integrations/with_timm.py, with and without Backhaul."""

import pytest

from support.libraries import assert_trains_equally
from support.processes import WorkerProcess

pytest.importorskip("timm")


def test_the_example_trains_as_without_backhaul(worker: WorkerProcess) -> None:
    assert_trains_equally("timm", worker.address)

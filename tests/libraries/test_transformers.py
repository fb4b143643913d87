"""examples/integrations/with_transformers.py, and models of Transformers in loops of one's own."""

import pytest

from support.libraries import assert_trains_equally
from support.processes import WorkerProcess

pytest.importorskip("transformers")


def test_the_example_trains_as_without_backhaul(worker: WorkerProcess) -> None:
    assert_trains_equally("transformers", worker.address)

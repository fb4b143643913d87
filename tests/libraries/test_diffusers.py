"""examples/integrations/with_diffusers.py, with and without Backhaul."""

import pytest

from support.configurations import CONFIGURATIONS, assert_configuration_travels
from support.libraries import assert_trains_equally, documented_share
from support.processes import WorkerProcess

pytest.importorskip("diffusers")


def test_the_example_trains_as_without_backhaul(worker: WorkerProcess) -> None:
    assert_trains_equally("diffusers", worker.address)


@pytest.mark.parametrize("row", [row for row in CONFIGURATIONS if row.startswith("diffusers")])
def test_the_documented_share_of_a_configuration_travels(worker: WorkerProcess, row: str) -> None:
    assert round(assert_configuration_travels(row, worker.address), 2) == documented_share(row)

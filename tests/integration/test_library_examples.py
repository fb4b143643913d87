"""Examples of integrations with libraries that this environment has. `make test-integrations` runs all of them."""

import pytest

from support.libraries import assert_trains_equally
from support.processes import WorkerProcess


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("library", "package"), [("transformers", "transformers"), ("trainer", "accelerate"), ("diffusers", "diffusers")]
)
def test_an_example_trains_as_without_backhaul(worker: WorkerProcess, library: str, package: str) -> None:
    pytest.importorskip(package)
    assert_trains_equally(library, worker.address)

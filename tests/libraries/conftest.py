"""Tests of examples against libraries, each of which runs in the environment that has the library."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder. Warnings of other libraries, as errors, would only test the libraries."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.libraries)
            item.add_marker(pytest.mark.filterwarnings("default"))

"""The installed version. Free of torch."""

from functools import cache
from importlib.metadata import version as installed_version


@cache
def version() -> str:
    """Of the distribution, as pip shows it."""
    return installed_version("backhaul")

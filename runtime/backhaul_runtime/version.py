"""The installed version of Backhaul. Does not import torch."""

from functools import cache
from importlib.metadata import version as installed_version


@cache
def version() -> str:
    """Returns the version of the installed distribution `backhaul`, as pip shows it."""
    return installed_version("backhaul")

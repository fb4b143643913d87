"""Settings that the functions of `support.function_state` read."""

from types import SimpleNamespace

THRESHOLD = 0.5
"""Read by a function that imports it when it runs."""


class Settings:
    """Holds other settings."""

    def __init__(self) -> None:
        self.inner = SimpleNamespace(slope=0.5)


SETTINGS = Settings()

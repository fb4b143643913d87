"""Replaces methods of one object, and restores them."""

from collections.abc import Callable
from typing import Any

_MISSING = object()


def replace_attribute(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Sets an attribute of an object, and returns what restores the one before.

    Args:
        owner: The object, not its class, so that other objects of the class keep theirs.
        name: The name of the attribute.
        value: The new value of the attribute.
    """
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)

    def restore() -> None:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return restore

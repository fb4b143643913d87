"""Cursors of paginated lists: opaque texts that say where the next page begins.

A cursor names the last item of a page by its place in the order of the list. So a page begins where the one before
ended, also if items were added or removed between the two requests.
"""

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from math import isfinite
from typing import TypeVar

from fastapi import HTTPException

T = TypeVar("T")


def cursor_of(number: float, name: str) -> str:
    """Returns the cursor of the page after an item, which a number and a name identify."""
    return base64.urlsafe_b64encode(json.dumps([number, name]).encode()).decode().rstrip("=")


def read_cursor(cursor: str) -> tuple[float, str]:
    """Returns the number and name of a cursor. Raises HTTPException 422 for a text that is no cursor."""
    try:
        number, name = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        if not isinstance(name, str) or not isfinite(number):
            raise ValueError(cursor)
        name.encode()  # raises for a half of a pair of surrogates, which no database takes
        return float(number), name
    except (binascii.Error, ValueError, TypeError, OverflowError, RecursionError):
        detail = {"type": "cursor", "loc": ["query", "cursor"], "msg": "this is no cursor that an answer had as `next`"}
        raise HTTPException(422, [detail]) from None


def page_of(items: Sequence[T], name_of: Callable[[T], str], limit: int, cursor: str) -> tuple[list[T], str | None]:
    """Returns a page of a list that is at hand as a whole, and the cursor of the next page; None after the last.

    Args:
        items: All items, in the order of the list.
        name_of: Returns the id of an item.
        limit: The largest number of items of the page.
        cursor: The cursor of the page; empty for the first one.
    """
    start = 0
    if cursor:
        number, name = read_cursor(cursor)
        names = [name_of(item) for item in items]
        # The item may be gone: then those behind it have moved up to its place.
        start = names.index(name) + 1 if name in names else max(0, int(number))
    page = list(items[start : start + limit])
    has_more = start + limit < len(items)
    return page, cursor_of(start + len(page) - 1, name_of(page[-1])) if has_more and page else None

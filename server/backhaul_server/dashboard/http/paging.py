"""Cursors of paginated lists: opaque texts that say where the next page begins.

A cursor names the last item of a page by its place in the order of the list. So a page begins where the one before
ended, also if items were added or removed between the two requests.
"""

import base64
import binascii
import json
from collections.abc import Sequence
from math import isfinite
from typing import Any, TypeVar

from fastapi import HTTPException

from backhaul_server.dashboard.schemas.pages import Page

PageT = TypeVar("PageT", bound=Page)


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


def page_of(kind: type[PageT], items: Sequence[Any], limit: int, cursor: str) -> PageT:
    """Returns a page of a list that is at hand as a whole.

    Args:
        kind: The kind of page.
        items: All items, in the order of the list, each with an `id`.
        limit: The largest number of items of the page.
        cursor: The cursor of the page; empty for the first one.
    """
    start = 0
    if cursor:
        number, name = read_cursor(cursor)
        names = [item.id for item in items]
        # The item may be gone: then those behind it have moved up to its place.
        start = names.index(name) + 1 if name in names else max(0, int(number))
    page = list(items[start : start + limit])
    has_more = start + limit < len(items)
    following = cursor_of(start + len(page) - 1, page[-1].id) if has_more and page else None
    return kind.model_validate({"items": page, "total": len(items), "next": following})

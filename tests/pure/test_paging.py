"""Pages of a list: they join, and what changes between two requests neither ends nor repeats them."""

import base64
from collections.abc import Iterable
from typing import Self

import pytest
from fastapi import HTTPException
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from backhaul_server.dashboard.http.paging import cursor_of, page_of, read_cursor
from backhaul_server.dashboard.schemas.pages import Page


class Named(BaseModel):
    """An item."""

    id: str


class NamedPage(Page):
    """A page of items."""

    items: list[Named]

    @classmethod
    def of_names(cls, names: Iterable[str], limit: int, cursor: str) -> Self:
        """A page of items of these names."""
        return page_of(cls, [Named(id=name) for name in names], limit, cursor)

    @property
    def names(self) -> list[str]:
        """The names of the items."""
        return [item.id for item in self.items]


@given(st.integers(0, 20), st.integers(1, 7))
def test_pages_join_to_the_whole(length: int, limit: int) -> None:
    names = [f"worker:{number}" for number in range(length)]
    listed, cursor = list[str](), ""
    while True:
        page = NamedPage.of_names(names, limit, cursor)
        assert len(page.items) <= limit
        assert page.total == length
        listed += page.names
        if page.next is None:
            break
        cursor = page.next
    assert listed == names


def test_a_page_goes_on_behind_an_item_that_is_gone_or_has_moved() -> None:
    cursor = NamedPage.of_names("abcd", 2, "").next
    assert cursor is not None
    assert NamedPage.of_names("acd", 2, cursor).names == ["c", "d"]  # b is gone
    assert NamedPage.of_names("nabc", 2, cursor).names == ["c"]  # n is new


@given(st.floats(allow_nan=False, allow_infinity=False), st.text())
def test_a_cursor_can_be_read_back(number: float, name: str) -> None:
    assert read_cursor(cursor_of(number, name)) == (number, name)


@given(st.text(max_size=30))
def test_any_other_text_is_refused(text: str) -> None:
    try:
        read_cursor(text)
    except HTTPException as error:
        assert error.status_code == 422
        assert error.detail[0]["loc"] == ["query", "cursor"]  # type: ignore[index,comparison-overlap]


@pytest.mark.parametrize("text", ["", "x", "bnVsbA", "WzFd", "WyJhIiwgImIiXQ", "W05hTiwgImEiXQ"])
def test_what_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(HTTPException):
        read_cursor(text)


@pytest.mark.parametrize("content", [f'[1{"0" * 400}, "a"]', '[1, "\\ud800"]', "[" * 700])
def test_a_cursor_that_no_database_takes_is_refused(content: str) -> None:
    with pytest.raises(HTTPException):
        read_cursor(base64.urlsafe_b64encode(content.encode()).decode().rstrip("="))

"""Pages of a list: they join, and what changes between two requests neither ends nor repeats them."""

import base64

import pytest
from fastapi import HTTPException
from hypothesis import given
from hypothesis import strategies as st

from backhaul_server.dashboard.http.paging import cursor_of, page_of, read_cursor


@given(st.integers(0, 20), st.integers(1, 7))
def test_pages_join_to_the_whole(length: int, limit: int) -> None:
    names = [f"worker:{number}" for number in range(length)]
    listed, cursor = list[str](), ""
    while True:
        page, following = page_of(names, str, limit, cursor)
        assert len(page) <= limit
        listed += page
        if following is None:
            break
        cursor = following
    assert listed == names


def test_a_page_goes_on_behind_an_item_that_is_gone_or_has_moved() -> None:
    _, cursor = page_of(["a", "b", "c", "d"], str, 2, "")
    assert cursor is not None
    assert page_of(["a", "c", "d"], str, 2, cursor)[0] == ["c", "d"]  # b is gone
    assert page_of(["new", "a", "b", "c"], str, 2, cursor)[0] == ["c"]


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

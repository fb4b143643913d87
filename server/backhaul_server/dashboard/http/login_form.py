"""The login form of the dashboard."""

import asyncio
from functools import cache
from html import escape
from pathlib import Path
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import HTMLResponse

MOST_BYTES = 4096
READ_S = 10.0
"""Seconds within which a posted form must arrive."""

_PAGE = Path(__file__).parents[1] / "static/login.html"
_FORM = "application/x-www-form-urlencoded"
_ALERT_PLACE = "<!-- alert -->"


class FormError(Exception):
    """The posted form cannot be read. Has the status and the message of the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def login_page(alert: str = "", status: int = 200) -> HTMLResponse:
    """Returns the form, with a message about the last attempt if there is one."""
    said = f'<p class="error" role="alert">{escape(alert)}</p>' if alert else ""
    return HTMLResponse(_page().replace(_ALERT_PLACE, said), status)


async def posted_token(request: Request) -> str:
    """Returns the token in a posted form, without the surrounding blanks that pasting may add. Raises FormError."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _FORM:
        raise FormError(415, f"Post the form as {_FORM}.")
    try:
        async with asyncio.timeout(READ_S):
            body = await _body(request)
    except TimeoutError:
        raise FormError(408, "The form did not arrive in time.") from None
    try:
        shown = parse_qs(body.decode(), max_num_fields=8).get("token", [])
    except ValueError:
        raise FormError(400, "The form can't be read.") from None
    if len(shown) > 1:
        raise FormError(400, "The form has more than one token.")
    return shown[0].strip() if shown else ""


async def _body(request: Request) -> bytes:
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise FormError(400, "The form did not arrive.")
        body += message.get("body", b"")
        if len(body) > MOST_BYTES:
            raise FormError(413, f"The form has more than {MOST_BYTES} bytes.")
        if not message.get("more_body", False):
            return bytes(body)


@cache
def _page() -> str:
    return _PAGE.read_text()

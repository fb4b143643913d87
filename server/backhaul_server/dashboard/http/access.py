"""Access control of the dashboard: who may read it, and what browsers may do with its answers.

NOTE [Visitors]
1. With a token, every path except those in `OPEN` needs it: as a bearer credential, or once in the login form, which
   sets a cookie.
2. Without a token the dashboard listens only on this machine. A page of another site could still reach it through a
   host name that its owner points to this machine, so a request must name the dashboard as this machine does.
3. A request with the right token never waits, whatever wrong tokens arrive. The length of a token prevents guessing.
4. A proxy may serve the dashboard below a path prefix that it strips. So redirects and links are relative. The cookie
   is set for the prefix, which the dashboard knows only from --root-path.
"""

import asyncio
import ipaddress
import re

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from backhaul_runtime.process.credentials import is_token, shows
from backhaul_server.dashboard.http.login_form import FormError, login_page, posted_token
from backhaul_server.dashboard.http.logins import LASTS_S, Logins

COOKIE = "backhaul_login"
OPEN = frozenset({"/healthz", "/readyz"})
OPEN_FOLDER = "/static/"
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""Headers of every answer. The style sheet of Swagger UI has images in data URLs."""

FAILED_S = 1.0
"""Seconds after which a wrong token in the form is answered."""

_MOST_WAITING = 100
_HOST = re.compile(r"(?P<name>\[[^\]]+\]|[^:\[\]]+)(:\d*)?")
_STRANGE_HOST = "without --token-file this dashboard answers to localhost and to IP addresses, and to no other name"
_CHALLENGE = {"WWW-Authenticate": "Bearer"}


class TokenMiddleware:
    """Middleware around the dashboard's application that checks the token, if there is one.

    Args:
        app: The application that answers requests with the token.
        token: The token that visitors must show, None for no token.
        host: The host that the dashboard listens on. Requests may also name localhost or an IP address.
    """

    def __init__(self, app: ASGIApp, token: str | None, host: str = "") -> None:
        self._app = app
        self._token = token
        self._names = {"localhost", host.lower()}
        self._logins = Logins()
        self._waiting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers it. Called by the server."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})  # the dashboard has no WebSockets
            return
        request = Request(scope, receive)
        answer = await self._answer(request, self._token) if self._token is not None else self._check_host(request)
        may_be_cached = self._token is None or _path(request).startswith(OPEN_FOLDER)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                if not may_be_cached:
                    headers["Cache-Control"] = "no-store"
            await send(message)

        await (answer or self._app)(scope, receive, send_with_headers)

    async def _answer(self, request: Request, token: str) -> Response | None:
        """Returns the answer to a visitor without access, None if the request may pass (Rule 1)."""
        path = _path(request)
        if path == "/login":
            return await self._login(request, token)
        if path == "/logout":
            return self._logout(request)
        if path in OPEN or path.startswith(OPEN_FOLDER):
            return None
        authorizations = request.headers.getlist("authorization")
        if authorizations:
            if shows(authorizations, token):
                return None
        elif request.cookies.get(COOKIE) in self._logins:
            return None
        elif request.method in {"GET", "HEAD"} and "text/html" in request.headers.get("accept", ""):
            return _redirect(request, "login")
        return JSONResponse({"detail": "this dashboard wants its token, as a bearer credential"}, 401, _CHALLENGE)

    async def _login(self, request: Request, token: str) -> Response:
        if request.method in {"GET", "HEAD"}:
            return login_page()
        if request.method != "POST":
            return _wrong_method("GET, HEAD, POST")
        try:
            shown = await posted_token(request)
        except FormError as error:
            return login_page(error.message, error.status)
        if not is_token(shown, token):
            await self._keep_waiting()
            page = login_page("That is not this dashboard's token.", 401)
            page.headers.update(_CHALLENGE)
            return page
        answer = _redirect(request, "./")  # never a target that the request names
        _set_cookie(answer, request, self._logins.open(), LASTS_S)
        return answer

    def _logout(self, request: Request) -> Response:
        if request.method != "POST":
            return _wrong_method("POST")
        answer = _redirect(request, "login")
        name = request.cookies.get(COOKIE)
        if name is not None:  # a form on another site sends no cookie, so it cannot log a user out
            self._logins.close(name)
            _set_cookie(answer, request, "", 0)
        return answer

    async def _keep_waiting(self) -> None:
        """Delays the answer to a wrong token. No shared limit is used, because attackers could fill it up (Rule 3)."""
        if self._waiting >= _MOST_WAITING:
            return
        self._waiting += 1
        try:
            await asyncio.sleep(FAILED_S)
        finally:
            self._waiting -= 1

    def _check_host(self, request: Request) -> Response | None:
        """Rejects a request whose host name is not one of this machine (Rule 2)."""
        match = _HOST.fullmatch(request.headers.get("host", ""))
        name = match["name"].lower() if match else ""
        if name and (name in self._names or _is_ip_address(name.strip("[]"))):
            return None
        return PlainTextResponse(f"{_STRANGE_HOST}\n", 400)


def _path(request: Request) -> str:
    """Returns the path of a request below the prefix of --root-path, which the server puts in front of every path."""
    path: str = request.scope["path"]
    return path.removeprefix(request.scope.get("root_path", ""))


def _redirect(request: Request, target: str) -> Response:
    """Redirects to a path below the dashboard's root, relative to the path of the request (Rule 4)."""
    return RedirectResponse("../" * (_path(request).count("/") - 1) + target, 303)


def _set_cookie(answer: Response, request: Request, name: str, lasts_s: int) -> None:
    """Sets a cookie that only pages of this dashboard send, and that scripts cannot read."""
    secure = request.url.scheme == "https"
    path = request.scope.get("root_path", "") + "/"
    answer.set_cookie(COOKIE, name, lasts_s, path=path, secure=secure, httponly=True, samesite="strict")


def _wrong_method(allowed: str) -> Response:
    return PlainTextResponse("Method Not Allowed\n", 405, {"Allow": allowed})


def _is_ip_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

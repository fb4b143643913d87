"""Who may look at the dashboard: the middleware, around an application that answers whatever is asked."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from backhaul_server.dashboard.http import access, login_form
from backhaul_server.dashboard.http.access import COOKIE, HEADERS, TokenMiddleware
from backhaul_server.dashboard.http.logins import LASTS_S, MOST, Logins

TOKEN = "correct-horse-battery-staple"
HTML = {"accept": "text/html,application/xhtml+xml"}
BEARER = {"authorization": f"Bearer {TOKEN}"}
FORM = {"content-type": "application/x-www-form-urlencoded"}


async def application(scope: Any, receive: Any, send: Any) -> None:
    await PlainTextResponse(f"inside {scope['path']}")(scope, receive, send)


@asynccontextmanager
async def visitor(guard: ASGIApp, base: str = "http://127.0.0.1:8080") -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url=base) as client:
        yield client


def visits(visit: Callable[[httpx.AsyncClient], Awaitable[None]], *, token: str | None = TOKEN) -> None:
    """Runs a visit to a dashboard of its own."""

    async def run() -> None:
        async with visitor(TokenMiddleware(application, token, "127.0.0.1")) as client:
            await visit(client)

    asyncio.run(run())


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "FAILED_S", 0.0)


async def log_in(client: httpx.AsyncClient, token: str = TOKEN, **options: Any) -> httpx.Response:
    return await client.post("/login", data={"token": token}, **options)


@pytest.mark.parametrize("path", ["/", "/api/v1/live", "/metrics", "/login/", "/static", "//static/a", "/healthz/x"])
def test_everything_else_wants_the_token(path: str) -> None:
    async def visit(client: httpx.AsyncClient) -> None:
        denied = await client.get(f"http://127.0.0.1:8080{path}")
        assert (denied.status_code, denied.headers["www-authenticate"]) == (401, "Bearer")
        assert "token" in denied.json()["detail"]
        shown = await client.get(f"http://127.0.0.1:8080{path}", headers=BEARER)
        assert (shown.status_code, shown.text) == (200, f"inside {path}")

    visits(visit)


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/static/style.css"])
def test_probes_and_what_the_form_is_made_of_are_open(path: str) -> None:
    async def visit(client: httpx.AsyncClient) -> None:
        assert (await client.get(path)).text == f"inside {path}"

    visits(visit)


def test_a_browser_is_led_to_the_form_and_a_program_is_not() -> None:
    async def visit(client: httpx.AsyncClient) -> None:
        led = await client.get("/runs?a=1", headers=HTML)
        assert (led.status_code, led.headers["location"]) == (303, "login")
        assert (await client.post("/", headers=HTML)).status_code == 401
        assert (await client.get("/", headers={**HTML, "authorization": "Bearer wrong"})).status_code == 401

    visits(visit)


@pytest.mark.parametrize("root_path", ["", "/ml/backhaul"])
def test_redirects_are_relative_and_the_cookie_is_for_the_prefix_of_a_proxy(root_path: str) -> None:
    async def below(scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application as uvicorn does with a root path."""
        path = root_path + scope["path"]
        await TokenMiddleware(application, TOKEN)({**scope, "root_path": root_path, "path": path}, receive, send)

    async def run() -> None:
        async with visitor(below) as client:
            for path, target in (("/", "login"), ("/api", "login"), ("/api/v1/runs", "../../login")):
                assert (await client.get(path, headers=HTML)).headers["location"] == target
            assert (await client.get("/static/style.css")).status_code == 200
            answer = await log_in(client)
            assert answer.headers["location"] == "./"
            assert f"Path={root_path}/;" in answer.headers["set-cookie"]

    asyncio.run(run())


def test_a_login_lasts_until_it_is_ended() -> None:
    async def visit(client: httpx.AsyncClient) -> None:
        form = await client.get("/login")
        assert (form.status_code, "alert" in form.text) == (200, False)
        answer = await log_in(client, f"  {TOKEN}\n")  # as it comes from a clipboard
        assert (answer.status_code, answer.headers["location"]) == (303, "./")
        assert (await client.get("/", headers=HTML)).text == "inside /"
        name = client.cookies[COOKIE]
        assert (await client.get("/logout")).status_code == 405
        answer = await client.post("/logout")
        assert (answer.status_code, answer.headers["location"]) == (303, "login")
        assert COOKIE not in client.cookies
        again = await client.get("/metrics", headers={"cookie": f"{COOKIE}={name}"})
        assert again.status_code == 401

    visits(visit)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_the_cookie_is_for_this_dashboards_pages_alone(scheme: str) -> None:
    async def run() -> None:
        async with visitor(TokenMiddleware(application, TOKEN), f"{scheme}://dashboard.example") as client:
            attributes = {part.strip().lower() for part in (await log_in(client)).headers["set-cookie"].split(";")[1:]}
            expected = {"httponly", "samesite=strict", "path=/", f"max-age={12 * 3600}"}
            assert attributes == expected | ({"secure"} if scheme == "https" else set())

    asyncio.run(run())


def test_a_wrong_token_shows_the_form_again() -> None:
    async def visit(client: httpx.AsyncClient) -> None:
        for wrong in (TOKEN[:-1], TOKEN + "x", "", "<script>"):
            answer = await log_in(client, wrong)
            assert answer.status_code == 401
            assert '<p class="error" role="alert">That is not this dashboard&#x27;s token.</p>' in answer.text
            assert "<script>" not in answer.text
            assert "set-cookie" not in answer.headers

    visits(visit)


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"token=" + b"x" * 5000, FORM, 413),
        (b"token=a&token=b", FORM, 400),
        (b"&".join([b"a=1"] * 9), FORM, 400),
        (b"token=\xff", FORM, 400),
        (f'{{"token": "{TOKEN}"}}'.encode(), {"content-type": "application/json"}, 415),
        (f"token={TOKEN}".encode(), {}, 415),
        (b"other=1", FORM, 401),
    ],
)
def test_a_form_that_can_not_be_read_logs_nobody_in(content: bytes, headers: dict[str, str], status: int) -> None:
    async def visit(client: httpx.AsyncClient) -> None:
        answer = await client.post("/login", content=content, headers=headers)
        assert (answer.status_code, 'role="alert"' in answer.text) == (status, True)
        assert "set-cookie" not in answer.headers

    visits(visit)


def test_a_form_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login_form, "READ_S", 0.05)

    async def never() -> AsyncIterator[bytes]:
        yield b"token="
        await asyncio.Event().wait()

    async def visit(client: httpx.AsyncClient) -> None:
        assert (await client.post("/login", content=never(), headers=FORM)).status_code == 408

    visits(visit)


def test_a_login_leads_nowhere_else_and_takes_no_name_from_the_visitor() -> None:
    async def visit(client: httpx.AsyncClient) -> None:
        client.cookies.set(COOKIE, "fixed")
        answer = await client.post(
            "/login?next=https://evil.example", data={"token": TOKEN, "next": "https://evil.example"}
        )
        assert answer.headers["location"] == "./"
        assert "fixed" not in answer.headers["set-cookie"]
        fixed = await client.get("/", headers={"cookie": f"{COOKIE}=fixed"})
        assert fixed.status_code == 401

    visits(visit)


def test_a_form_of_another_site_logs_nobody_out() -> None:
    async def visit(client: httpx.AsyncClient) -> None:  # which a browser sends without the cookie
        assert "set-cookie" not in (await client.post("/logout")).headers

    visits(visit)


def test_wrong_tokens_wait_and_the_right_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "FAILED_S", 3600.0)

    async def visit(client: httpx.AsyncClient) -> None:
        attempts = [asyncio.create_task(log_in(client, f"wrong {index}")) for index in range(150)]
        while sum(attempt.done() for attempt in attempts) < 50:  # so many are not made to wait, for want of room
            await asyncio.sleep(0)
        assert (await log_in(client)).status_code == 303
        assert {attempt.result().status_code for attempt in attempts if attempt.done()} == {401}
        assert sum(not attempt.done() for attempt in attempts) == 100
        for attempt in attempts:
            attempt.cancel()
        await asyncio.wait(attempts)

    visits(visit)


def test_logins_end_and_are_bounded() -> None:
    now_s = 0.0
    logins = Logins(lambda: now_s)
    first = logins.open()
    now_s = LASTS_S - 1.0
    assert first in logins
    others = [logins.open() for _ in range(MOST - 1)]
    assert (first in logins, len(logins)) == (True, MOST)
    others.append(logins.open())
    assert (first in logins, len(logins)) == (False, MOST)
    assert len(set(others)) == MOST
    now_s = 2 * LASTS_S
    assert others[0] not in logins
    last = logins.open()
    assert (last in logins, len(logins)) == (True, 1)
    assert None not in logins


@pytest.mark.parametrize("path", ["/", "/login", "/logout", "/healthz", "/api"])
def test_every_answer_says_what_browsers_may_do(path: str) -> None:
    async def visit(client: httpx.AsyncClient) -> None:
        answer = await client.get(path)
        assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS
        assert answer.headers["cache-control"] == "no-store"

    visits(visit)


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8080", "127.0.0.1:8080", "[::1]:8080", "192.0.2.1", "127.0.0.1:"]
)
def test_without_a_token_it_answers_to_names_of_this_machine(host: str) -> None:
    async def visit(client: httpx.AsyncClient) -> None:
        answer = await client.get("/login", headers={"host": host})
        assert (answer.status_code, answer.text) == (200, "inside /login")
        assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS
        assert "cache-control" not in answer.headers

    visits(visit, token=None)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example", "", ":8080", "a b"],
)
def test_without_a_token_a_strangers_name_is_refused(host: str) -> None:
    async def visit(client: httpx.AsyncClient) -> None:
        answer = await client.get("/api/v1/overview", headers={"host": host})
        assert answer.status_code == 400
        assert "--token-file" in answer.text

    visits(visit, token=None)


def test_with_a_token_any_name_will_do() -> None:
    async def visit(client: httpx.AsyncClient) -> None:
        assert (await client.get("/", headers={**BEARER, "host": "dashboard.example"})).status_code == 200

    visits(visit)


def test_its_own_life_is_passed_on_and_other_protocols_are_not() -> None:
    passed: list[str] = []
    sent: list[Any] = []

    async def inside(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["type"])

    async def run() -> None:
        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        for kind in ("lifespan", "websocket"):
            await TokenMiddleware(inside, TOKEN)({"type": kind, "path": "/"}, receive, send)

    asyncio.run(run())
    assert (passed, sent) == (["lifespan"], [{"type": "websocket.close", "code": 1008}])

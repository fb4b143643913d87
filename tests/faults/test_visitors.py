"""Who shows the dashboard no token, or another than its own, is denied whatever they ask."""

import asyncio

import httpx
import pytest
from starlette.routing import BaseRoute, Mount, Route

from backhaul_runtime.process.discovery import parse_resolvers
from backhaul_server.dashboard.http.access import COOKIE, OPEN
from backhaul_server.dashboard.http.app import create_app

TOKEN = "correct-horse-battery-staple"
APP = create_app(parse_resolvers("127.0.0.1:1"), token=TOKEN)  # it asks nobody before it runs


def paths(routes: list[BaseRoute]) -> list[str]:
    """Every path the dashboard answers to. A kind of route this does not know fails."""
    route_paths = []
    for route in routes:
        assert isinstance(route, Route | Mount), route
        route_paths.append(route.path if isinstance(route, Route) else f"{route.path}/x")
    return [path.replace("{run}", "some-run") for path in route_paths]


GUARDED = [path for path in paths(APP.routes) if path not in OPEN and not path.startswith("/static/")]
RIGHT, WRONG = ("authorization", f"Bearer {TOKEN}"), ("authorization", "Bearer wrong")
CASES = {
    "none": [],
    "empty": [("authorization", "")],
    "wrong": [WRONG],
    "prefix": [("authorization", f"Bearer {TOKEN[:-1]}")],
    "longer": [("authorization", f"Bearer {TOKEN}x")],
    "no scheme": [("authorization", TOKEN)],
    "other scheme": [("authorization", f"Basic {TOKEN}")],
    "twice": [RIGHT, RIGHT],
    "right and wrong": [RIGHT, WRONG],
    "wrong and right": [WRONG, RIGHT],
    "a guessed login": [("cookie", f"{COOKIE}=guessed")],
    "the token as a login": [("cookie", f"{COOKIE}={TOKEN}")],
    "an empty login": [("cookie", f"{COOKIE}=")],
}


def test_there_are_paths_to_guard() -> None:
    assert {"/", "/metrics", "/api/v1/workers", "/api/v1/openapi.json"} <= set(GUARDED)
    assert all("{" not in path for path in GUARDED)


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"])
def test_a_visitor_who_does_not_show_the_token_is_denied(method: str, subtests: pytest.Subtests) -> None:
    async def answers(path: str) -> dict[str, httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(APP), base_url="http://localhost") as client:
            return {case: await client.request(method, path, headers=shown) for case, shown in CASES.items()}

    for path in [*GUARDED, "/no/such/path"]:
        for case, answer in asyncio.run(answers(path)).items():
            with subtests.test(f"{path}, {case}"):
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
                said = {"detail": "this dashboard wants its token, as a bearer credential"}
                assert answer.text == "" if method == "HEAD" else answer.json() == said


def test_the_token_is_in_no_repr() -> None:
    assert TOKEN not in f"{APP!r}{APP.user_middleware!r}{vars(APP)!r}"

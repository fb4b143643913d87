"""The description of the API, with who may read it."""

import re
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from backhaul_server.dashboard.http.access import COOKIE

SCHEMES = {
    "token": {
        "type": "http",
        "scheme": "bearer",
        "description": "The token in the file of --token-file. A dashboard without one needs no credential.",
    },
    "login": {
        "type": "apiKey",
        "in": "cookie",
        "name": COOKIE,
        "description": "What the login page sets, for browsers. It ends after 12 hours.",
    },
}

DENIED = {
    "description": "The request has no valid token, and the dashboard wants one",
    "content": {
        "application/json": {
            "schema": {"$ref": "#/components/schemas/ErrorDetail"},
            "example": {"detail": "this dashboard wants its token, as a bearer credential"},
        }
    },
}


def operation_id(route: APIRoute) -> str:
    """Returns the name of a route, after which generated clients call their functions, such as "run_steps"."""
    path = route.path_format.removeprefix("/api/v1/").replace("runs/{run}", "run")
    return re.sub(r"\W+", "_", path)


def described(app: FastAPI, *, has_token: bool) -> dict[str, Any]:
    """Returns the OpenAPI document of an application, with its security schemes.

    Args:
        app: The application with all of its routes.
        has_token: Whether visitors must show a token. Otherwise the schemes are described, and none is required.
    """
    document = FastAPI.openapi(app)
    document["components"]["securitySchemes"] = SCHEMES
    for methods in document["paths"].values():
        for route in methods.values():
            route["responses"]["401"] = DENIED
    document["servers"] = [{"url": "../.."}]  # from the document: a proxy may serve it below any path prefix
    document["security"] = [{"token": []}, {"login": []}] if has_token else [{}]
    return document

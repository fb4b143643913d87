"""The description of the API, with who may read it."""

from typing import Any

from fastapi import FastAPI

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


def described(app: FastAPI, *, has_token: bool) -> dict[str, Any]:
    """Returns the OpenAPI document of an application, with its security schemes.

    Args:
        app: The application with all of its routes.
        has_token: Whether visitors must show a token. Otherwise the schemes are described, and none is required.
    """
    document = FastAPI.openapi(app)
    document["components"]["securitySchemes"] = SCHEMES
    document["security"] = [{"token": []}, {"login": []}] if has_token else [{}]
    return document

"""Errors that routes answer with, for the description in OpenAPI."""

from typing import Any

from backhaul_server.dashboard.http.feed import MOST_LISTENERS
from backhaul_server.dashboard.schemas.base import ErrorDetail

Responses = dict[int | str, dict[str, Any]]

MISSING: Responses = {
    404: {
        "description": "The run or worker is unknown",
        "model": ErrorDetail,
        "content": {"application/json": {"example": {"detail": 'no worker "a:1" is watched: see /api/v1/workers'}}},
    }
}
FULL: Responses = {
    503: {
        "description": "There are too many listeners already",
        "model": ErrorDetail,
        "content": {"application/json": {"example": {"detail": f"{MOST_LISTENERS} pages follow this stream already"}}},
    }
}

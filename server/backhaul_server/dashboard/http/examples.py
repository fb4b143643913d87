"""Examples of answers, for the description in OpenAPI."""

import json
from typing import Any

from pydantic import BaseModel

from backhaul_server.dashboard.http.feed import MOST_LISTENERS
from backhaul_server.dashboard.views import schemas

Responses = dict[int | str, dict[str, Any]]

CSV = "run,segment,calls,up_bytes,…\r\n9f86d081884c7d65,Block #3,1043,5577572352,…\r\n"
EVENT = f"event: live\ndata: {json.dumps(schemas.example_of(schemas.Live))}\nretry: 1000\n\n"
TRACE = {
    "baseTimeNanoseconds": 1_759_300_074_000_000_000,
    "displayTimeUnit": "ms",
    "traceEvents": [
        {"ph": "M", "name": "thread_name", "pid": 5_000_001, "tid": 500_000, "args": {"name": "backward"}},
        {
            "ph": "X",
            "cat": "backhaul",
            "name": "Block #3",
            "pid": 5_000_001,
            "tid": 500_000,
            "ts": 4_469_523_712_250,
            "dur": 62_500,
            "args": {"step": 1_043, "decision": "gradients", "worker": "127.0.0.1:50051"},
        },
    ],
}


def shows(model: type[BaseModel]) -> Responses:
    """Returns the description of an answer with the example of its model."""
    return shows_json(schemas.example_of(model))


def shows_json(example: object) -> Responses:
    """Returns the description of a JSON answer."""
    return {200: {"content": {"application/json": {"example": example}}}}


def shows_text(example: str, media_type: str) -> Responses:
    """Returns the description of an answer that is no JSON."""
    return {200: {"content": {media_type: {"schema": {"type": "string"}, "example": example}}}}


MISSING: Responses = {
    404: {
        "description": "The run or worker is unknown",
        "model": schemas.ErrorDetail,
        "content": {"application/json": {"example": {"detail": 'no worker "a:1" is watched: see /api/v1/workers'}}},
    }
}
FULL: Responses = {
    503: {
        "description": "There are too many listeners already",
        "model": schemas.ErrorDetail,
        "content": {"application/json": {"example": {"detail": f"{MOST_LISTENERS} pages follow this stream already"}}},
    }
}

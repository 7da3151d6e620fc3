"""Non-streaming responses: JSON bodies and errors."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response

from runtime.server.errors import ApiError
from runtime.wire.codec import to_json


def json_answer(body: Any) -> Response:
    """A JSON response with status 200."""
    return JSONResponse(body, headers={"Cache-Control": "no-store"})


def error_answer(error: ApiError) -> Response:
    """An error response in OpenAI's format."""
    return JSONResponse(error_body(error), error.status, headers={"Cache-Control": "no-store", **error.headers})


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON object of an error, for a body or an item of a stream."""
    return {"error": to_json(error.record)}

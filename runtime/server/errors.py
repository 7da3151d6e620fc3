"""Error responses: turns every failure into an HTTP status and an error object, as the interface asked has it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from models.errors import CancelledError, ModelError, ModelNotFoundError, StoreError
from runtime.errors import (
    BackendError,
    Cancelled,
    ContextOverflowError,
    InvalidActivationError,
    OutOfMemoryError,
    RequestError,
    RuntimeFailure,
    SavedCacheError,
)
from runtime.wire.answers import STATUS_OF_CODE, ErrorRecord
from runtime.wire.codec import to_json

INVALID, SERVER = "invalid_request_error", "server_error"
MAX_MESSAGE = 1000
"""Most characters of a message, which may quote an arbitrarily long input."""
ANTHROPIC_PATH, OLLAMA_PATH = "/v1/messages", "/api/"
"""Beginnings of the paths of these interfaces."""
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "api_error",
    529: "overloaded_error",
}
"""Types of errors in Anthropic's interface by status; others are `invalid_request_error`."""
_ANTHROPIC_OVERLOADED = 529
logger = logging.getLogger(__name__)


class ApiError(RuntimeFailure):
    """An error with its HTTP response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Describe an error.

        Args:
            status: HTTP status.
            message: What happened and what to do, for the user.
            kind: The error's `type`.
            param: The request's faulty field.
            code: Short name of the error.
            headers: Headers of the response.
        """
        message = _short(message)
        super().__init__(message)
        self.status = status
        self.record = ErrorRecord(message=message, type=kind, param=param and _short(param), code=code)
        self.headers = dict(headers or {})


ErrorForm = Callable[[ApiError], tuple[int, dict[str, Any]]]
"""Writes an error as an interface has it: the HTTP status, and the JSON object of a body or an item of a stream."""


def openai_form(error: ApiError) -> tuple[int, dict[str, Any]]:
    """An error of OpenAI's interface, and of `/runtime/*`."""
    return error.status, {"error": to_json(error.record)}


def event_form(error: ApiError) -> tuple[int, dict[str, Any]]:
    """The same as an event of OpenAI's Responses."""
    status, body = openai_form(error)
    return status, {"type": "error", **body}


def anthropic_form(error: ApiError) -> tuple[int, dict[str, Any]]:
    """An error of Anthropic's interface. Agents know a prompt that does not fit by its words, and shorten it."""
    code, message = error.record.code, error.record.message
    if code == "context_length_exceeded":
        message = f"prompt is too long: {message}"
    status = _ANTHROPIC_OVERLOADED if code == "overloaded" else error.status
    kind = _ANTHROPIC_KINDS.get(status, INVALID)
    return status, {"type": "error", "error": {"type": kind, "message": message}}


def ollama_form(error: ApiError) -> tuple[int, dict[str, Any]]:
    """An error of Ollama's interface."""
    return error.status, {"error": error.record.message}


def form_of(path: str) -> ErrorForm:
    """The form of errors at a path."""
    if path.startswith(ANTHROPIC_PATH):
        return anthropic_form
    return ollama_form if path.startswith(OLLAMA_PATH) else openai_form


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Context manager: errors about a field call it as the request did.

    Args:
        names: Names in the request, by the names that the rest of the server has for them.
    """
    try:
        yield
    except ApiError as error:
        param = error.record.param or ""
        own = next((name for name in names if param == name or param.startswith((f"{name}.", f"{name}["))), None)
        if own is None:
            raise
        told = error.record.message
        message = names[own] + told.removeprefix(own) if told.startswith(own) else told
        kind, code = error.record.type, error.record.code
        param = names[own] + param.removeprefix(own)
        raise ApiError(error.status, message, kind=kind, param=param, code=code, headers=error.headers) from None


def unknown_model(name: str) -> ApiError:
    """No model has that name."""
    return _not_found(f"there is no model {name!r}; /v1/models lists what there is")


def unavailable(message: str, code: str) -> ApiError:
    """The server cannot answer at the moment."""
    return ApiError(STATUS_OF_CODE[code], message, kind=SERVER, code=code)


def conflict(message: str, code: str) -> ApiError:
    """The request conflicts with the server's state."""
    return ApiError(STATUS_OF_CODE[code], message, code=code)


def api_error(error: BaseException, *, prompt: str | None = None) -> ApiError:
    """The response to any exception. Unexpected ones are logged, and their text is not disclosed.

    Args:
        error: The exception.
        prompt: The request's field with the prompt, to be named if the prompt is at fault.
    """
    if isinstance(error, ApiError):
        return error
    text = str(error)
    if isinstance(error, ModelNotFoundError):
        return _not_found(text)
    if isinstance(error, ContextOverflowError):
        return ApiError(400, text, param=prompt, code="context_length_exceeded")
    if isinstance(error, RequestError):
        return ApiError(400, text, param=error.field or prompt)
    if isinstance(error, (Cancelled, CancelledError)):
        return unavailable(text or "the work was stopped", "cancelled")
    if isinstance(error, OutOfMemoryError):
        return unavailable(text, "out_of_memory")
    if isinstance(error, MemoryError):
        return unavailable("not enough memory: close other programs, or use a smaller model", "out_of_memory")
    if isinstance(error, BackendError):
        return unavailable(text, "backend_unavailable")
    if isinstance(error, StoreError):
        return unavailable(text, "model_unavailable")
    if isinstance(error, SavedCacheError):
        return unavailable(text, "disk")
    if isinstance(error, InvalidActivationError):
        return ApiError(500, text, kind=SERVER, code="model_broken")
    if isinstance(error, (ModelError, RuntimeFailure)):
        return ApiError(400, text, code="model_refused")
    logger.error("unexpected error", exc_info=error)
    return ApiError(500, f"internal error ({type(error).__name__}); the log has more", kind=SERVER, code="internal")


def _short(text: str) -> str:
    """Cut the middle out of a long text: the beginning says what happened, the end what to do."""
    half = MAX_MESSAGE // 2
    return text if len(text) <= MAX_MESSAGE else f"{text[:half]} … {text[-half:]}"


def _not_found(message: str) -> ApiError:
    code = "model_not_found"
    return ApiError(STATUS_OF_CODE[code], message, param="model", code=code)

"""Error responses: turns every failure into an OpenAI-style error object and an HTTP status."""

from __future__ import annotations

import logging
from collections.abc import Mapping

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

INVALID, SERVER = "invalid_request_error", "server_error"
MAX_MESSAGE = 1000
"""Most characters of a message, which may quote an arbitrarily long input."""
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
        return ApiError(400, text, param=prompt)
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

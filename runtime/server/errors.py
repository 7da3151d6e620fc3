"""Errors on their way out: every failure becomes an OpenAI-style error object and an HTTP status."""

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
MOST_WORDS = 1000
"""Characters of a message, at most: one that repeats what was wrong must not be as long as that."""
logger = logging.getLogger(__name__)


class ApiError(RuntimeFailure):
    """An error with everything that its answer needs."""

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
            message: What happened and what to do, for a person.
            kind: The error's `type`.
            param: The request's field at fault.
            code: Short name of the error.
            headers: Headers that belong to the answer.
        """
        message = _short(message)
        super().__init__(message)
        self.status = status
        self.record = ErrorRecord(message=message, type=kind, param=param and _short(param), code=code)
        self.headers = dict(headers or {})


def unknown_model(name: str) -> ApiError:
    """There is no model of that name."""
    return _not_found(f"there is no model {name!r}; /v1/models lists what there is")


def unavailable(message: str, code: str) -> ApiError:
    """The server cannot answer now."""
    return ApiError(STATUS_OF_CODE[code], message, kind=SERVER, code=code)


def conflict(message: str, code: str) -> ApiError:
    """What is asked for does not go together with what the server holds or does."""
    return ApiError(STATUS_OF_CODE[code], message, code=code)


def api_error(error: BaseException, *, prompt: str | None = None) -> ApiError:
    """The answer to any exception. An unexpected one is logged, and its text is not given out.

    Args:
        error: What happened.
        prompt: The request's field that holds the prompt, to be named where the prompt is at fault.
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
    """A text without its middle, where it is too long: what happened and what to do stand at its ends."""
    half = MOST_WORDS // 2
    return text if len(text) <= MOST_WORDS else f"{text[:half]} … {text[-half:]}"


def _not_found(message: str) -> ApiError:
    code = "model_not_found"
    return ApiError(STATUS_OF_CODE[code], message, param="model", code=code)

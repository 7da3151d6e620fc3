"""Errors of `runtime`.

RuntimeFailure
 ├─ ContextOverflowError      prompt and answer do not fit the context
 ├─ OutOfMemoryError          the memory plan does not fit what is free now
 ├─ BackendError              the requested backend cannot run here
 ├─ InvalidActivationError    the model computed NaN or infinity
 ├─ RequestError              a request's arguments are invalid
 ├─ SavedCacheError           a saved KV cache cannot be written, read or used
 └─ Cancelled                 the work was cancelled
"""

from dataclasses import dataclass


class RuntimeFailure(Exception):
    """Base of all errors of this package. The message says what happened, where, and what to do."""


class ContextOverflowError(RuntimeFailure):
    """The prompt and the answer do not fit the context."""


class OutOfMemoryError(RuntimeFailure):
    """The memory plan does not fit what is free now."""


class BackendError(RuntimeFailure):
    """The requested backend cannot run here."""


class InvalidActivationError(RuntimeFailure):
    """The model computed NaN or infinity: it is damaged, or its numbers left the range of their format."""


class RequestError(RuntimeFailure):
    """A request's arguments are invalid.

    Args:
        message: What is wrong.
        field: The argument's name, where it is not the prompt.
    """

    def __init__(self, message: str = "", *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class SavedCacheError(RuntimeFailure):
    """A saved KV cache cannot be written or read, is damaged, or belongs to something else."""


class Cancelled(RuntimeFailure):
    """The work was cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A reason for degraded operation."""

    what: str
    """The problem, in one line."""
    fix: str
    """Advice."""
    failure: bool = False
    """Whether something failed, as opposed to being switched off."""


def byte_count(count: float) -> str:
    """A size in decimal units: `812 MB`, `4.9 GB`."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"

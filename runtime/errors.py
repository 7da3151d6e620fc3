"""Errors of `runtime`.

RuntimeFailure
 ├─ ContextOverflowError      prompt and answer do not fit the context
 ├─ OutOfMemoryError          the memory plan does not fit what is free now
 ├─ BackendError              the backend asked for cannot run here
 ├─ InvalidActivationError    NaN or infinity met on the way (a damaged model)
 ├─ RequestError              a request's arguments are not acceptable
 ├─ SavedCacheError           a saved KV cache cannot be written, read or used
 └─ Cancelled                 the work was asked to stop
"""

from dataclasses import dataclass


class RuntimeFailure(Exception):
    """Base of all errors of this package. The message says what happened, where, and what to do."""


class ContextOverflowError(RuntimeFailure):
    """Prompt and answer do not fit the context."""


class OutOfMemoryError(RuntimeFailure):
    """The memory plan does not fit what is free now."""


class BackendError(RuntimeFailure):
    """The backend asked for cannot run here."""


class InvalidActivationError(RuntimeFailure):
    """NaN or infinity met on the way: the model is damaged, or its numbers left the range of its format."""


class RequestError(RuntimeFailure):
    """A request's arguments are not acceptable."""


class SavedCacheError(RuntimeFailure):
    """A saved KV cache cannot be written or read, is damaged, or belongs to something else."""


class Cancelled(RuntimeFailure):
    """The work was asked to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why something is not as it could be."""

    what: str
    """What is wrong, in one line."""
    fix: str
    """What to do about it."""
    failure: bool = False
    """Whether something went wrong, rather than being so by choice."""


def size(count: int) -> str:
    """A number of bytes as a person reads it: `1.5 GiB`, `300 MiB`, `12 KiB`."""
    if count >= (1 << 30):
        return f"{count / (1 << 30):.1f} GiB"
    return f"{count / (1 << 20):.0f} MiB" if count >= (1 << 20) else f"{count / 1024:.0f} KiB"

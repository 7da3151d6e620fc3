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
    """A request's arguments are invalid."""


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


def size(count: int) -> str:
    """A human-readable size in bytes: `1.5 GiB`, `300 MiB`, `12 KiB`."""
    if count >= (1 << 30):
        return f"{count / (1 << 30):.1f} GiB"
    return f"{count / (1 << 20):.0f} MiB" if count >= (1 << 20) else f"{count / 1024:.0f} KiB"

"""Errors that the command line reports in one line."""

from __future__ import annotations


class CliError(Exception):
    """An error found by the command line itself. The message says what happened and what to do."""


def explained() -> tuple[type[BaseException], ...]:
    """Errors that users or files can cause; anything else is a bug and shows its traceback.

    Only called after an error, so that no start pays for these imports.
    """
    from app.errors import ClientError, DocumentError, HistoryError
    from app.settings import SettingsError
    from models.errors import ModelError
    from runtime.errors import RuntimeFailure
    from tuner.errors import TunerError

    return (
        CliError,
        ClientError,
        DocumentError,
        HistoryError,
        SettingsError,
        ModelError,
        RuntimeFailure,
        TunerError,
        OSError,
        MemoryError,
    )


def in_one_line(error: BaseException) -> str:
    """The error's message without line breaks."""
    if isinstance(error, MemoryError):
        return "not enough memory: close other programs, or use a smaller model, fewer bits or a shorter context"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__

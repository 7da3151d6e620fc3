"""Errors of `app`: of the connection between UI and runtime, of saved chats, and of documents.

    ClientError
     ├─ StartError            the runtime process could not be started
     ├─ NotReadyError         no model can answer
     ├─ ConnectionLostError   the runtime does not respond, or disappeared in the middle of an answer
     ├─ ProtocolError         the response is not one that this program understands
     └─ AnswerError           the runtime responded with an error
         ├─ RequestRefusedError    it does not accept the request (400, 413)
         │   └─ ContextLengthError    prompt and answer do not fit in the context
         ├─ AccessError            the token, Host or Origin is not accepted (401, 403)
         ├─ NotFoundError          there is no such model (404)
         ├─ BusyError              another job of that kind is running (409)
         └─ UnavailableError       it cannot answer now: no memory, no model, shutting down (503)

    HistoryError             chats can't be saved, found or read
    DocumentError            a file or folder can't be read
    CommandError             a command that begins with a slash is unknown, or can't do what it is asked

Every message tells the user what happened and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable

from app.language import _


class HistoryError(Exception):
    """Chats could not be saved, found or read. The message says what happened and what to do."""


class DocumentError(Exception):
    """A file or folder can't be read. The message says which, why, and what to do, in one sentence."""


class CommandError(Exception):
    """A command that begins with a slash is unknown, or can't do what it is asked. The message says why."""


class ClientError(Exception):
    """Base of all errors of the client. The message says what happened and what to do."""


class StartError(ClientError):
    """The runtime process could not be started; the message ends with the last lines it printed."""


class NotReadyError(ClientError):
    """No model can answer; the message says why."""


class ConnectionLostError(ClientError):
    """The runtime does not respond, or disappeared in the middle of an answer."""


class ProtocolError(ClientError):
    """The response is not one that this program understands."""


class AnswerError(ClientError):
    """The runtime responded with an error."""

    def __init__(self, message: str, *, status: int, param: str | None = None, code: str | None = None) -> None:
        """Store the fields of an OpenAI-style error.

        Args:
            message: What happened, for the user.
            status: HTTP status; 500 for an error in the middle of a stream.
            param: The invalid field of the request.
            code: Short name of the error, such as `context_length_exceeded`.
        """
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class RequestRefusedError(AnswerError):
    """The runtime does not accept the request."""


class ContextLengthError(RequestRefusedError):
    """Prompt and answer do not fit in the context."""


class AccessError(AnswerError):
    """The token, the Host or the Origin is not accepted."""


class NotFoundError(AnswerError):
    """There is no such model."""


class BusyError(AnswerError):
    """Another job of that kind is running."""


class UnavailableError(AnswerError):
    """The runtime cannot answer now."""


def hint(name: str, known: Iterable[str], otherwise: str, mark: str = "") -> str:
    """What to say of an unknown name.

    Returns:
        `did you mean NAME?` of the first known one that begins with it, or is most like it; `otherwise` if none is.
    """
    from difflib import get_close_matches

    asked, cased = name.lower(), {one.lower(): one for one in known}
    near = [one for one in cased if asked and one.startswith(asked)] or get_close_matches(asked, cased, n=1)
    return _("did you mean {name}?", name=mark + cased[near[0]]) if near else otherwise


_BY_STATUS: dict[int, type[AnswerError]] = {
    400: RequestRefusedError,
    401: AccessError,
    403: AccessError,
    404: NotFoundError,
    409: BusyError,
    413: RequestRefusedError,
    503: UnavailableError,
}


def answer_error(status: int, message: str, *, param: str | None, code: str | None) -> AnswerError:
    """The error class that matches an HTTP status and a code."""
    kind = ContextLengthError if code == "context_length_exceeded" else _BY_STATUS.get(status, AnswerError)
    return kind(message, status=status, param=param, code=code)

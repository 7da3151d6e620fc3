"""Chats as Markdown documents: the branch on screen, readable and importable.

A message may contain any Markdown, including headings and unclosed code blocks. If it could be read as another turn, or
swallow the next one, it is quoted; if it contains HTML, which quoting cannot contain, it is fenced.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from app.conversation import Call, Message, State
from app.errors import HistoryError
from app.printable import printable, printable_name
from runtime.system.foreign import read_json
from runtime.wire.codec import from_json

if TYPE_CHECKING:
    from markdown_it.token import Token

FORMAT = "lowbit-chat"
LAST_YEAR = 9000
EXAMPLE = "2026-11-22T10:42:00+01:00"
DEEPEST = 15
"""Deepest nesting of quotes and lists that is examined."""
_MARK = re.compile(rf"^<!-- {FORMAT}: (user|assistant) (\S+)(?: (\{{.*\}}))? -->$", re.MULTILINE)
_HEADING = re.compile(r"\s*## (.*)\n")
_OWN_HEADING = re.compile(r"\n## .*\n\n")
_TICKS = re.compile("`+")
_SPECIAL = re.compile(r"([\\<&*`\[\]])")


@dataclass(frozen=True, slots=True, kw_only=True)
class _About:
    """Metadata in a turn's marker, beyond role and time. Documents of earlier versions lack it."""

    model: str | None = None
    state: State = "done"
    error: str | None = None
    quoted: bool = False
    """Whether each line of the text is quoted."""
    fence: str | None = None
    """The fence around the text, if any."""
    calls: Sequence[Call] = ()
    """The tools that the answer called, with their results."""


def write(title: str, path: Sequence[Message]) -> str:
    """Write the document of a branch."""
    return "\n\n".join([f"# {title}", *map(_turn, path)]) + "\n"


def read(text: str) -> tuple[str | None, list[Message]]:
    """Read the title of a document and its messages, with new ids.

    Raises:
        ValueError: it is damaged; the message says where.
        HistoryError: it is not an exported chat.
    """
    if "\r\n" in text and not _MARK.search(text):
        text = text.replace("\r\n", "\n")  # an editor has changed the line ends
    first = _MARK.search(text)
    if first is None:
        raise HistoryError("it is no exported chat: its turns are not marked")
    messages: list[Message] = []
    try:
        for mark, about, body in _turns(text, first):
            messages.append(
                Message(
                    id=uuid.uuid4().hex,
                    parent=messages[-1].id if messages else None,
                    role="user" if mark[1] == "user" else "assistant",
                    text=body,
                    state=about.state,
                    error=about.error,
                    model=about.model,
                    calls=about.calls if mark[1] == "assistant" else (),
                    created=moment_of(mark[2]),
                )
            )
    except ValueError as error:
        raise ValueError(f"turn {len(messages) + 1}: {error}") from error
    title = next((line[2:] for line in text[: first.start()].splitlines() if line.startswith("# ")), None)
    return title, messages


def moment_of(text: str) -> datetime:
    """Parse a time from a foreign file.

    Raises:
        ValueError: it is malformed, has no time zone, or is out of range.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None or not 1970 <= moment.year <= LAST_YEAR:
        raise ValueError(f"a moment with its zone was expected, such as {EXAMPLE}, not {text[:60]!r}")
    return moment


def _turn(message: Message) -> str:
    """A message with its marker and heading."""
    text, quoted, fence = message.text, False, None
    if (form := _form(text)) == "fenced":
        fence = "`" * max(3, 1 + max(map(len, _TICKS.findall(text)), default=0))
        text = f"{fence}text\n{text}\n{fence}"
    elif form == "quoted":
        quoted, text = True, "\n".join(f"> {line}" for line in text.split("\n"))
    about = _About(
        model=message.model,
        state=message.state,
        error=message.error,
        quoted=quoted,
        fence=fence,
        calls=message.calls,
    )
    usual = asdict(_About())
    told = json.dumps({name: value for name, value in asdict(about).items() if value != usual[name]})
    told = told.replace("<", "\\u003c").replace(">", "\\u003e")
    who = "You" if message.role == "user" else _in_line(printable_name(message.model or "")) or "Assistant"
    if message.role == "assistant" and who.casefold() == "you":
        who = f"{who} (model)"
    mark = f"<!-- {FORMAT}: {message.role} {message.created.isoformat()} {told} -->"
    return f"{mark}\n## {who}\n\n{text}{_ended(about)}"


def _ended(about: _About) -> str:
    """The reader's notes on the tools that an answer called, and how it ended."""
    return "".join(f"\n\n*called {_in_line(printable_name(call.name))}*" for call in about.calls) + _end(about)


def _end(about: _About) -> str:
    if about.state == "failed":
        return f"\n\n*failed: {_in_line(printable(about.error or ''))}*"
    return "\n\n*stopped*" if about.state == "stopped" else ""


def _in_line(text: str) -> str:
    """A text on one line, without Markdown."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _form(text: str) -> str:
    """How to write a text so that it stays within its turn: `plain`, `quoted` or `fenced`."""
    from markdown_it import MarkdownIt

    end = "the next turn"
    tokens = MarkdownIt("commonmark").parse(f"{text}\n\n## {end}\n")
    if "\r" in text or any("html" in token.type or token.level > DEEPEST for token in _all(tokens)):
        return "fenced"
    headings = [token for token in tokens if token.type == "heading_open" and token.tag in ("h1", "h2")]
    own = [token.level for token in tokens if token.type == "inline" and token.content == end][-1:]
    return "plain" if len(headings) == 1 and own == [1] and not _MARK.search(text) else "quoted"


def _all(tokens: Sequence[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from token.children or ()


def _turns(text: str, mark: re.Match[str] | None) -> Iterator[tuple[re.Match[str], _About, str]]:
    """The markers, metadata and texts of all turns."""
    while mark is not None:
        if mark[3] is None:
            following = _MARK.search(text, mark.end())
            about, body = _earlier(mark[1], text[mark.end() : following.start() if following else None])
        else:
            about = from_json(_About, read_json(mark[3]))
            heading = _OWN_HEADING.match(text, mark.end())
            begin = heading.end() if heading else mark.end() + 1
            inside = _fenced(text, begin, about.fence)
            following = _MARK.search(text, begin if inside is None else begin + len(inside))
            body = text[begin : following.start() if following else None] if inside is None else inside
            body = _bare(body, about, last=following is None)
        yield mark, about, body
        mark = following


def _fenced(text: str, begin: int, fence: str | None) -> str | None:
    """The text between fences."""
    if fence is None:
        return None
    end = text.find(f"\n{fence}\n", begin + len(fence))
    if end < 0 or not text.startswith(f"{fence}text\n", begin):
        raise ValueError(f"the code block in line {text.count(chr(10), 0, begin) + 1} has no beginning or no end")
    return text[begin : end + len(fence) + 1]


def _bare(body: str, about: _About, *, last: bool) -> str:
    """The text of a turn written by `_turn`."""
    if about.fence is not None:
        return body[len(about.fence) + len("text\n") : -len(about.fence) - 1]
    body = body.removesuffix("\n" if last else "\n\n").removesuffix(_ended(about))
    if about.quoted:
        return "\n".join(line.removeprefix(">").removeprefix(" ") for line in body.split("\n"))
    return body


def _earlier(role: str, body: str) -> tuple[_About, str]:
    """A turn in an earlier version's document."""
    heading = _HEADING.match(body)
    model = heading[1] if heading and role == "assistant" else None
    return _About(model=model), (body[heading.end() :] if heading else body).strip("\n")

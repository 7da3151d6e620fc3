"""What servers return, as text: for the model and for the screen.

Nothing is fetched: links stay text, pictures are named. Control characters and characters that hide or turn text are
replaced, and a text that is too long is cut with a word.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from app.printable import printable

MAX_DESCRIPTION = 2000
"""Most characters of a description; servers describe tools to the model, not to write a book."""
SHARE = 0.25
"""Share of the context that a result may take."""
CHARACTERS_PER_TOKEN = 3.0
"""Characters that a token of a result is assumed to have: JSON and paths have few."""
USUAL_CHARACTERS = 12_000
"""Most characters of a result where the context's size is unknown."""
HARD_LIMIT = 200_000


def room(context: int | None) -> int:
    """Most characters of a result.

    Args:
        context: Size of the context in tokens, if known.
    """
    if not context:
        return USUAL_CHARACTERS
    return min(HARD_LIMIT, max(400, int(SHARE * context * CHARACTERS_PER_TOKEN)))


def cut(text: str, most: int) -> str:
    """A text of at most about this many characters; the model and the reader are told what was cut."""
    if len(text) <= most:
        return text
    return f"{text[:most]}\n[cut: these are the first {most:,} of {len(text):,} characters]"


def clean(text: str, most: int = HARD_LIMIT) -> str:
    """A text from a server that is safe to show, of limited length."""
    return cut(printable(text), most)


def text_of(contents: Iterable[Any], structured: Any = None) -> str:
    """The text of a result's contents.

    Args:
        contents: Content blocks of the protocol.
        structured: The structured result, shown where there are no contents.
    """
    parts = [_block(block) for block in contents]
    if not any(parts) and structured is not None:
        parts = [json.dumps(structured, ensure_ascii=False, default=str)]
    return "\n".join(part for part in parts if part)


def _block(block: Any) -> str:
    kind = getattr(block, "type", "")
    if kind == "text":
        return str(block.text)
    if kind in ("image", "audio"):
        return f"[{kind}, {str(block.mime_type)[:60]}, about {3 * len(block.data) // 4:,} bytes, not shown]"
    if kind == "resource_link":
        return f"[link: {str(block.name)[:200]} {str(block.uri)[:500]}, not opened]"
    if kind == "resource":
        return resource_text([block.resource])
    return f"[{str(kind)[:40]}, not shown]"


def resource_text(contents: Iterable[Any]) -> str:
    """The text of a resource's contents; binary ones are only named."""
    parts = []
    for one in contents:
        text = getattr(one, "text", None)
        parts.append(text if isinstance(text, str) else f"[{str(one.uri)[:200]}: binary, not shown]")
    return "\n".join(parts)

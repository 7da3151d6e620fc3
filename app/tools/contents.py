"""What servers return: their messages, read as far as they can be, and texts for the model and for the screen.

Nothing is fetched: links stay text, pictures are named. Control characters and characters that hide or turn text are
replaced, and a text that is too long is cut with a word.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from app.printable import printable
from runtime.system.foreign import read_json

if TYPE_CHECKING:
    from mcp_types import JSONRPCMessage

MAX_DESCRIPTION = 2000
"""Most characters of a description; servers describe tools to the model, not to write a book."""
SHARE = 0.25
"""Share of the context that a result may take."""
CHARACTERS_PER_TOKEN = 3.0
"""Characters that a token of a result is assumed to have: JSON and paths have few."""
USUAL_CHARACTERS = 12_000
"""Most characters of a result where the context's size is unknown."""
HARD_LIMIT = 200_000
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords of a schema under which an object names schemas."""
_PROSE = ("title", "description", "$comment", "default", "examples")
"""Keywords that restrict nothing."""


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


def read_message(data: bytes) -> Any:
    """JSON from a server. Byte order marks, NUL bytes and wrong UTF-8 do no harm, nor do halves of surrogate pairs.

    Raises:
        ValueError: it can't be read.
    """
    return read_json(data.replace(b"\0", b"").decode("utf-8", "replace").lstrip(" \t\r\n\ufeff\ufffd"))


def message_of(found: Any) -> JSONRPCMessage | None:
    """The message that a value is, even if `jsonrpc` is missing or its error is odd; None if it is none.

    A result that is no object is an error of the request.
    """
    import mcp_types as types

    if not isinstance(found, dict):
        return None
    method, params, given = found.get("method"), found.get("params"), found.get("id")
    number = int(given) if isinstance(given, float) and given.is_integer() else given
    number = number if isinstance(number, str) or type(number) is int else None
    params = params if isinstance(params, dict) else None
    if isinstance(method, str):
        if number is None:
            return types.JSONRPCNotification(jsonrpc="2.0", method=method, params=params)
        return types.JSONRPCRequest(jsonrpc="2.0", id=number, method=method, params=params)
    if isinstance(result := found.get("result"), dict) and number is not None:
        return types.JSONRPCResponse(jsonrpc="2.0", id=number, result=result)
    if "id" not in found or not {"result", "error"} & found.keys():
        return None
    error = found.get("error")
    code, words = (error.get("code"), error.get("message")) if isinstance(error, dict) else (None, error)
    if "error" not in found:
        code, words = types.PARSE_ERROR, "its result is not an object"
    code = code if type(code) is int else types.INTERNAL_ERROR
    told = types.ErrorData(code=code, message=words if isinstance(words, str) else "it gave no reason")
    return types.JSONRPCError(jsonrpc="2.0", id=number, error=told)


def mended_schema(schema: Any, hide: Callable[[str], str]) -> dict[str, Any]:
    """A schema of a tool's arguments. Where nothing says what they are, none are needed.

    Args:
        schema: As the server wrote it; some languages write an empty object as a list.
        hide: Removes secrets from texts.

    Raises:
        ValueError: it is no schema of arguments; the message says why.
    """
    if not isinstance(schema := schema or {}, dict):
        raise ValueError(f"its schema is not an object but {json.dumps(schema)[:60]}")
    kinds = schema.get("type") or "object"
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise ValueError(f"its schema is of type {json.dumps(kinds)[:60]}, and arguments are an object")

    def mended(value: Any, *, prose: bool = False) -> Any:
        if isinstance(value, str):
            return hide(value) if prose else value
        if isinstance(value, list):
            return [mended(one, prose=prose) for one in value]
        if not isinstance(value, dict):
            return value
        return {
            key: {} if key in _NAMED and not one else mended(one, prose=prose or key in _PROSE)
            for key, one in value.items()
        }

    return {**mended(schema), "type": "object"}


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
    block = block if isinstance(block, dict) else {}
    kind, text, data = block.get("type"), block.get("text"), block.get("data")
    if kind == "text" and isinstance(text, str):
        return text
    if kind in ("image", "audio") and isinstance(data, str):
        return f"[{kind}, {str(block.get('mimeType'))[:60]}, about {3 * len(data) // 4:,} bytes, not shown]"
    if kind == "resource_link":
        return f"[link: {str(block.get('name'))[:200]} {str(block.get('uri'))[:500]}, not opened]"
    if kind == "resource":
        return resource_text([block.get("resource")])
    return f"[{str(kind)[:40]}, not shown]"


def resource_text(contents: Iterable[Any]) -> str:
    """The text of a resource's contents; binary ones are only named."""
    parts = []
    for one in contents:
        one = one if isinstance(one, dict) else {}
        text = one.get("text")
        parts.append(text if isinstance(text, str) else f"[{str(one.get('uri'))[:200]}: binary, not shown]")
    return "\n".join(parts)

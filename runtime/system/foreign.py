"""Untrusted text and JSON, sanitized on reading."""

from __future__ import annotations

import json
import math
from typing import Any

DEPTH = 200
"""Maximum nesting of lists and objects, the same as that of pydantic's parser."""


def encodable(text: str) -> str:
    """Make a text encodable: joins surrogate pairs, and replaces lone surrogates by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def read_json(data: str | bytes) -> Any:
    """Parse JSON whose texts are all encodable. NaN and infinity, which JSON does not have, become null.

    Raises:
        ValueError: it is not JSON, a number has too many digits, or it is nested too deeply; the message says which.
    """
    try:
        return _harmless(json.loads(data, parse_constant=lambda _: None), 0)
    except RecursionError:
        raise ValueError(f"lists and objects are nested more than {DEPTH} deep") from None


def _harmless(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if not isinstance(value, dict | list):
        return value
    if depth == DEPTH:
        raise RecursionError
    if isinstance(value, list):
        return [_harmless(item, depth + 1) for item in value]
    return {encodable(key): _harmless(item, depth + 1) for key, item in value.items()}

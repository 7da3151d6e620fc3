"""Mutations of valid inputs: values exchanged, exaggerated and nested; bytes changed, cut off and repeated."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]
Place = tuple[Any, Any]
"""A list or an object, and the index or the key of one of its members."""

DEEP = 100_000
WRITTEN = {
    "@lists@": "[" * DEEP + "]" * DEEP,
    "@objects@": '{"a":' * DEEP + "1" + "}" * DEEP,
    "@shallow@": "[" * 150 + "]" * 150,
    "@open@": "[{" * 500,
    "@digits@": "9" * 5000,
    "@huge@": "1e999",
    "@half@": r'"\ud83d"',
    "@pair@": r'"\ud83d\ude00"',
    "@many@": "[" + "0," * 50_000 + "0]",
    "@nothing@": "",
}
"""What Python's own objects can't hold, or not quickly, by the texts that stand for it."""
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63),
    *(2**64 - 1, 2**64, -(2**31), -(2**63), 10**400, 0.5, -0.0, 1e-300, 5e-324, 1e30, 1e38, 1e308),
    *(math.nan, math.inf, -math.inf),
    *("", " ", "\0", "\n", "a", "\ud800", "a\udfffb", "\u202e", "\ufeff", "🙂", "x" * 600, "x" * 100_000, "0", "true"),
    *("../../etc/passwd", "{{ 1 }}", "(a+)+$", "[[", "%s%n", "1970-01-01T00:00:00+00:00", "9999-12-31T23:59:59-23:59"),
    *([], {}, [[]], {"": None}, {"a": {"b": {}}}, [None] * 3, [0, -1], ["a", 1, None], [{}], [""]),
    *WRITTEN,
)  # fmt: skip
"""What stands in place of a value."""
NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
"""What is written over bytes of a binary file."""
_PIECES = ("", "", "\0", "\ud800", "\u2028", "\\", '"', "x", " ", "\r\n", "é", "🙂")
_WAYS = ("replace", "replace", "replace", "near", "move", "wrap", "drop", "rename", "repeat")
MAX_REPEATED = 4 << 20
"""Bytes that a repetition may add: repetitions of repetitions would fill the memory of whoever makes them."""
_BYTE_WAYS = ("set", "flip", "number", "insert", "remove", "repeat", "cut")
_BYTES = st.binary(max_size=12)
_INSERTED = (b"\xff\xfe", b"\xed\xa0\x80", b"\r\n", b"\n\n", b'"', b"[" * 999)
_WRITTEN = re.compile("|".join(f'"{name}"' for name in WRITTEN))


def pick(draw: Draw, items: Sequence[Any]) -> Any:
    """One of these. Unlike `sampled_from`, it costs nothing to describe many."""
    return items[draw(st.integers(0, len(items) - 1))]


@st.composite
def altered(draw: Draw, sound: Any, values: Sequence[Any] = ()) -> Any:
    """What JSON can hold, changed in some places.

    Args:
        draw: Of hypothesis.
        sound: What is changed; a copy of it is.
        values: More that may stand in a value's place.
    """
    content = {"": pickle.loads(pickle.dumps(sound))}  # a copy, in a tenth of the time that copying takes
    for _ in range(draw(st.integers(1, 4))):
        places = [place for place in _places(content) if place[0] is not content]
        if not places:
            break
        into, key = pick(draw, places)
        _change(draw, into, key, places, (*VALUES, *values, *values))
    return content[""]


def _change(draw: Draw, into: Any, key: Any, places: Sequence[Place], values: Sequence[Any]) -> None:
    """Change one place."""
    way = pick(draw, _WAYS)
    value = into[key]
    if way == "drop":
        del into[key]
    elif way == "move":
        other, there = pick(draw, places)
        into[key] = copy.deepcopy(other[there])
    elif way == "wrap":
        for _ in range(pick(draw, (1, 2, 90))):
            value = [value] if draw(st.booleans()) else {"a": value}
        into[key] = value
    elif way == "rename" and isinstance(into, dict):
        keys = sorted({other for _, other in places if isinstance(other, str)} | {"", "x" * 600, "\ud800", "a\0"})
        into[pick(draw, keys)] = into.pop(key)
    elif way == "repeat" and isinstance(into, list):
        count = pick(draw, (1, 2, 30, 2000 if not isinstance(value, dict | list) else 30))
        count = count if count * len(written(value)) < MAX_REPEATED else 1
        into[key:key] = [copy.deepcopy(value) for _ in range(count)]  # what is shared would grow in every place at once
    elif way == "near" and type(value) in (int, float):
        into[key] = pick(draw, (value + 1, value - 1, -value, value * 2, value // 2, value * 1000))
    elif way == "near" and isinstance(value, str):
        at = draw(st.integers(0, len(value)))
        into[key] = pick(draw, (value[:at], value[at:], value + value, value.upper())) + pick(draw, _PIECES)
    else:
        chosen = pick(draw, values)
        into[key] = copy.deepcopy(chosen) if isinstance(chosen, dict | list) else chosen


def _places(value: Any) -> Iterator[Place]:
    """Every place in lists and objects; what is repeated thousands of times counts once."""
    waiting = [value]
    while waiting:
        inside = waiting.pop()
        for key in inside if isinstance(inside, dict) else range(min(len(inside), 40)):
            yield inside, key
            if isinstance(inside[key], dict | list):
                waiting.append(inside[key])


def written(content: Any, *, ascii_only: bool = True) -> bytes:
    """As JSON, NaN and lone surrogates included."""
    text = json.dumps(content, ensure_ascii=ascii_only)
    return _WRITTEN.sub(lambda found: WRITTEN[found[0][1:-1]], text).encode("utf-8", "surrogatepass")


@st.composite
def altered_json(draw: Draw, sound: Any, values: Sequence[Any] = ()) -> bytes:
    """JSON that was changed as `altered` does, and sometimes as `damaged` does."""
    content = written(draw(altered(sound, values)), ascii_only=draw(st.booleans()))
    return draw(damaged(content)) if draw(st.integers(0, 7)) == 0 else content


@st.composite
def damaged(draw: Draw, sound: bytes, most: int | None = None) -> bytes:
    """Bytes, changed in some places.

    Args:
        draw: Of hypothesis.
        sound: What is changed.
        most: Where the part that is changed ends; None: with all.
    """
    content = bytearray(sound)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, min(len(content), most if most is not None else len(content))))
        way = pick(draw, _BYTE_WAYS)
        if way == "set":
            content[at : at + 1] = bytes([draw(st.integers(0, 255))])
        elif way == "flip":
            content[at : at + 1] = bytes(byte ^ 1 << draw(st.integers(0, 7)) for byte in content[at : at + 1])
        elif way == "number":
            form, size = pick(draw, (("<Q", 8), ("<I", 4), (">I", 4)))
            content[at : at + size] = struct.pack(form, pick(draw, NUMBERS) % 2 ** (8 * size))
        elif way == "insert":
            content[at:at] = draw(_BYTES) or pick(draw, _INSERTED)
        elif way == "remove":
            del content[at : at + draw(st.integers(1, 16))]
        elif way == "repeat":
            part = bytes(content[at : at + draw(st.integers(1, 64))])
            content[at:at] = part * pick(draw, (1, 2, 50))
        else:
            del content[at:]
    return bytes(content)


def addressed(name: str, contents: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Inputs of a reader of several files or places: the name in a line of its own, then the content."""
    return contents.map(lambda content: f"{name}\n".encode() + content)


def mostly(inputs: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """These inputs, and now and then any bytes at all."""
    return st.integers(0, 31).flatmap(lambda at: inputs if at else st.binary(max_size=200))

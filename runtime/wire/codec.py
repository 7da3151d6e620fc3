"""Codec: converts records to JSON and back, guided only by the annotations of their fields.

Fields may be texts, numbers, booleans, records, `Mapping`, `Sequence`, tuples, `Literal`, unions of these, `Any`, and
texts, numbers and sequences `Annotated` with one `Within` or `OneOf`. Reading stops at the first mistake.
"""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

R = TypeVar("R")
LARGEST_INT = 2**63 - 1
"""Largest magnitude of an integer: counts fit in 64 bits."""
_SHOWN = 60
"""Most characters of a wrong value quoted in an error."""
_WORDS: dict[Any, str] = {
    str: "a text", int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"
}  # fmt: skip


class WireError(ValueError):
    """JSON that does not match its record. The message says in one line what is wrong, and where."""

    def __init__(self, message: str, field: str, *, missing: bool = False) -> None:
        """Describe an error.

        Args:
            message: For the user.
            field: The faulty field, such as `k_chunk.qkv`; empty: the whole record.
            missing: Whether the field is missing.
        """
        super().__init__(message)
        self.field = field
        self.missing = missing


@dataclass(frozen=True, slots=True)
class Within:
    """Range of an annotated number, or of the length of an annotated text or sequence."""

    low: float
    high: float = math.inf
    above: bool = False
    """Whether `low` itself is excluded."""

    def __contains__(self, value: Any) -> bool:
        size = len(value) if isinstance(value, str | list | tuple) else value
        return self.low <= size <= self.high and not (self.above and size == self.low)

    def __str__(self) -> str:
        return f"{self.low:g} or more" if self.high == math.inf else f"{self.low:g} to {self.high:.12g}"


@dataclass(frozen=True, slots=True)
class OneOf:
    """Allowed values of an annotated text."""

    values: tuple[str, ...]

    def __contains__(self, value: Any) -> bool:
        return value in self.values

    def __str__(self) -> str:
        return f"one of {', '.join(self.values)}"


Count = Annotated[int, Within(0)]
Number = Annotated[float, Within(0)]


def to_json(value: Any) -> Any:
    """A record, or a field's value, as plain lists and dictionaries."""
    if is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [to_json(item) for item in value]
    return value


def from_json(kind: type[R], value: object, *, strict: bool = False) -> R:
    """Read the output of `to_json`. Fields with defaults may be absent.

    Args:
        kind: The record.
        value: The JSON object.
        strict: Whether unknown fields are errors; otherwise they are ignored.

    Raises:
        WireError: a field is missing or does not match its annotation.
    """
    record: R = _read(kind, value, "", strict)
    return record


@cache
def _fields(kind: type) -> tuple[dict[str, Any], frozenset[str]]:
    """Annotations of a record's fields, and the names of those without a default."""
    own = {field.name: field for field in fields(kind)}
    hints = get_type_hints(kind, vars(sys.modules[kind.__module__]), include_extras=True)
    required = (name for name, field in own.items() if field.default is MISSING and field.default_factory is MISSING)
    return {name: hints[name] for name in own}, frozenset(required)


def _read(kind: Any, value: Any, where: str, strict: bool) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        if isinstance(value, list) and value not in arguments[1]:  # before reading its items
            _refuse(kind, value, where)
        found = _read(arguments[0], value, where, strict)
        return found if found in arguments[1] else _refuse(kind, value, where)
    if origin in (Union, UnionType):
        return _read_union(kind, value, where, strict)
    if origin is Literal:
        return value if isinstance(value, str) and value in arguments else _refuse(kind, value, where)
    if is_dataclass(kind) or origin is Mapping:
        if not isinstance(value, Mapping):
            _refuse(kind, value, where)
        return _read_mapping(arguments, value, where, strict) if arguments else _read_record(kind, value, where, strict)
    if origin in (Sequence, tuple):
        return _read_items(kind, value, where, strict)
    return _read_scalar(kind, value, where)


def _read_union(kind: Any, value: Any, where: str, strict: bool) -> Any:
    deepest = WireError("", "")
    for member in get_args(kind):
        try:
            return _read(member, value, where, strict)
        except WireError as error:
            deepest = max(deepest, error, key=lambda error: len(error.field))
    if deepest.field != where:
        raise deepest
    return _refuse(kind, value, where)


def _read_record(kind: Any, value: Mapping[str, Any], where: str, strict: bool) -> Any:
    known, required = _fields(kind)
    if strict and (unknown := sorted(value.keys() - known.keys())):
        field = _inside(where, unknown[0])
        raise WireError(f"{field} is unknown; known are: {', '.join(known)}", field)
    if absent := [name for name in known if name in required and name not in value]:
        names = [_inside(where, name) for name in absent]
        raise WireError(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} missing", names[0], missing=True)
    given = {name: _read(known[name], value[name], _inside(where, name), strict) for name in known if name in value}
    return kind(**given)


def _read_mapping(kinds: tuple[Any, ...], value: Mapping[str, Any], where: str, strict: bool) -> dict[str, Any]:
    of_key, of_item = kinds
    values = {}
    for key, item in value.items():
        inside = _inside(where, key)
        values[_read(of_key, key, inside, strict)] = _read(of_item, item, inside, strict)
    return values


def _read_items(kind: Any, value: Any, where: str, strict: bool) -> tuple[Any, ...]:
    kinds = get_args(kind)
    if not isinstance(value, list | tuple):
        _refuse(kind, value, where)
    if get_origin(kind) is Sequence or kinds[-1] is ...:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        _refuse(kind, value, where)
    items = enumerate(zip(kinds, value, strict=True))
    return tuple(_read(of, item, f"{where}[{at}]", strict) for at, (of, item) in items)


def _read_scalar(kind: Any, value: Any, where: str) -> Any:
    assert kind in _WORDS, f"a field is annotated with {kind}, which cannot be read"
    if kind is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return float(value)
    if type(value) is not kind or (kind is int and abs(value) > LARGEST_INT):
        _refuse(kind, value, where)
    return value


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 2 * _SHOWN


def _inside(where: str, name: str) -> str:
    name = name if len(name) <= _SHOWN else f"{name[: _SHOWN - 1]}…"
    return f"{where}.{name}" if where else name


def _refuse(kind: Any, value: Any, where: str) -> NoReturn:
    shown = _REPR.repr(value)
    shown = shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 1]}…"
    raise WireError(f"{where or 'it'} must be {_words(kind)}, not {shown}", where)


def _words(kind: Any) -> str:
    """A description of a field's type for the user."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        limit = arguments[1]
        if isinstance(limit, OneOf):
            return str(limit)
        counted = {str: " characters", int: "", float: ""}.get(arguments[0], " items")
        return f"{_words(arguments[0])} of {limit}{counted}"
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_words, arguments)))
    if origin is Literal:
        return str(OneOf(arguments)) if len(arguments) > 1 else str(arguments[0])
    if origin in (Sequence, tuple):
        return "a list"
    return _WORDS.get(kind, "an object")

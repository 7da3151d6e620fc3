"""Arguments of tool calls, checked against the whole schema, after a grammar has enforced what it can.

Schemas come from servers that nobody vouches for: references are not fetched, and a pattern that takes too long is an
error of the schema, not a process that hangs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from runtime.system.foreign import read_json

PATTERN_S = 0.2
"""Longest search for a pattern in a text, in seconds."""
LONGEST = 300
"""Most characters of a problem."""


def problem_of(arguments: str, schema: Mapping[str, Any]) -> str | None:
    """What is wrong with the arguments of a call, in one sentence for the model; None if they fit.

    Args:
        arguments: JSON.
        schema: Of the function's parameters. Where it is itself broken, nothing is wrong with the arguments.
    """
    try:
        found = read_json(arguments)
    except ValueError as error:
        return f"the arguments are not JSON: {error}"
    if not isinstance(found, dict):
        return "the arguments are not a JSON object"
    try:
        wrong = next(_validator(schema).iter_errors(found), None)
    except Exception:  # noqa: BLE001 -- a broken schema may raise anything
        return None
    if wrong is None:
        return None
    place = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in wrong.absolute_path).lstrip(".")
    return f"{place or 'the arguments'}: {wrong.message}"[:LONGEST]


def _validator(schema: Mapping[str, Any]) -> Any:
    """A validator that fetches nothing and cannot hang in a pattern."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend
    from referencing import Registry

    return extend(Draft202012Validator, {"pattern": _pattern})(dict(schema), registry=Registry())


def _pattern(_validator: Any, pattern: Any, value: Any, _schema: Any) -> Iterator[Any]:
    import regex
    from jsonschema import ValidationError

    if not isinstance(value, str) or not isinstance(pattern, str):
        return
    try:
        fits = regex.search(pattern, value, timeout=PATTERN_S)
    except (regex.error, TimeoutError):
        return  # a pattern that cannot be searched for restricts nothing
    if not fits:
        yield ValidationError(f"{value!r} does not match {pattern!r}")

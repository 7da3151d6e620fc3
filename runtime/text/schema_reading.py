"""What the schema process does: see `runtime.text.schema_process`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from runtime.system.child_process import serve

MAX_BYTES = 1 << 30
"""Memory limit of the process, where the system supports one."""
PATTERN_S = 0.2
"""Longest search for a pattern in a text, in seconds."""
LONGEST = 300
"""Most characters of a problem."""


def found_problem(arguments: str, schema: str) -> str | None:
    """What of a schema some arguments, both as JSON, don't fit. That may take any time and memory.

    Raises:
        Exception: any, where the schema is broken.
    """
    wrong = next(_validator(json.loads(schema)).iter_errors(json.loads(arguments)), None)
    if wrong is None:
        return None
    place = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in wrong.absolute_path).lstrip(".")
    return f"{place or 'the arguments'}: {wrong.message}"[:LONGEST]


def _validator(schema: Mapping[str, Any]) -> Any:
    """A validator that fetches nothing."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend
    from referencing import Registry

    return extend(Draft202012Validator, {"pattern": _pattern})(schema, registry=Registry())


def _pattern(_validator: Any, pattern: Any, value: Any, _schema: Any) -> Iterator[Any]:
    import regex
    from jsonschema import ValidationError

    if not isinstance(value, str) or not isinstance(pattern, str):
        return
    try:
        fits = regex.search(pattern, value, timeout=PATTERN_S)
    except (regex.error, TimeoutError):
        return  # a pattern that cannot be searched for restricts nothing, but the rest of the schema does
    if not fits:
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def _answer(line: bytes) -> Any:
    """Do some work; imports what it needs, as the terminal UI only has arguments checked."""
    work, *given = json.loads(line)
    if work == "problem":
        return found_problem(*given)
    if work == "grammar":
        from runtime.text.constraint import Grammar

        return Grammar(*given).check()
    from runtime.text.enforceable import enforced_part, schema_grammar

    return schema_grammar(*given) if work == "schema" else enforced_part(*given)


if __name__ == "__main__":
    serve(_answer, memory=MAX_BYTES)

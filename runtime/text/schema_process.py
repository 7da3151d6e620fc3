"""The schema process: reads schemas and grammars, and checks arguments, in a child process with limits.

Schemas come from servers and clients that nobody vouches for. A pattern of ten letters backtracks forever, two hundred
bytes of patterns make an automaton of gigabytes, and thirty levels of `allOf` are a billion schemas. Neither Python's
`re` nor llguidance can be interrupted. The child is started when it is first needed, and answers in milliseconds.

Arguments of calls are checked against the whole schema, after a grammar has enforced what it can. References are not
fetched, and what takes too long restricts nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from runtime.errors import RequestError
from runtime.system.child_process import LimitedProcess
from runtime.system.foreign import read_json

SECONDS = 3.0
"""Time limit in seconds: a hundred times what a large schema needs."""


class TooMuchError(RequestError):
    """A schema takes too much time or memory, or its process could not be started."""


def ask(work: str, *given: str) -> Any:
    """Do work in the schema process.

    Args:
        work: `schema`, `grammar`, `enforceable` or `problem`.
        given: Its arguments.

    Raises:
        TooMuchError: it takes too much.
        RequestError: it is refused; says why.
    """
    process = schema_process()
    try:
        answer = process.ask([work, *given])
    except OSError as error:
        raise TooMuchError(f"no process could be started to read it ({error.strerror})") from error
    if answer is None:
        raise TooMuchError(f"reading it takes more than {process.seconds:g} s, or too much memory")
    if "error" in answer:
        raise RequestError(answer["error"])
    return answer["said"]


@lru_cache(maxsize=1)
def schema_process() -> LimitedProcess:
    """The process shared by this program."""
    return LimitedProcess("runtime.text.schema_reading", SECONDS)


logger = logging.getLogger(__name__)


def problem_of(arguments: str, schema: Mapping[str, Any]) -> str | None:
    """What is wrong with the arguments of a call, in one sentence for the model; None if they fit.

    Args:
        arguments: JSON.
        schema: Of the function's parameters. Where it is itself broken, or checking takes too much time or memory,
            nothing is wrong with the arguments.
    """
    try:
        parsed = read_json(arguments)
    except ValueError as error:
        return f"the arguments are not JSON: {error}"
    if not isinstance(parsed, dict):
        return "the arguments are not a JSON object"
    try:
        said: str | None = ask("problem", json.dumps(parsed), json.dumps(schema))
    except TooMuchError as error:
        logger.warning("the arguments of a tool call are not checked against the tool's schema: %s", error)
        return None
    except (RequestError, RecursionError, ValueError, TypeError):
        return None
    return said

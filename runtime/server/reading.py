"""Bodies of requests, read: bounded JSON, checked up to its first mistake, large ones beside the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError, from_json
from starlette.requests import Request

from runtime.server.errors import ApiError
from runtime.wire.inspection import MOST_MESSAGES

LARGE_BYTES = 32 * 1024
"""A larger body is read in a thread: the event loop must not wait for it."""
MOST_VALUES = 2**20
"""Values in a body, at most: as many tokens as any prompt has."""
MOST_GROUPS = 2**16
"""Lists and objects among them, at most: each takes some hundred bytes of memory, and the collector's time."""
MISSING, INVALID, NO_JSON = "missing_required_parameter", "invalid_value", "invalid_json"
"""Codes of the errors about one field, and about the whole body."""
M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

Items = Annotated[list[T], Field(max_length=MOST_MESSAGES, fail_fast=True)]
"""A list that is read up to its first mistake: else each of a million would be kept, and told by nobody."""
Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(min_length=1, max_length=MOST_VALUES, fail_fast=True)]
"""A text as the numbers of its tokens."""


def _json(value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise PydanticCustomError("finite_number", "Numbers should be finite") from None
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_json)]
"""An object that is handed on as it is."""


def at_most(count: int) -> BeforeValidator:
    """Bounds an object before its members are read, which is not done up to the first mistake."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > count:
            raise PydanticCustomError("too_long", f"Object should have at most {count} members")
        return value

    return BeforeValidator(check)


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads the bodies of requests. Large ones are read one after the other, so that one takes the memory of one."""

    _alone: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def read(self, request: Request, make: Callable[[bytes], T]) -> T:
        """What `make` makes of a body.

        Raises:
            ApiError: as `make` does.
        """
        body = await request.body()
        if len(body) <= LARGE_BYTES:
            return make(body)
        async with self._alone:
            return await asyncio.to_thread(make, body)


def read_object(body: bytes) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ApiError: the body is none, or holds too much.
    """
    if len(body) > LARGE_BYTES:
        _check_values(body)
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        if "recursion limit" in str(error):
            message = "lists and objects in the body are nested more than 200 deep: send it in a flatter form"
            raise ApiError(400, message, code=NO_JSON) from None
        raise ApiError(400, f"the body is not JSON: {error}", code=NO_JSON) from error
    if not isinstance(data, dict):
        raise ApiError(400, "the body must be a JSON object", code=NO_JSON)
    return data


def _check_values(body: bytes) -> None:
    """Count what a body holds before any of it is made: a byte of JSON can take fifty of memory."""
    plain = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    outside = np.bitwise_xor.accumulate(plain == ord('"')) == 0  # of texts
    groups = np.count_nonzero(((plain == ord("[")) | (plain == ord("{"))) & outside)
    values = np.count_nonzero((plain == ord(",")) & outside) + groups
    for count, most, what in ((groups, MOST_GROUPS, "lists and objects"), (values, MOST_VALUES, "values")):
        if count > most:
            raise ApiError(400, f"the body holds {count:,} {what}, but at most {most:,} are read", code=NO_JSON)


def parse(body: bytes, model: type[M]) -> M:
    """Read a request's body.

    Raises:
        ApiError: it is no JSON object, or a field is missing, of a wrong type or out of range.
    """
    try:
        return model.model_validate(read_object(body))
    except ValidationError as error:
        raise _explained(error) from None


def refused(param: str, message: str, *, code: str | None = None) -> ApiError:
    """A field that is not acceptable."""
    return ApiError(400, message, param=param, code=code)


def _explained(error: ValidationError) -> ApiError:
    """The error about the first field that is wrong; where it may have several types, what each would need."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    first = _field(details[0])
    field = _field(max((one for one in details if _field(one).startswith(first)), key=_place))
    wrong = [detail for detail in details if _field(detail) == field]
    if wrong[0]["type"] == "missing":
        return ApiError(400, f"{field} is missing", param=field, code=MISSING)
    wanted = " or ".join(dict.fromkeys(detail["msg"] for detail in wrong))
    return ApiError(400, f"{field}: {wanted}", param=field, code=INVALID)


def _place(detail: ErrorDetails) -> tuple[int, ...]:
    """Tells which of the types that a field may have was read furthest."""
    at = [part for part in detail["loc"] if isinstance(part, int)]
    return len(_field(detail).split(".")) + len(at), *at


def _field(detail: ErrorDetails) -> str:
    """A field as OpenAI writes it, `messages[0].content`, without pydantic's names for the members of a union."""
    text = ""
    for part in detail["loc"]:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part.islower() and part != "str":
            text += f".{part}" if text else part
    return text

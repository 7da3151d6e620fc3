"""Request bodies: bounded JSON, validated up to the first mistake; large ones are parsed off the event loop."""

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
from runtime.wire.inspection import MAX_MESSAGES

LARGE_BYTES = 32 * 1024
"""Larger bodies are parsed in a thread, so that the event loop does not wait."""
MAX_VALUES = 2**20
"""Most values in a body: as many as the tokens of any prompt."""
MAX_GROUPS = 2**16
"""Most lists and objects among them: each takes some hundred bytes of memory, and time of the garbage collector."""
MISSING, INVALID, NO_JSON = "missing_required_parameter", "invalid_value", "invalid_json"
"""Codes of errors about one field, and about the whole body."""
M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

Items = Annotated[list[T], Field(max_length=MAX_MESSAGES, fail_fast=True)]
"""A list that is validated up to its first mistake, rather than collecting a million errors."""
Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(min_length=1, max_length=MAX_VALUES, fail_fast=True)]
"""A text as token ids."""


def _json(value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise PydanticCustomError("finite_number", "Numbers should be finite") from None
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_json)]
"""An object that is passed on unchanged."""


def at_most(count: int) -> BeforeValidator:
    """Limit an object's members before validating them, since that does not stop at the first mistake."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > count:
            raise PydanticCustomError("too_long", f"Object should have at most {count} members")
        return value

    return BeforeValidator(check)


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads request bodies. Large ones are read one at a time, so that their memory use does not add up."""

    _alone: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def read(self, request: Request, make: Callable[[bytes], T]) -> T:
        """Parse a body with `make`.

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
        ApiError: the body is not a JSON object, or is too large.
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
    """Count the values of a body before parsing it: a byte of JSON can become fifty in memory."""
    plain = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    outside = np.bitwise_xor.accumulate(plain == ord('"')) == 0  # of texts
    groups = np.count_nonzero(((plain == ord("[")) | (plain == ord("{"))) & outside)
    values = np.count_nonzero((plain == ord(",")) & outside) + groups
    for count, most, what in ((groups, MAX_GROUPS, "lists and objects"), (values, MAX_VALUES, "values")):
        if count > most:
            raise ApiError(400, f"the body holds {count:,} {what}, but at most {most:,} are read", code=NO_JSON)


def parse(body: bytes, model: type[M]) -> M:
    """Parse and validate a request's body.

    Raises:
        ApiError: it is no JSON object, or a field is missing, of a wrong type or out of range.
    """
    try:
        return model.model_validate(read_object(body))
    except ValidationError as error:
        raise _explained(error) from None


def refused(param: str, message: str, *, code: str | None = None) -> ApiError:
    """An error about a field."""
    return ApiError(400, message, param=param, code=code)


def _explained(error: ValidationError) -> ApiError:
    """A description of the first faulty field; for a union, what each type would require."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    first = _field(details[0])
    field = _field(max((one for one in details if _field(one).startswith(first)), key=_place))
    wrong = [detail for detail in details if _field(detail) == field]
    if wrong[0]["type"] == "missing":
        return ApiError(400, f"{field} is missing", param=field, code=MISSING)
    wanted = " or ".join(dict.fromkeys(detail["msg"] for detail in wrong))
    return ApiError(400, f"{field}: {wanted}", param=field, code=INVALID)


def _place(detail: ErrorDetails) -> tuple[int, ...]:
    """Progress of validation in the types of a union."""
    at = [part for part in detail["loc"] if isinstance(part, int)]
    return len(_field(detail).split(".")) + len(at), *at


def _field(detail: ErrorDetails) -> str:
    """The path of a field in OpenAI's notation, `messages[0].content`, without pydantic's union members."""
    text = ""
    for part in detail["loc"]:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part.islower() and part != "str":
            text += f".{part}" if text else part
    return text

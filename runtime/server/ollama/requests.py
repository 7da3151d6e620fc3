"""Validation of Ollama's requests, and their conversion to those of OpenAI's interface, whose rules they follow."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, GetJsonSchemaHandler, StrictBool
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from runtime.server.bodies import Items, JsonObject, read_object, refused, validated
from runtime.server.errors import fields_named
from runtime.server.openai.embeddings import EmbeddingsRequest
from runtime.server.openai.forms import LeftOut, Part
from runtime.server.openai.requests import MAX_COUNT, ChatRequest, Effort, Message
from runtime.server.records import Keep
from runtime.text.reasoning import switch
from runtime.text.sampling import SamplingOptions

_OPTIONS = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty", "typical_p", "tfs_z", "mirostat")},
    "repeat_penalty": "repetition_penalty",
    "num_predict": "max_tokens",
}
"""Members of `options` that decide an answer, and their names in OpenAI's requests. Others say how to compute it."""
NAMES = {
    **{name: f"options.{own}" for own, name in _OPTIONS.items()},
    "num_ctx": "options.num_ctx",
    "response_format.json_schema.schema": "format",
    "response_format": "format",
}
"""Names of fields here, by those of OpenAI's requests."""
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_DURATION = re.compile(r"([-+]?)((?:\d+(?:\.\d*)?(?:ns|us|µs|ms|s|m|h))+|\d+(?:\.\d*)?)")
_STEP = re.compile(r"(\d+(?:\.\d*)?)(\D*)")


def seconds(given: float | str | None) -> float | None:
    """A `keep_alive` in seconds: a number, or a text such as `5m`; negative ones are infinite. None if none is given.

    Raises:
        ApiError: it is no duration.
    """
    if isinstance(given, str):
        match = _DURATION.fullmatch(given.strip()) if len(given) < 100 else None
        if match is None:
            raise refused("keep_alive", "keep_alive must be a number of seconds or a duration, such as 5m or 1h30m")
        parts = (float(number) * _UNITS[unit] for number, unit in _STEP.findall(match[2]))
        given = -1.0 if match[1] == "-" else sum(parts)
    return given if given is None or given >= 0 else math.inf


class OllamaMessage(Message):
    """A message of a conversation."""

    thinking: str | None = None
    tool_name: str | None = None
    images: Items[Any] | None = None

    def plain(self, index: int, left_out: LeftOut, *, last: bool) -> dict[str, Any]:
        """Role, text, reasoning and tool calls, in the format of chat templates.

        Raises:
            ApiError: the message contains what can't be used.
        """
        if self.images:
            field = f"messages[{index}].images"
            if last:
                raise refused(field, f"{field} holds pictures, but the models here read only text")
            left_out.append(field)
        told = super().plain(index, left_out, last=last)
        if self.thinking and self.role == "assistant":
            told["reasoning_content"] = self.thinking
        if self.role == "tool":
            told["name"] = self.tool_name or self.name
        return told


class OllamaChat(ChatRequest):
    """Body of POST /api/chat."""

    FIELDS: ClassVar[frozenset[str]] = frozenset(
        {"model", "messages", "stream", "tools", "format", "think", "keep_alive", "logprobs", "top_logprobs"}
    )
    """Fields beside `options`. Others, which OpenAI's requests have, are ignored."""

    messages: Items[OllamaMessage] = Field(default_factory=list)  # type: ignore[assignment]  # without: load the model
    stream: StrictBool | None = True
    think: StrictBool | Annotated[int, Field(ge=0, le=MAX_COUNT)] | Effort | None = None
    """Whether the model reasons, for how many tokens at most, or how much."""
    keep_alive: float | str | None = None
    num_ctx: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """As it is sent, without the other fields of OpenAI's requests."""
        schema = handler.resolve_ref_schema(handler(core))
        known = schema["properties"]
        names = _OPTIONS | {"num_ctx": "num_ctx"}
        options = {own: known[name] for own, name in names.items() if name in known}
        sent = {name: own for name, own in known.items() if name in cls.FIELDS and name not in cls.REFUSED}
        sent["format"] = {"anyOf": [{"const": "json"}, {"type": "object"}, {"type": "null"}]}
        return schema | {"properties": {**sent, "options": {"type": "object", "properties": options}}}

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Read a body.

        Raises:
            ApiError: it is no JSON object, a field is missing, of a wrong type or out of range, or is not supported.
        """
        given = read_object(body)
        options = given.get("options") or {}
        if not isinstance(options, dict):
            raise refused("options", "options: Input should be an object")
        known = {name: options[own] for own, name in _OPTIONS.items() if options.get(own) is not None}
        tokens, seed = known.get("max_tokens"), known.get("seed")
        if isinstance(tokens, int) and tokens <= 0:
            known["max_tokens"] = -1  # no limit
        if isinstance(seed, int) and seed < 0:
            del known["seed"]  # another one each time
        own = {name: value for name, value in given.items() if name in cls.FIELDS and value is not None}
        with fields_named(NAMES):
            asked = validated({**known, "num_ctx": options.get("num_ctx"), **own}, cls)
            asked.check()
        return asked

    @property
    def keep(self) -> Keep:
        """How the model is to be kept.

        Raises:
            ApiError: `keep_alive` is no duration.
        """
        return Keep(seconds=seconds(self.keep_alive), context=self.num_ctx or 0)

    @property
    def resumes(self) -> bool:
        if not self.messages or (last := self.messages[-1]).role != "assistant" or last.tool_calls:
            return False
        return bool(last.content or last.thinking)

    @property
    def variables(self) -> dict[str, Any]:
        """Further variables of the chat template. Without `think`, the template decides."""
        if self.think is None:
            return {}
        effort = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return {**(switch("on" if self.think else "off") or {}), **effort}

    def sampling(self) -> SamplingOptions:
        """Sampling options. Parsing a large schema takes a while: call it in a worker thread.

        Raises:
            ApiError: the answer format cannot be enforced.
        """
        with fields_named(NAMES):
            options = super().sampling()
        if self.think is None or isinstance(self.think, bool | str):
            return options
        return replace(options, thought_tokens=self.think)


class OllamaGenerate(OllamaChat):
    """Body of POST /api/generate: a chat of one message, or a text that is continued."""

    FIELDS: ClassVar[frozenset[str]] = OllamaChat.FIELDS - {"messages", "tools"} | {
        *("prompt", "system", "raw", "suffix", "template", "context", "images")
    }
    REFUSED: ClassVar[dict[str, str]] = {
        **ChatRequest.REFUSED,
        "suffix": "suffix is not supported",
        "template": "template is not supported: send the finished text as prompt, with raw",
        "context": "context is not supported: send the conversation to /api/chat",
        "images": "images holds pictures, but the models here read only text",
    }

    prompt: str | None = None
    system: str | None = None
    raw: StrictBool | None = None
    suffix: str | None = None
    template: str | None = None
    context: Items[int] | None = None
    images: Items[Any] | None = None

    @property
    def conversation(self) -> tuple[list[dict[str, Any]], LeftOut]:
        """The messages in the format of chat templates."""
        said = (("system", self.system), ("user", self.prompt))
        return [{"role": role, "content": text} for role, text in said if text], []

    @property
    def resumes(self) -> bool:
        return False


class ModelRequest(Part):
    """Body of POST /api/show and of POST /api/pull."""

    model: Annotated[str, Field(min_length=1, max_length=300)]
    stream: StrictBool | None = True

    @classmethod
    def read(cls, body: bytes) -> ModelRequest:
        """Read a body; older clients say `name`.

        Raises:
            ApiError: it is no JSON object, or a field is missing or of a wrong type.
        """
        given = read_object(body)
        return validated({"model": given.get("name"), **given}, cls)


class OllamaEmbeddings(EmbeddingsRequest):
    """Body of POST /api/embed, and of POST /api/embeddings, which has one text in `prompt`."""

    keep_alive: float | str | None = None
    options: JsonObject | None = None
    truncate: StrictBool | None = None
    """Whether a text that is longer than the context is cut; without a word, it is, as in Ollama."""

    @classmethod
    def read(cls, body: bytes) -> OllamaEmbeddings:
        """Read a body; errors as of `OllamaChat.read`."""
        given = read_object(body)
        named = {"input": "prompt"} if "input" not in given and "prompt" in given else {}
        with fields_named(named):
            asked = validated({**given, "input": given.get("input", given.get("prompt"))}, cls)
            asked.check()
        return asked

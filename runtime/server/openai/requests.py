"""Validation of OpenAI requests: errors name wrong types, ranges and unsupported fields.

Unknown fields are ignored, as OpenAI does. Known fields that would change the answer but are not supported (several
answers, other modalities, ...) are rejected rather than silently ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from runtime.server.openai.forms import (
    MAX_TOOLS,
    AnswerForm,
    CalledTool,
    ResponseFormat,
    StructuredOutputs,
    ToolChoice,
    ToolSpec,
    ToolUse,
    answer_form,
    check_results,
    chosen_tools,
)
from runtime.server.reading import Items, JsonObject, Tokens, at_most, refused
from runtime.text.sampling import SamplingOptions

COMPLETION_TOKENS = 16
"""Default length of a plain completion, as in OpenAI's interface."""
MAX_SEED = 2**63
MAX_COUNT = 2**31 - 1
MAX_BIASES = 1024
MAX_VARIABLES = 32
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})

Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Stops = Annotated[str, Field(min_length=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
_NOTHING: tuple[Any, ...] = (None, [], {}, "", False)


class _Request(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(_Request):
    """Options of a stream."""

    include_usage: StrictBool | None = None


class Sampling(_Request):
    """Fields shared by both kinds of request: OpenAI's, and top_k, min_p, repetition_penalty."""

    REFUSED: ClassVar[dict[str, str]] = {
        "logit_bias": "logit_bias is not supported",
        "presence_penalty": "presence_penalty is not supported: use repetition_penalty",
        "frequency_penalty": "frequency_penalty is not supported: use repetition_penalty",
    }
    """Fields that must be absent or neutral, and the error messages if not."""

    model: Annotated[str, Field(min_length=1, max_length=300)]
    n: int | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, float], at_most(MAX_BIASES)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED, lt=MAX_SEED)] | None = None
    stop: Stops | Annotated[Items[Stops], Field(max_length=15)] | None = None
    max_tokens: Count | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    structured_outputs: StructuredOutputs | None = None
    """vLLM's extension: the answer format."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        """Reject unsupported requests.

        Raises:
            ApiError: names the field.
        """
        if self.n not in (None, 1):
            raise refused(
                "n", f"n is {self.n}, but this server gives one answer to a request: leave n out, and ask again"
            )
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", "stream_options is only allowed when stream is true")
        for field, message in self.REFUSED.items():
            if getattr(self, field) not in (*_NOTHING, 0):
                raise refused(field, message, code="unsupported_parameter")

    def options(self, max_tokens: int | None, logprobs: int | None, form: AnswerForm) -> SamplingOptions:
        """Sampling options. Defaults are OpenAI's: temperature 1, top_p 1."""
        top_p = 1.0 if self.top_p is None else self.top_p
        return SamplingOptions(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=1 if top_p == 0 else self.top_k or 0,
            top_p=top_p or 1.0,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            seed=self.seed,
            max_tokens=max_tokens,
            stop=self.stops,
            logprobs=logprobs,
            **form,
        )


class ContentPart(_Request):
    """A part of a message's content."""

    type: str
    text: str | None = None


class Message(_Request):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Items[ContentPart] | None = None
    name: str | None = None
    tool_calls: Items[CalledTool] | None = None
    tool_call_id: str | None = None
    function_call: JsonObject | None = None

    def plain(self, index: int) -> dict[str, Any]:
        """Role, text and tool calls, in the format of chat templates.

        Raises:
            ApiError: the message contains anything other than text and calls.
        """
        where = f"messages[{index}]"
        if self.role == "function" or self.function_call:
            message = f"{where}: functions are an older form that is not supported: use tools"
            raise refused(where, message, code="unsupported_parameter")
        if self.tool_calls and self.role != "assistant":
            raise refused(f"{where}.tool_calls", f"{where}.tool_calls: only an assistant's message calls tools")
        if self.content is None and not self.tool_calls:
            raise refused(f"{where}.content", f"{where}.content is missing: give a text")
        plain: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self._text(where),
        }
        if self.tool_calls:
            plain["tool_calls"] = [call.record(f"{where}.tool_calls[{i}]") for i, call in enumerate(self.tool_calls)]
        if self.role == "tool":
            plain["tool_call_id"] = self.tool_call_id
        return plain

    def _text(self, where: str) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        texts = []
        for position, part in enumerate(self.content):
            if part.type != "text" or part.text is None:
                field = f"{where}.content[{position}]"
                raise refused(field, f"{field} is of type {part.type!r}, but the models here read only text")
            texts.append(part.text)
        return "".join(texts)


class ChatRequest(Sampling):
    """Body of POST /v1/chat/completions."""

    REFUSED: ClassVar[dict[str, str]] = {
        **Sampling.REFUSED,
        "functions": "functions are an older form that is not supported: use tools",
        "audio": "audio is not supported",
    }

    messages: Annotated[Items[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[Items[ToolSpec], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: StrictBool | None = None
    functions: Items[Any] | None = None
    function_call: Any = None
    modalities: Items[str] | None = None
    audio: Any = None
    chat_template_kwargs: Annotated[JsonObject, at_most(MAX_VARIABLES)] | None = None
    """vLLM's extension: further variables of the chat template, such as `enable_thinking`."""
    prompt_cache_key: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """OpenAI's field, used as the name of the conversation: its cached data is deleted by that name."""
    continue_final_message: StrictBool | None = None
    """An extension: whether to continue the last message, the assistant's, rather than answer it."""

    def check(self) -> None:
        """Reject unsupported requests.

        Raises:
            ApiError: names the field.
        """
        super().check()
        if self.function_call not in (None, "none", "auto"):
            raise refused("function_call", "functions are an older form that is not supported: use tools")
        if taken := sorted(_RESERVED & (self.chat_template_kwargs or {}).keys()):
            raise refused("chat_template_kwargs", f"chat_template_kwargs can't set {taken[0]}: the request itself does")
        if self.modalities not in (None, ["text"]):
            raise refused("modalities", "modalities other than 'text' are not supported", code="unsupported_parameter")
        if self.top_logprobs is not None and not self.logprobs:
            raise refused("top_logprobs", "top_logprobs needs logprobs to be true")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise refused("max_tokens", "max_tokens and max_completion_tokens are both given and differ: give one")

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages, in the format of chat templates.

        Raises:
            ApiError: a message contains anything other than text and tool calls, or a result has no call.
        """
        messages = [message.plain(index) for index, message in enumerate(self.messages)]
        check_results(messages)
        return messages

    @property
    def tool_use(self) -> ToolUse:
        """The tools that the model may call.

        Raises:
            ApiError: two have one name, or the choice is not among them.
        """
        return chosen_tools(self.tools, self.tool_choice, self.parallel_tool_calls)

    def sampling(self) -> SamplingOptions:
        """Sampling options. Parsing a large schema takes a while: call it in a worker thread.

        Raises:
            ApiError: the answer format cannot be enforced.
        """
        form = answer_form(self.response_format, self.structured_outputs, self.tool_use)
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.options(self.max_completion_tokens or self.max_tokens, logprobs, form)


class CompletionRequest(Sampling):
    """Body of POST /v1/completions."""

    REFUSED: ClassVar[dict[str, str]] = {
        **Sampling.REFUSED,
        "echo": "echo is not supported: put the prompt in front yourself",
        "suffix": "suffix is not supported",
    }

    prompt: str | Items[str] | Tokens | Items[Tokens]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: int | None = None
    echo: StrictBool | None = None
    suffix: str | None = None

    def check(self) -> None:
        """Reject unsupported requests.

        Raises:
            ApiError: names the field.
        """
        super().check()
        if self.best_of not in (None, 1):
            raise refused("best_of", "this server gives one answer to a request: leave best_of out")

    @property
    def single_prompt(self) -> str | list[int]:
        """The prompt: a text, or tokens.

        Raises:
            ApiError: there are several, or none.
        """
        if isinstance(self.prompt, str):
            return self.prompt
        if self.prompt and isinstance(self.prompt[0], int):
            return [token for token in self.prompt if isinstance(token, int)]
        if len(self.prompt) != 1 or isinstance(self.prompt[0], int):
            raise refused("prompt", f"prompt holds {len(self.prompt)} prompts: ask for one completion in a request")
        return self.prompt[0]

    def sampling(self) -> SamplingOptions:
        """Sampling options; see `ChatRequest.sampling`."""
        form = answer_form(None, self.structured_outputs)
        return self.options(self.max_tokens or COMPLETION_TOKENS, self.logprobs, form)

"""Validation of OpenAI requests: errors name wrong types, ranges and unsupported fields.

Unknown fields are ignored, as OpenAI does. Known fields that would change the answer but are not supported (several
answers, other servers' samplers, ...) are rejected rather than silently ignored; other servers' names of what is
supported are understood.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, model_validator
from pydantic_core import PydanticCustomError

from runtime.server.bodies import Items, JsonObject, Tokens, at_most, read_object, refused
from runtime.server.openai.forms import (
    MAX_GRAMMAR,
    MAX_TOOLS,
    AnswerForm,
    CalledTool,
    LeftOut,
    Part,
    ResponseFormat,
    StructuredOutputs,
    ToolChoice,
    ToolSpec,
    ToolUse,
    answer_form,
    chosen_tools,
    known_tools,
)
from runtime.text.reasoning import TAGS
from runtime.text.sampling import MAX_PENALTY, MIN_PENALTY, SamplingOptions

COMPLETION_TOKENS = 16
"""Default length of a plain completion, as in OpenAI's interface."""
MAX_SEED = 2**63
MAX_COUNT = 2**31 - 1
MAX_BIASES, MAX_DIGITS = 1024, 10
MAX_VARIABLES = 32
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
Bias = Annotated[float, Field(ge=-100, le=100)]
Stops = Annotated[str, Field(min_length=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Effort = Annotated[str, Field(max_length=100)]
_NOTHING: tuple[Any, ...] = (None, [], {}, "", False)
_NO_THOUGHT = ("none", "minimal")
"""Efforts at which a model that can is told not to reason."""
_ALIASES = {"repeat_penalty": "repetition_penalty", "n_predict": "max_tokens"}
"""Other servers' names of fields."""
_FORMS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
}
"""Other servers' fields of an answer's form, and those of `structured_outputs`."""
_DECIDING = ("structured_outputs", "response_format")
_OTHERS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("allowed_token_ids", "bad_words", "samplers", "chat_template", "web_search_options"), ()),
    **dict.fromkeys(("ignore_eos", "use_beam_search", "early_stopping", "stop_token_ids", "documents"), ()),
    **dict.fromkeys(("include_stop_str_in_output", "prompt_logprobs", "n_probs", "truncate_prompt_tokens"), ()),
    **dict.fromkeys(("min_tokens", "mirostat", "dynatemp_range", "dry_multiplier", "xtc_probability", "top_a"), ()),
    **dict.fromkeys(("length_penalty", "typical_p", "tfs_z", "best_of", "skip_special_tokens"), (1,)),
}
"""Other servers' fields that would change the answer and are not supported, with the values that ask for nothing."""
TEXTS = frozenset({"text", "input_text", "output_text"})
"""Types of parts that hold text."""
THOUGHTS = ("thinking", "reasoning")
"""Words in the types of parts that are no part of the conversation."""
MEDIA = ("image", "audio", "video", "file", "document")
"""Words in the types of parts that are asked about and can't be read."""


def _whole(given: object) -> object:
    """12.0 is 12: some languages write every number like that."""
    return int(given) if isinstance(given, float) and given.is_integer() else given


def _unlimited(given: object) -> object:
    """-1 is no limit, as in llama.cpp and vLLM."""
    return MAX_COUNT if given == -1 else _whole(given)


def _all(given: object) -> object:
    """-1 is all tokens, as in vLLM."""
    return 0 if given == -1 else _whole(given)


def _token_id(given: str) -> str:
    if not (given.isascii() and given.isdecimal() and len(given) <= MAX_DIGITS):
        raise PydanticCustomError("token_id", 'The keys are ids of tokens, such as "42"')
    return given


def _stops(given: object) -> object:
    """An empty text stops nothing."""
    if isinstance(given, list):
        return [one for one in given if one != ""]
    return given or None if isinstance(given, str) else given


TokenId = Annotated[str, AfterValidator(_token_id)]
Whole = BeforeValidator(_whole)
Limit = Annotated[int, Field(ge=1, le=MAX_COUNT), BeforeValidator(_unlimited)]
Count = Limit | None


def effort_variables(effort: str | None) -> dict[str, Any]:
    """The variables of chat templates that an effort sets; see `runtime.text.reasoning.switch`."""
    if effort is None:
        return {}
    thinking = {"enable_thinking": False, "thinking": False} if effort in _NO_THOUGHT else {"thinking": True}
    return {"reasoning_effort": effort, **thinking}


class Reasoning(Part):
    """Options of the model's reasoning."""

    effort: Effort | None = None
    max_tokens: Annotated[Annotated[int, Field(ge=0, le=MAX_COUNT)] | None, BeforeValidator(_unlimited)] = None
    """An extension, as in OpenRouter's interface: most tokens of reasoning, after which it is ended."""


class StreamOptions(Part):
    """Options of a stream."""

    include_usage: StrictBool | None = None


class Sampling(Part):
    """Fields shared by both kinds of request: OpenAI's, and top_k, min_p, repetition_penalty."""

    REFUSED: ClassVar[dict[str, str]] = {}
    """Fields that must be absent or neutral, and the error messages if not."""

    model: Annotated[str, Field(min_length=1, max_length=300)]
    n: Annotated[int | None, Whole] = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Annotated[int, Field(ge=0, le=MAX_COUNT)] | None, BeforeValidator(_all)] = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=MIN_PENALTY, le=MAX_PENALTY)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenId, Bias], at_most(MAX_BIASES)] | None = None
    seed: Annotated[Annotated[int, Field(ge=-MAX_SEED, lt=MAX_SEED)] | None, Whole] = None
    stop: Annotated[Stops | Annotated[Items[Stops], Field(max_length=15)] | None, BeforeValidator(_stops)] = None
    max_tokens: Count = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    """vLLM's extension: the answer format."""

    @model_validator(mode="before")
    @classmethod
    def _other_names(cls, given: Any) -> Any:
        """Translate other servers' fields, and refuse those that are not supported.

        Raises:
            ApiError: names the field.
        """
        if not isinstance(given, dict):
            return given
        for field, neutral in _OTHERS.items():
            value = given.get(field)
            if value not in (*_NOTHING, *neutral):
                raise refused(field, f"{field} is not supported: leave it out", code="unsupported_parameter")
        changed = {name: given[other] for other, name in _ALIASES.items() if given.get(other) is not None}
        if given.get("reasoning_format") == "none" or given.get("separate_reasoning") is False:
            changed["reasoning_in_content"] = True
        if given.get("thinking_token_budget") is not None:  # vLLM's
            changed["reasoning"] = {"max_tokens": given["thinking_token_budget"]}
        forms = {other: given[other] for other in _FORMS if given.get(other) not in _NOTHING}
        if forms:
            changed["structured_outputs"] = {_FORMS[other]: _form(other, value) for other, value in forms.items()}
        wanted = given.get("response_format")
        if (form := given.get("format")) not in _NOTHING:  # Ollama's
            wanted = {"type": "json_object"} if form == "json" else {"type": "json_object", "schema": form}
            forms["format"] = form
        if len({*forms, *(field for field in _DECIDING if given.get(field) not in _NOTHING)}) > 1 and forms:
            fields = [*(field for field in _DECIDING if given.get(field) not in _NOTHING), *forms]
            raise refused(fields[1], f"{' and '.join(fields)} both decide the form of the answer: give one")
        if (
            isinstance(wanted, dict) and wanted.get("type") != "text" and wanted.get("schema") is not None
        ):  # llama.cpp's
            schema = {"schema": wanted["schema"], "name": wanted.get("name")}
            wanted = {"type": "json_schema", "json_schema": schema}
        return {
            **given,
            "response_format": wanted,
            **{name: value for name, value in changed.items() if name not in given},
        }

    @property
    def stops(self) -> tuple[str, ...]:
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

    @property
    def left_open(self) -> frozenset[str]:
        """Sampling options that the request leaves to the model."""
        names = (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
        return frozenset(name for name in names if getattr(self, name) is None)

    def options(
        self, max_tokens: int | None, logprobs: int | None, form: AnswerForm, thought_tokens: int | None = None
    ) -> SamplingOptions:
        """Sampling options. Defaults are OpenAI's: temperature 1, top_p 1; `left_open` says which they are."""
        top_p = 1.0 if self.top_p is None else self.top_p
        return SamplingOptions(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=1 if top_p == 0 else self.top_k or 0,
            top_p=top_p or 1.0,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items()),
            seed=self.seed,
            max_tokens=max_tokens,
            thought_tokens=thought_tokens,
            stop=self.stops,
            logprobs=logprobs,
            **form,
        )


def _form(field: str, value: Any) -> Any:
    """The form of an answer in another server's field, as `structured_outputs` has it.

    Raises:
        ApiError: it is a grammar that can't be read.
    """
    if field == "guided_json" and isinstance(value, str):
        return read_object(value.encode())
    if "grammar" in field and isinstance(value, str) and len(value) <= MAX_GRAMMAR:
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            return any_to_lark(value)
        except Exception as error:  # a grammar may break its reader in any way
            raise refused(field, f"{field} is neither a GBNF nor a Lark grammar: {error}") from error
    return value


class ContentPart(Part):
    """A part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, given: Any) -> Any:
        return {"type": "text", "text": given} if isinstance(given, str) else given


def joined(
    content: str | Sequence[ContentPart] | None,
    where: str,
    left_out: LeftOut,
    *,
    last: bool = False,
    skip: Collection[str] = (),
) -> str:
    """The text of a content: parts are separate lines. What else it holds is left out.

    Args:
        content: Of a message or a result.
        where: Its place in the request.
        left_out: Receives what is left out.
        last: Whether it is what is asked: an answer that ignores its picture is worse than none.
        skip: Types of parts that are read elsewhere.

    Raises:
        ApiError: it is asked about something that is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for position, part in enumerate(content):
        field = f"{where}[{position}]"
        if part.type in skip:
            continue
        text = part.text if part.type in TEXTS else part.refusal
        if text is not None:
            texts.append(text)
        elif part.type in TEXTS:
            raise refused(f"{field}.text", f"{field}.text is missing: give a text")
        elif last and any(word in part.type for word in MEDIA):
            raise refused(field, f"{field} is of type {part.type!r}, but the models here read only text")
        else:
            left_out.append(f"{field} ({part.type})")
            if not any(word in part.type for word in THOUGHTS):
                texts.append(f"[{part.type} left out]")
    return "\n".join(texts)


class Message(Part):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Items[ContentPart] | None = None
    name: str | None = None
    tool_calls: Items[CalledTool] | None = None
    tool_call_id: str | None = None
    function_call: JsonObject | None = None
    refusal: str | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    """As `reasoning_content`, in other servers' answers."""

    def plain(self, index: int, left_out: LeftOut, *, last: bool) -> dict[str, Any]:
        """Role, text and tool calls, in the format of chat templates.

        Raises:
            ApiError: the message contains what can't be used.
        """
        where = f"messages[{index}]"
        if self.role == "function" or self.function_call:
            message = f"{where}: functions are an older form that is not supported: use tools"
            raise refused(where, message, code="unsupported_parameter")
        if self.tool_calls and self.role != "assistant":
            raise refused(f"{where}.tool_calls", f"{where}.tool_calls: only an assistant's message calls tools")
        plain: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": joined(self.content or self.refusal, f"{where}.content", left_out, last=last),
        }
        thought = self.reasoning_content or self.reasoning
        if self.role == "assistant" and isinstance(thought, str) and thought:
            plain["reasoning_content"] = thought
        if self.tool_calls:
            plain["tool_calls"] = [call.record() for call in self.tool_calls]
        if self.role == "tool":
            plain |= {"tool_call_id": self.tool_call_id, "name": self.name}
        return plain


class ChatRequest(Sampling):
    """Body of POST /v1/chat/completions."""

    REFUSED: ClassVar[dict[str, str]] = {
        "functions": "functions are an older form that is not supported: use tools",
        "audio": "audio is not supported",
    }

    messages: Annotated[Items[Message], Field(min_length=1)]
    max_completion_tokens: Count = None
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    """As in Responses."""
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
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
    end_loops: StrictBool | None = None
    """An extension: whether an answer that only repeats itself ends, with `loop` as its `finish_reason`."""
    reasoning_in_content: StrictBool | None = None
    """An extension: whether reasoning stays in the answer's text, between its tags."""

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
    def resumes(self) -> bool:
        """Whether the last message is continued rather than answered."""
        return bool(self.continue_final_message)

    @property
    def conversation(self) -> tuple[list[dict[str, Any]], LeftOut]:
        """The messages in the format of chat templates, and what of messages and tools is left out.

        Raises:
            ApiError: a message contains what can't be used.
        """
        left_out = known_tools(self.tools)[1]
        asked = max((index for index, message in enumerate(self.messages) if message.role == "user"), default=-1)
        messages = [message.plain(index, left_out, last=index == asked) for index, message in enumerate(self.messages)]
        if self.resumes and "reasoning_content" in (last := messages[-1]) and not last["content"]:
            last["content"] = f"{TAGS[0]}\n{last.pop('reasoning_content')}"
        return messages, left_out

    @property
    def tool_use(self) -> ToolUse:
        """The tools that the model may call.

        Raises:
            ApiError: the choice is not among them.
        """
        return chosen_tools(known_tools(self.tools)[0], self.tool_choice, self.parallel_tool_calls)

    @property
    def variables(self) -> dict[str, Any]:
        """Further variables of the chat template."""
        effort = self.reasoning_effort or (self.reasoning.effort if self.reasoning is not None else None)
        return {**effort_variables(effort), **(self.chat_template_kwargs or {})}

    def sampling(self) -> SamplingOptions:
        """Sampling options. Parsing a large schema takes a while: call it in a worker thread.

        Raises:
            ApiError: the answer format cannot be enforced.
        """
        form = answer_form(self.response_format, self.structured_outputs, self.tool_use)
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        budget = self.reasoning.max_tokens if self.reasoning is not None else None
        options = self.options(self.max_completion_tokens or self.max_tokens, logprobs, form, budget)
        return replace(options, end_loops=bool(self.end_loops))


class CompletionRequest(Sampling):
    """Body of POST /v1/completions."""

    REFUSED: ClassVar[dict[str, str]] = {
        "suffix": "suffix is not supported",
    }

    prompt: str | Items[str] | Tokens | Items[Tokens]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: StrictBool | None = None
    """Whether to score the prompts: log-probabilities of their tokens, and at most one token more."""
    max_tokens: Annotated[Annotated[int, Field(ge=0, le=MAX_COUNT)] | None, BeforeValidator(_unlimited)] = None
    suffix: str | None = None

    def check(self) -> None:
        super().check()
        if not self.echo:
            if self.max_tokens == 0:
                raise refused("max_tokens", "max_tokens is 0: give at least 1, or echo to score the prompt")
        elif self.max_tokens not in (0, 1):
            raise refused("echo", "echo scores a prompt and answers with one token at most: give max_tokens 0 or 1")
        elif self.stream or answer_form(self.response_format, self.structured_outputs):
            field = "stream" if self.stream else "response_format"
            raise refused("echo", f"echo scores a prompt, at once and in no other form: leave {field} out")
        elif not self.prompts:
            raise refused("prompt", "prompt holds no prompt: give one, or several")

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts: texts, or tokens."""
        given: Any = self.prompt  # its first member shows which type it has
        return [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)

    @property
    def single_prompt(self) -> str | list[int]:
        """The only prompt.

        Raises:
            ApiError: there are several, or none.
        """
        found = self.prompts
        if len(found) != 1:
            raise refused("prompt", f"prompt holds {len(found)} prompts: ask for one completion in a request")
        return found[0]

    def sampling(self) -> SamplingOptions:
        form = answer_form(self.response_format, self.structured_outputs)
        return self.options(self.max_tokens or COMPLETION_TOKENS, self.logprobs, form)

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel
from starlette.requests import Request

from runtime.server import reading
from runtime.server.errors import ApiError
from runtime.server.openai.embeddings import EmbeddingsRequest
from runtime.server.openai.requests import ChatRequest, CompletionRequest
from runtime.server.openai.response_requests import ResponsesRequest
from runtime.server.reading import Reader, parse

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "m", "prompt": "hi"}


def read_chat(body: dict[str, Any]) -> ChatRequest:
    request = parse(json.dumps(body).encode(), ChatRequest)
    request.check()
    assert request.conversation
    request.sampling()
    return request


def read_completion(body: dict[str, Any]) -> CompletionRequest:
    request = parse(json.dumps(body).encode(), CompletionRequest)
    request.check()
    assert request.single_prompt is not None
    request.sampling()
    return request


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
STRICT_TOOL = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"uniqueItems": True}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BROKEN_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}
DEEP_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
JSON = {"type": "json_object"}


def schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi", **fields}]}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"model": 3}, "model"),
        ({"model": ""}, "model"),
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        (message(role="robot"), "messages[0].role"),
        (message(role=1), "messages[0].role"),
        (message(content=3), "messages[0].content"),
        (message(content=None), "messages[0].content"),
        (message(content=[{"type": "text", "text": 3}]), "messages[0].content[0].text"),
        (message(content=[{"text": "a"}]), "messages[0].content[0].type"),
        (message(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0]"),
        (message(role="tool", tool_call_id="1"), "messages[0].tool_call_id"),
        (message(role="function", name="f"), "messages[0]"),
        (message(role="assistant", tool_calls=[{"id": "1"}]), "messages[0].tool_calls[0].function"),
        (message(role="user", tool_calls=[CALL]), "messages[0].tool_calls"),
        (message(role="assistant", tool_calls=[BROKEN_CALL]), "messages[0].tool_calls[0]"),
        (message(role="assistant", tool_calls=[DEEP_CALL]), "messages[0].tool_calls[0]"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": "x"}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop": 3}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", 3]}, "stop[1]"),
        ({"stop": ["x"] * 16}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream": True, "stream_options": 3}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"n": 2}, "n"),
        ({"n": 0}, "n"),
        ({"n": "one"}, "n"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools[0].function.parameters"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [STRICT_TOOL], "tool_choice": "required"}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": schema({"type": "nonsense"})}, "response_format"),
        ({"response_format": schema({"type": "string", "format": 3})}, "response_format"),
        ({"response_format": JSON, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"response_format": JSON, "tools": [TOOL], "tool_choice": "required"}, "tools"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: " + "a" * 16_384}}, "structured_outputs.grammar"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"5": 100}}, "logit_bias"),
        ({"continue_final_message": 1}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": "none"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": ["enable_thinking"]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {str(at): at for at in range(33)}}, "chat_template_kwargs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_in_a_chat_request_is_named(change: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as failure:
        read_chat({**CHAT, **change})
    assert failure.value.status == 400
    assert failure.value.record.param == param
    assert failure.value.record.type == "invalid_request_error"
    wrong = failure.value.record.message
    assert param.split("[")[0].split(".")[0] in wrong or "tools" in wrong or "cannot be enforced" in wrong


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": 3}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, 2, "x"]}, "prompt[2]"),
        ({"prompt": [1, 10**30]}, "prompt[1]"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"n": 3}, "n"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_in_a_completion_request_is_named(change: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as failure:
        read_completion({**COMPLETION, **change})
    assert (failure.value.status, failure.value.record.param) == (400, param)


@pytest.mark.parametrize("field", ["model", "messages"])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(ApiError, match=f"{field} is missing") as failure:
        read_chat({key: value for key, value in CHAT.items() if key != field})
    assert failure.value.record.code == "missing_required_parameter"


@pytest.mark.parametrize(
    "change",
    [
        {"unknown": {"deep": [1]}, "store": True, "metadata": {"a": "b"}, "service_tier": "auto"},
        {"n": 1, "tools": [], "tool_choice": "none", "functions": None, "parallel_tool_calls": True},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "user": "me"},
        {"response_format": {"type": "text"}, "modalities": ["text"]},
        {"temperature": 0, "top_p": 1, "seed": -1, "stop": None, "max_tokens": None, "stream": None},
        {"temperature": 2.0, "stop": [], "max_tokens": 5, "max_completion_tokens": 5},
        {"logprobs": False, "top_logprobs": None, "stream_options": None},
        message(name="me", unknown=3),
        message(content=[{"type": "text", "text": "a", "cache_control": {}}]),
        message(content=""),
    ],
)
def test_what_does_no_harm_is_accepted(change: dict[str, Any]) -> None:
    read_chat({**CHAT, **change})


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b'{"a": NaN}', b'{"a": "\\ud800"}', b"[" * 100_000, b'{"a":1}x'],
    ids=str,
)
def test_a_body_that_is_no_json_object(body: bytes) -> None:
    with pytest.raises(ApiError) as failure:
        parse(body, ChatRequest)
    assert (failure.value.status, failure.value.record.code) == (400, "invalid_json")


def test_infinity_is_no_temperature() -> None:
    with pytest.raises(ApiError):
        parse(b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', ChatRequest)


@pytest.mark.parametrize("kind", [ChatRequest, ResponsesRequest])
def test_an_infinite_number_is_not_handed_on(kind: type[BaseModel]) -> None:
    """It could be written into no answer: the Responses interface repeats the tools."""
    flat = {**TOOL, **TOOL["function"], "parameters": {"a": [12345]}}
    body = {**CHAT, "input": "x", "tools": [{**flat, "function": flat}]}
    with pytest.raises(ApiError, match="finite"):
        parse(json.dumps(body).replace("12345", "1e999").encode(), kind)


REQUESTS = (ChatRequest, CompletionRequest, EmbeddingsRequest, ResponsesRequest)


def schemas(found: Any) -> Iterator[dict[str, Any]]:
    """A schema of pydantic's and all that are in it."""
    if isinstance(found, dict):
        if isinstance(found.get("type"), str):
            yield found
        found = list(found.values())
    if isinstance(found, list | tuple):
        for each in found:
            yield from schemas(each)


@pytest.mark.parametrize("kind", REQUESTS)
def test_every_list_is_bounded_and_read_up_to_its_first_mistake(kind: Any) -> None:
    """Else a request of a few megabytes makes an error of each item, which takes gigabytes."""
    lists = [schema for schema in schemas(kind.__pydantic_core_schema__) if schema["type"] == "list"]
    assert lists
    for schema in lists:
        assert (bool(schema.get("fail_fast")), bool(schema.get("max_length"))) == (True, True), schema


MANY = 100_000
ZEROS = json.dumps([0] * MANY)
NULLS = json.dumps([None] * MANY)
PAIRS = json.dumps({str(number): [] for number in range(MANY)})
LONG: dict[str, tuple[Any, str]] = {
    "messages": (ChatRequest, f'"messages": {ZEROS}'),
    "a message's parts": (ChatRequest, f'"messages": [{{"role": "user", "content": {ZEROS}}}]'),
    "a message's calls": (ChatRequest, f'"messages": [{{"role": "assistant", "tool_calls": {ZEROS}}}]'),
    "modalities": (ChatRequest, f'"messages": [{{"role": "user", "content": ""}}], "modalities": {ZEROS}'),
    "biases": (ChatRequest, f'"messages": [{{"role": "user", "content": ""}}], "logit_bias": {PAIRS}'),
    "prompts": (CompletionRequest, f'"prompt": {NULLS}'),
    "tokens": (CompletionRequest, f'"prompt": [{NULLS}]'),
    "inputs": (EmbeddingsRequest, f'"input": {NULLS}'),
    "items": (ResponsesRequest, f'"input": {ZEROS}'),
    "an item's parts": (ResponsesRequest, f'"input": [{{"role": "user", "content": {ZEROS}}}]'),
    "metadata": (ResponsesRequest, f'"input": "x", "metadata": {PAIRS}'),
}


@pytest.mark.parametrize("what", LONG)
def test_a_hundred_thousand_mistakes_take_the_memory_of_one(what: str) -> None:
    kind, fields = LONG[what]
    body = f'{{"model": "m", {fields}}}'.encode()
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as failure:
            parse(body, kind)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert failure.value.status == 400
    assert len(str(failure.value)) < 300
    assert peak < 30e6, f"{peak / 1e6:.0f} MB"


@pytest.mark.parametrize(
    ("items", "said"), [("[]", "lists and objects"), ('{"a":1}', "lists and objects"), ("1000", "values")]
)
def test_what_would_fill_the_memory_is_counted_before_it_is_made(items: str, said: str) -> None:
    count = reading.MAX_VALUES + 1 if said == "values" else reading.MAX_GROUPS + 1
    body = f'{{"model": "m", "unknown": [{",".join([items] * count)}]}}'.encode()
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match=f"at most .* {said}|{said}, but at most"):
            parse(body, ChatRequest)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 * len(body)


def test_what_stands_in_a_text_is_not_counted() -> None:
    text = r'[{,"\\",}]' * 100_000
    asked = parse(json.dumps({**COMPLETION, "prompt": text}).encode(), CompletionRequest)
    assert asked.single_prompt == text


async def test_large_bodies_are_read_beside_the_event_loop_and_one_by_one() -> None:
    reader, own, inside = Reader(), threading.get_ident(), []

    async def read(size: int) -> int:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b" " * size, "more_body": False}

        return await reader.read(Request({"type": "http", "headers": []}, receive), make)

    def make(body: bytes) -> int:
        inside.append(len(body))
        assert len(inside) == 1
        inside.clear()
        return threading.get_ident()

    assert await read(reading.LARGE_BYTES) == own
    assert own not in await asyncio.gather(*(read(reading.LARGE_BYTES + 1) for _ in range(4)))


def test_a_message_is_not_as_long_as_what_it_repeats() -> None:
    part = {"type": "x" * 1_000_000}
    with pytest.raises(ApiError) as failure:
        read_chat({**CHAT, **message(content=[part])})
    assert len(str(failure.value)) < 1100
    assert str(failure.value).startswith("messages[0].content[0] is of type")
    assert str(failure.value).endswith("the models here read only text")
    assert len(ApiError(400, "x", param="y" * 10_000).record.param or "") < 1100

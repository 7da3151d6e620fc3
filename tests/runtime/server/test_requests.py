from __future__ import annotations

import json
from typing import Any

import pytest

from runtime.server.errors import ApiError
from runtime.server.requests import ChatRequest, CompletionRequest, parse

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
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
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
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"5": 100}}, "logit_bias"),
        ({"continue_final_message": 1}, "continue_final_message"),
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

"""OpenAI's Responses interface, through the official client."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from fake_engine import FakeEngine, FakeHouse
from pydantic import BaseModel

from runtime.server.bodies import parse
from runtime.server.errors import ApiError
from runtime.server.openai.responses_api import ResponsesRequest
from runtime.text.constraint import Grammar
from tests.runtime.server.conftest import Standing

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ADD: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}


class Sum(BaseModel):
    total: int


def read(body: dict[str, Any]) -> None:
    asked = parse(json.dumps(body).encode(), ResponsesRequest)
    asked.check()
    assert asked.messages({})
    asked.sampling()


@pytest.fixture
def client(shared: Standing) -> openai.OpenAI:
    return shared.client


@pytest.fixture
def house(shared: Standing) -> FakeHouse:
    return shared.house


def test_a_text(client: openai.OpenAI, house: FakeHouse) -> None:
    answer = client.responses.create(
        model="small",
        instructions="Be brief.",
        input="echo a b",
        max_output_tokens=9,
        temperature=0.5,
        metadata={"k": "v"},
    )
    assert (answer.output_text, answer.status, answer.metadata) == ("a b", "completed", {"k": "v"})
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (5, 2, 7)
    assert answer.usage.input_tokens_details.cached_tokens == 2
    options = house.engine.options[-1]
    assert (options.temperature, options.max_tokens) == (0.5, 9)
    assert options.stop == ()
    empty = client.responses.create(model="small", input="echo")
    assert ([item.type for item in empty.output], empty.output_text) == (["message"], "")


def test_reasoning_is_an_item(client: openai.OpenAI, house: FakeHouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamed events make the same items; clients send them back."""
    monkeypatch.setattr(FakeEngine, "reasons", True)
    asked: Any = {"model": "small", "input": f"echo hm so </think> well {CALL}", "tools": [ADD]}
    whole = client.responses.create(**asked)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    thought: Any = whole.output[0]
    assert (thought.content[0].text, thought.summary, thought.status) == ("hm so ", [], "completed")
    assert whole.output_text == " well"
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens == 2
    events = list(client.responses.create(**asked, stream=True))
    told = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert told == "hm so "
    last: Any = events[-1]
    plain = {"id", "call_id"}
    assert [item.model_dump(exclude=plain) for item in last.response.output] == [
        item.model_dump(exclude=plain) for item in whole.output
    ]
    client.responses.create(model="small", input=[*last.response.output, {"role": "user", "content": "echo"}])
    assert house.engine.messages[0]["reasoning_content"] == "hm so"
    cut = client.responses.create(model="small", input="echo hm", max_output_tokens=1)
    assert [(item.type, getattr(item, "status", "")) for item in cut.output] == [("reasoning", "incomplete")]


def test_a_cut_text_is_incomplete(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="small", input="count 9", max_output_tokens=3)
    assert (answer.status, answer.output_text) == ("incomplete", "0 1 2")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    answer = client.responses.create(model="small", input=f"echo {CALL}", tools=[ADD], max_output_tokens=4)
    (call,) = answer.output
    assert (answer.status, call.type, call.status) == ("incomplete", "function_call", "incomplete")


def test_a_conversation_with_a_tool(client: openai.OpenAI, house: FakeHouse) -> None:
    first: Any = [{"role": "user", "content": [{"type": "input_text", "text": f"echo well {CALL}"}]}]
    asked = client.responses.create(model="small", input=first, tools=[ADD])
    message, call = asked.output
    assert (message.type, asked.output_text.strip()) == ("message", "well")
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
    assert [tool.name for tool in house.engine.tools] == ["add"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    items = [*first, *(item.model_dump() for item in asked.output), result, {"role": "user", "content": "echo done"}]
    assert client.responses.create(model="small", input=items, tools=[ADD]).output_text == "done"


def test_an_agents_request(client: openai.OpenAI, house: FakeHouse) -> None:
    """Tools of other kinds and what they leave behind, two system messages, an effort; shaped as coding agents ask."""
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": '}
    body = {
        "model": "small",
        "instructions": "You are an agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
            {"role": "user", "content": [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            call,
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "failed"}]},
            {"type": "local_shell_call", "call_id": "c2", "action": {"command": ["ls"]}, "status": "completed"},
            {"type": "local_shell_call_output", "call_id": "c2", "output": {"code": 0}},
            {"type": "custom_tool_call", "call_id": "c3", "name": "patch", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "call_id": "c3", "output": "done"},
            {"type": "reasoning", "encrypted_content": "x", "summary": []},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"role": "user", "content": "echo hi"},
        ],
        "tools": [ADD, {"type": "namespace", "name": "mcp__x", "tools": [ADD]}, {"type": "web_search"}],
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "store": False,
        "stream": True,
        "text": {"verbosity": "low"},
    }
    answer = httpx.post(f"{client.base_url}responses", json=body, headers={"Authorization": "Bearer x"})
    assert answer.status_code == 200
    assert '"hi"' in answer.text
    named = "tools[1] (namespace); tools[2] (web_search); input[9] (reasoning); input[10] (web_search_call)"
    assert answer.headers["X-Left-Out"] == named
    assert house.engine.variables == {"reasoning_effort": "low", "thinking": True}
    assert [tool.name for tool in house.engine.tools] == ["add"]
    messages, _ = parse(json.dumps(body).encode(), ResponsesRequest).messages({})
    assert [message["role"] for message in messages] == [
        *("system", "system", "user", "assistant", "tool", "assistant", "tool", "assistant", "tool", "user")
    ]
    assert messages[2]["content"] == "one\ntwo"
    assert messages[3]["reasoning_content"] == "hm"
    called = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    assert called == [
        {"name": "add", "arguments": {}},
        {"name": "local_shell", "arguments": {"command": ["ls"]}},
        {"name": "patch", "arguments": {"arguments": "*** Begin"}},
    ]
    assert [message["content"] for message in messages if message["role"] == "tool"] == [
        "failed",
        '{"code": 0}',
        "done",
    ]


def test_answers_can_be_referred_to(client: openai.OpenAI) -> None:
    """Clients that believe answers to be stored send references instead of what was said."""
    first = client.responses.create(model="small", input="echo a b c")
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    again: Any = [{"role": "user", "content": "x"}, reference, {"role": "user", "content": "echo so"}]
    answer = client.responses.with_raw_response.create(model="small", input=again)
    assert "X-Left-Out" not in answer.headers
    assert answer.parse().usage.input_tokens == 6
    again[1] = {"type": "item_reference", "id": "msg_unknown"}
    answer = client.responses.with_raw_response.create(model="small", input=again)
    assert answer.headers["X-Left-Out"] == "input[1] (item_reference)"


def test_events_of_a_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(model="small", input=f"echo well {CALL} {CALL}", tools=[ADD]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.done") == 3
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
    assert final.usage is not None


def test_the_lines_of_a_stream(client: openai.OpenAI) -> None:
    body = {"model": "small", "input": "echo a BREAK", "stream": True}
    text = httpx.post(f"{client.base_url}responses", json=body, headers={"Authorization": "Bearer x"}).text
    blocks = [block.split("\n") for block in text.strip().split("\n\n")]
    for name, data in blocks:
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert json.loads(blocks[-1][1].removeprefix("data: "))["error"]["message"].startswith("NaN")
    with pytest.raises(openai.APIError, match="NaN"):
        list(client.responses.create(model="small", input="echo a BREAK", stream=True))


def test_forms_of_the_answer(client: openai.OpenAI, house: FakeHouse) -> None:
    with pytest.raises(ValueError, match="Invalid JSON"):  # the scripted model says what it is told
        client.responses.parse(model="small", input="echo x", text_format=Sum)
    given = house.engine.options[-1].grammar
    assert given is not None
    assert given != Grammar.of_schema({"type": "object"})
    client.responses.create(model="small", input="echo x", text={"format": {"type": "json_object"}})
    assert house.engine.options[-1].grammar == Grammar.of_schema({"type": "object"})
    client.responses.create(model="small", input="echo x", tools=[ADD], tool_choice={"type": "function", "name": "add"})
    assert house.engine.options[-1].calls.required


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"type": "message"}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": ""}]}, "input[0]"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "no"}}}}, "text.format"),
        ({"tools": [{"type": "function", "name": 3}]}, "tools[0].name"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"temperature": 3}, "temperature"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_named(change: dict[str, Any], param: str) -> None:
    body = {"model": "m", "input": "hi", **change}
    with pytest.raises(ApiError) as failure:
        read(body)
    assert (failure.value.status, failure.value.record.param) == (400, param)


async def test_health_needs_no_token(serve: Callable[..., Any]) -> None:
    server = serve(token="secret")
    async with httpx.AsyncClient(base_url=server.url) as client:
        answer = await client.get("/health")
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/health", headers={"Host": "evil.example"})).status_code == 403

"""Anthropic's interface."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fake_engine import CONTEXT, FakeEngine, FakeHouse

from runtime.server.anthropic.requests import MessagesRequest
from runtime.server.errors import ApiError
from runtime.server.security import Security
from runtime.server.serve import create_app
from runtime.server.service import Service
from runtime.text.constraint import Grammar
from tests.runtime.server.conftest import wait_until

URL = "/v1/messages"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
THINKING = {"type": "enabled", "budget_tokens": 1024}


def asking(text: str = "echo a b c", **more: Any) -> dict[str, Any]:
    return {"model": "small", "max_tokens": 99, "messages": [{"role": "user", "content": text}], **more}


def read(**more: Any) -> MessagesRequest:
    return MessagesRequest.read(json.dumps(asking(**more)).encode())


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Data of a stream, whose events are named by its type."""
    found = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def assembled(told: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together from events."""
    message, blocks, written = dict(told[0]["message"]), [], list[str]()
    for event in told[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
            written.append("")
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            kind = delta.pop("type")
            if kind == "input_json_delta":
                written[-1] += delta["partial_json"]
            elif kind == "signature_delta":
                block |= delta
            else:
                block[block["type"]] += delta[block["type"]]
        elif event["type"] == "content_block_stop" and blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = json.loads(written[-1])
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    return message | {"content": blocks}


async def test_a_message(client: httpx.AsyncClient, house: FakeHouse) -> None:
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    sampling = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "stop_sequences": ["END", "STOP"]}
    answer = await client.post(URL, json=asking(system=system, metadata={"user_id": "x"}, **sampling))
    body = answer.json()
    assert body.pop("id").startswith("msg_")
    usage = {"input_tokens": 4, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2, "output_tokens": 3}
    content = [{"type": "text", "text": "a b c"}]
    ended = {"stop_reason": "end_turn", "stop_sequence": None, "usage": usage}
    assert body == {"type": "message", "role": "assistant", "model": "small", "content": content, **ended}
    options = house.engine.options[-1]
    assert (options.temperature, options.top_k, options.top_p, options.max_tokens) == (0.5, 7, 0.9, 99)
    assert options.stop == ("END", "STOP")


@pytest.mark.parametrize(
    ("text", "reason", "sequence"),
    [("echo a END b", "stop_sequence", "END"), ("count 9", "max_tokens", None)],
)
async def test_reasons_for_the_end(client: httpx.AsyncClient, text: str, reason: str, sequence: str | None) -> None:
    body = (await client.post(URL, json=asking(text, stop_sequences=["END"], max_tokens=5))).json()
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)


async def test_a_call_that_was_cut_is_not_to_be_run(client: httpx.AsyncClient) -> None:
    body = (await client.post(URL, json=asking(f"echo {CALL}", tools=[ADD], max_tokens=4))).json()
    assert (body["stop_reason"], body["content"][0]["input"]) == ("max_tokens", {})


async def test_events_of_a_stream(client: httpx.AsyncClient, house: FakeHouse) -> None:
    asked = asking(f"echo hm</think> well {CALL} {CALL}", tools=[ADD], thinking=THINKING)
    told = events(await client.post(URL, json={**asked, "stream": True}))
    kinds = [event["type"] for event in told if not event["type"].endswith("_delta")]
    block = ["content_block_start", "content_block_stop"]
    assert kinds == ["message_start", *block, *block, *block, *block, "message_stop"]
    assert told[-2]["type"] == "message_delta"
    message, whole = assembled(told), (await client.post(URL, json=asked)).json()
    assert house.engine.variables == {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}
    assert house.engine.options[-1].thought_tokens == 1024
    assert [one["type"] for one in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert (whole["content"][0]["thinking"], whole["content"][1]["text"]) == ("hm", " well")
    assert whole["content"][0]["signature"]
    assert (whole["stop_reason"], whole["content"][2]["input"]) == ("tool_use", {"a": 1})
    for one in (message, whole):
        one.pop("id")
        for call in one["content"][2:]:
            assert call.pop("id").startswith("toolu_")
    assert message == whole


@pytest.mark.parametrize(
    ("thinking", "effort", "told"),
    [
        (None, None, {"enable_thinking": False, "thinking": False, "reasoning_effort": "low"}),
        ({"type": "disabled"}, None, {"enable_thinking": False, "thinking": False, "reasoning_effort": "low"}),
        (THINKING, "medium", {"enable_thinking": True, "thinking": True, "reasoning_effort": "medium"}),
        ({"type": "adaptive"}, "low", {"reasoning_effort": "low"}),
    ],
)
def test_thinking_sets_the_templates_variables(thinking: Any, effort: str | None, told: dict[str, Any]) -> None:
    assert read(thinking=thinking, output_config={"effort": effort}).variables == told


async def test_thinking_that_was_not_asked_for_is_left_out(client: httpx.AsyncClient) -> None:
    body = (await client.post(URL, json=asking("echo <think> hm </think> yes"))).json()
    assert body["content"] == [{"type": "text", "text": " yes"}]


def test_a_conversation() -> None:
    """As a coding agent sends it back."""
    result = [{"type": "text", "text": "22"}, {"type": "image", "source": {}}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Well."},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
                {"type": "tool_use", "id": "c2", "name": "add", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": result},
                {"type": "tool_result", "tool_use_id": "c2", "content": "no", "is_error": True},
                {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c3"}]},
    ]
    told, left_out = read(messages=messages, system="Be brief.").conversation
    called = [
        {"id": f"c{at}", "type": "function", "function": {"name": "add", "arguments": given}}
        for at, given in ((1, {"a": 1}), (2, {}))
    ]
    assert told == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "Well.", "reasoning_content": "hm", "tool_calls": called},
        {"role": "tool", "tool_call_id": "c1", "content": "22\n[image left out]"},
        {"role": "tool", "tool_call_id": "c2", "content": "Error: no"},
        {"role": "user", "content": "go on"},
        {"role": "assistant", "content": "Done."},
        {"role": "tool", "tool_call_id": "c3", "content": ""},
    ]
    assert left_out == ["messages[1].content[1] (redacted_thinking)", "messages[2].content[0].content[1] (image)"]


def test_a_line_that_differs_in_every_request_does_not_reach_the_prompt() -> None:
    """Else nothing of the system message would be found in the cache."""
    line = "x-anthropic-billing-header: cc_version=2.1; cch={};"
    stays = {"type": "text", "text": "You are an agent."}
    forms = [
        [{"type": "text", "text": line.format("1a2b")}, stays],
        [{"type": "text", "text": f"{line.format('3c4d')}\nYou are an agent."}],
        f"{line.format('5e6f')}\nYou are an agent.",
    ]
    told = [read(system=system).conversation for system in forms]
    assert all(messages == read(system=[stays]).conversation[0] for messages, _ in told)
    assert {*map(tuple, (left_out for _, left_out in told))} == {("system[0] (x-anthropic-billing-header)",)}


def test_a_document_of_text_is_read() -> None:
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "A poem."}}
    messages = [{"role": "user", "content": [document, {"type": "text", "text": "Who wrote it?"}]}]
    assert read(messages=messages).conversation[0] == [{"role": "user", "content": "A poem.\nWho wrote it?"}]


async def test_an_answer_that_was_begun_is_continued(client: httpx.AsyncClient, house: FakeHouse) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "echo so"}]
    body = (await client.post(URL, json=asking(messages=messages))).json()
    assert body["content"] == [{"type": "text", "text": "so"}]
    assert house.engine.trims == [False]
    assert not read(messages=[{"role": "assistant", "content": [{"type": "tool_use", "name": "add"}]}]).resumes


@pytest.mark.parametrize(
    ("choice", "names", "required", "several"),
    [
        (None, ["add", "sub"], False, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ["add", "sub"], False, False),
        ({"type": "any"}, ["add", "sub"], True, True),
        ({"type": "tool", "name": "sub"}, ["sub"], True, True),
        ({"type": "none"}, [], False, True),
    ],
)
def test_tools(choice: Any, names: list[str], required: bool, several: bool) -> None:
    tools = [ADD, {"type": "web_search_20250305", "name": "web_search"}, {**ADD, "name": "sub", "type": "custom"}]
    asked = read(tools=tools, tool_choice=choice)
    use = asked.tool_use
    assert ([tool.name for tool in use.tools], use.required) == (names, required)
    assert use.several or not several
    assert asked.conversation[1] == ["tools[1] (web_search_20250305)"]
    assert all(tool.parameters == SCHEMA and tool.description == "Adds." for tool in use.tools)


def test_the_format_of_an_answer() -> None:
    asked = read(output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert asked.sampling().grammar == Grammar.of_schema(SCHEMA)


async def test_tokens_are_counted_without_answering(client: httpx.AsyncClient, house: FakeHouse) -> None:
    asked = asking(system="Be brief.", tools=[ADD])
    del asked["max_tokens"]
    assert (await client.post(f"{URL}/count_tokens", json=asked)).json() == {"input_tokens": 6}
    assert [tool.name for tool in house.engine.tools] == ["add"]
    assert house.engine.options == []


PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: "),
        ({"messages": [{"role": "user", "content": [PICTURE]}]}, "messages[0].content[0] is of type 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0] is of type 'doc"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text is missing"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].name is"),
        ({"system": [{"type": "text", "text": 3}]}, "system[0].text: "),
        ({"stop_sequences": ["x"] * 16}, "stop_sequences: "),
        ({"temperature": 3}, "temperature: "),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name is missing"),
        ({"tools": [{**ADD, "input_schema": {"uniqueItems": True}, "strict": True}]}, "tools: "),
        ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice names x"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is required"),
        ({"thinking": {"type": "much"}}, "thinking.type: "),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is missing"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "no"}}}},
            "output_config.format: ",
        ),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers is not supported"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_is_wrong_is_named(client: httpx.AsyncClient, change: dict[str, Any], said: str) -> None:
    answer = await client.post(URL, json=asking(**change))
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert error["error"]["message"].startswith(said)


async def test_errors_have_their_types(service: Service) -> None:
    app = create_app(service, Security(token="secret", max_body_bytes=2000))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://127.0.0.1", headers={"x-api-key": "secret"}
    ) as to:
        answers = [
            (401, "authentication_error", await to.post(URL, json=asking(), headers={"x-api-key": "x"})),
            (403, "permission_error", await to.post(URL, json=asking(), headers={"Origin": "https://evil.example"})),
            (404, "not_found_error", await to.post(URL, json=asking(model="gone"))),
            (404, "not_found_error", await to.post(f"{URL}/batches", json={})),
            (405, "not_found_error", await to.get(URL)),
            (413, "request_too_large", await to.post(URL, json=asking("x" * 3000))),
            (503, "api_error", await to.post(URL, json=asking(model="broken"))),
            (500, "api_error", await to.post(URL, json=asking("break"))),
            (400, "invalid_request_error", await to.post(URL, json=asking("x " * CONTEXT))),
        ]
        service._max_waiting = 0
        answers.append((529, "overloaded_error", await to.post(URL, json=asking())))
    for status, kind, answer in answers:
        assert (answer.status_code, answer.json()["type"], answer.json()["error"]["type"]) == (status, "error", kind)
    assert answers[-2][2].json()["error"]["message"].startswith("prompt is too long")  # by which agents know it


async def test_an_error_within_a_stream_is_an_event(client: httpx.AsyncClient) -> None:
    told = events(await client.post(URL, json=asking("echo a BREAK", stream=True)))
    assert told[-1]["type"] == "error"
    assert told[-1]["error"]["message"].startswith("NaN")


async def test_a_stream_that_waits_pings(service: Service, house: FakeHouse) -> None:
    app = create_app(service, Security(), ping_s=0.05)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as to:
        await to.post(URL, json=asking())
        house.engine.prefill_gate.clear()
        waiting = asyncio.create_task(to.post(URL, json=asking(stream=True)))
        await asyncio.sleep(0.3)
        house.engine.prefill_gate.set()
        kinds = [event["type"] for event in events(await waiting)]
    assert kinds[:2] == ["message_start", "ping"]


async def test_the_key_opens_the_public_interface_only(service: Service) -> None:
    security = Security(token="secret", management_token="secret")
    transport = httpx.ASGITransport(create_app(service, security))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as to:
        tries = [("/v1/models", [b"secret"]), ("/v1/models", [b"secret"] * 2), ("/runtime/status", [b"secret"])]
        statuses = [
            (await to.get(path, headers=[(b"x-api-key", key) for key in keys])).status_code for path, keys in tries
        ]
    assert statuses == [200, 401, 401]


def test_hanging_up_cancels(serve: Callable[..., Any], house: FakeHouse) -> None:
    with httpx.stream("POST", f"{serve().url}{URL}", json=asking("slow 190", stream=True)) as answer:
        next(line for line in answer.iter_lines() if "text_delta" in line)
    wait_until(lambda: house.engine.cancellations == 1)


async def test_a_template_that_begins_the_reasoning(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "reasons", True)
    asked = asking("echo hm </think> yes", thinking={"type": "adaptive"})
    content = (await client.post(URL, json=asked)).json()["content"]
    assert [block["type"] for block in content] == ["thinking", "text"]


def test_an_error_names_a_field_as_the_request_does() -> None:
    with pytest.raises(ApiError) as failure:
        read(stop_sequences=[3])
    assert failure.value.record.param == "stop_sequences[0]"

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fake_engine import CONTEXT, FakeHouse
from starlette.types import ASGIApp

from runtime.errors import RequestError
from runtime.server.bodies import sse
from runtime.server.security import Security
from runtime.server.serve import create_app
from runtime.server.service import Service

TIMINGS = {
    "k_chunk",
    "slowdown_percent",
    "prompt_slowdown_percent",
    "speculation",
    "ttft_s",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
}


def chat(text: str = "echo a b c", **more: Any) -> dict[str, Any]:
    return {"model": "small", "messages": [{"role": "user", "content": text}], **more}


def events(response: httpx.Response) -> list[Any]:
    """Data of a stream, each block checked to be one event."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop().strip() == ""
    found = []
    for block in blocks:
        lines = block.strip("\n").split("\n")
        assert len(lines) == 1
        if lines[0].startswith(":"):
            continue
        assert lines[0].startswith("data: ")
        data = lines[0].removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


async def both_ways(client: httpx.AsyncClient, asked: dict[str, Any]) -> dict[str, Any]:
    """The message of an answer; checked to be the same as a stream's."""
    whole: dict[str, Any] = (await client.post("/v1/chat/completions", json=asked)).json()["choices"][0]["message"]
    *chunks, _ = events(await client.post("/v1/chat/completions", json={**asked, "stream": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    for name in ("content", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == whole.get(name, "")
    return whole


async def test_models(client: httpx.AsyncClient) -> None:
    body = (await client.get("/v1/models")).json()
    assert body["object"] == "list"
    model = next(model for model in body["data"] if model["id"] == "small")
    own = {"id": "small", "object": "model", "created": 1700000000, "owned_by": "lowbit-chat"}
    own |= {"type": "model", "display_name": "small", "created_at": "2023-11-14T22:13:20+00:00"}
    assert model == own | {"certificate": "k_chunk 16: KL 0.151 nats a token"}
    assert body["data"][0]["id"] != "demo"
    await client.post("/v1/chat/completions", json={"model": "demo", "messages": [{"role": "user", "content": "hi"}]})
    assert (await client.get("/v1/models")).json()["data"][0]["id"] == "demo", "many clients take the first one"


async def test_one_model(client: httpx.AsyncClient) -> None:
    for name in ("small", "org/other"):
        response = await client.get(f"/v1/models/{name}")
        assert (response.status_code, response.json()["id"]) == (200, name)
    response = await client.get("/v1/models/nowhere")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_chat_as_a_whole(client: httpx.AsyncClient, house: FakeHouse) -> None:
    response = await client.post("/v1/chat/completions", json=chat())
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "small"
    assert isinstance(body["created"], int)
    [choice] = body["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "a b c", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert body["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert set(body["timings"]) == TIMINGS
    assert body["timings"]["prefill_tokens_per_s"] == 16
    options = house.engine.options[-1]
    assert (options.temperature, options.top_p, options.top_k, options.max_tokens) == (1.0, 1.0, 0, None)
    assert house.engine.trims == [True]


async def test_chat_as_a_stream(client: httpx.AsyncClient) -> None:
    *chunks, done = events(await client.post("/v1/chat/completions", json=chat(stream=True)))
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:]] == ["a", " b", " c", None]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["stop"]
    assert ["timings" in chunk for chunk in chunks] == [False] * 4 + [True]
    assert set(chunks[-1]["timings"]) == TIMINGS
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_in_a_stream(client: httpx.AsyncClient) -> None:
    asked = chat(stream=True, stream_options={"include_usage": True})
    *chunks, last, done = events(await client.post("/v1/chat/completions", json=asked))
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 7
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_a_stream_is_plain_ascii_on_one_line_each(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json=chat("umlauts", stream=True))
    assert response.content.isascii()
    chunks = events(response)[:-1]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == "äöü \u2028 😀 \x85 \n"


async def test_log_probabilities_of_chat(client: httpx.AsyncClient) -> None:
    asked = chat("echo ä b", logprobs=True, top_logprobs=2)
    body = (await client.post("/v1/chat/completions", json=asked)).json()
    first, second = body["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["logprob"], first["bytes"]) == ("ä", -0.5, [0xC3, 0xA4])
    assert [top["token"] for top in second["top_logprobs"]] == ["t0", "t1"]
    plain = (await client.post("/v1/chat/completions", json=chat(logprobs=True))).json()
    assert [token["top_logprobs"] for token in plain["choices"][0]["logprobs"]["content"]] == [[]] * 3
    chunks = events(await client.post("/v1/chat/completions", json={**asked, "stream": True}))[:-1]
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry and entry["content"][0]["token"] for entry in told] == [None, "ä", " b", None]


async def test_completions(client: httpx.AsyncClient, house: FakeHouse) -> None:
    asked = {"model": "small", "prompt": "echo x y", "logprobs": 1}
    body = (await client.post("/v1/completions", json=asked)).json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("x y", "stop")
    assert choice["logprobs"] == {
        "tokens": ["x", " y"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"t0": -1.0}, {"t0": -1.0}],
        "text_offset": [0, 1],
    }
    assert set(body["timings"]) == TIMINGS
    assert house.engine.options[-1].max_tokens == 16
    assert house.engine.options[-1].stop == ()
    assert house.engine.trims == [False]


async def test_prompts_are_scored(client: httpx.AsyncClient) -> None:
    asked = {"model": "small", "prompt": [[5, 6, 7], [8]], "echo": True, "logprobs": 1, "max_tokens": 1}
    body = (await client.post("/v1/completions", json=asked)).json()
    first, second = body["choices"]
    assert (first["index"], first["text"], first["finish_reason"]) == (0, "5 6 7t7", "length")
    assert first["logprobs"] == {
        "tokens": ["t5", "t6", "t7", "t7"],
        "token_logprobs": [None, -0.5, -0.5, -0.5],
        "top_logprobs": [None, *[{"t0": -1.0}] * 3],
        "text_offset": [0, 2, 4, 6],
    }
    assert (second["index"], second["text"]) == (1, "8t7")
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
    bare = {"model": "small", "prompt": "echo a b", "echo": True, "max_tokens": 0}
    (only,) = (await client.post("/v1/completions", json=bare)).json()["choices"]
    assert (only["text"], only["logprobs"]) == ("echo a b", None)
    wrong = await client.post("/v1/completions", json={**asked, "prompt": [[1], [10_001]]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "prompt[1]")


async def test_completions_as_a_stream(client: httpx.AsyncClient) -> None:
    asked = {"model": "small", "prompt": ["count 20"], "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, done = events(await client.post("/v1/completions", json=asked))
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " ".join(str(i) for i in range(16))
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["timings"]["completion_tokens"] == 16
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 16)


async def test_completions_of_tokens_and_of_too_many(client: httpx.AsyncClient) -> None:
    for prompt in ([1, 2, 3], [[1, 2, 3]]):
        response = await client.post("/v1/completions", json={"model": "small", "prompt": prompt})
        assert response.json()["usage"]["prompt_tokens"] == 3
    response = await client.post("/v1/completions", json={"model": "small", "prompt": "x " * (CONTEXT + 1)})
    assert response.json()["error"]["param"] == "prompt"


async def test_options_reach_the_engine(client: httpx.AsyncClient, house: FakeHouse) -> None:
    asked = chat(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.05,
        repetition_penalty=1.1,
        seed=-5,
        stop=["X", "Y"],
        max_completion_tokens=2,
    )
    body = (await client.post("/v1/chat/completions", json=asked)).json()
    assert body["choices"][0]["finish_reason"] == "length"
    options = house.engine.options[-1]
    assert (options.temperature, options.top_p, options.top_k, options.min_p) == (0.5, 0.9, 7, 0.05)
    assert (options.repetition_penalty, options.seed, options.max_tokens) == (1.1, -5, 2)
    assert options.stop == ("X", "Y")
    assert (await client.post("/v1/chat/completions", json=chat(top_p=0))).status_code == 200
    assert house.engine.options[-1].top_k == 1, "the most likely token alone"


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_biases(client: httpx.AsyncClient, house: FakeHouse, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {**chat(), "prompt": "echo x", "logit_bias": {"5": 100, "7": -2.5}}
    assert (await client.post(f"/v1/{path}", json=asked)).status_code == 200
    assert house.engine.options[-1].logit_bias == ((5, 100.0), (7, -2.5))

    def refuse(*_args: Any, **_options: Any) -> None:
        raise RequestError("no such token", field="logit_bias")

    monkeypatch.setattr(house.engine, "submit", refuse)
    refused = await client.post(f"/v1/{path}", json=asked)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logit_bias")


async def test_a_budget_of_reasoning(client: httpx.AsyncClient, house: FakeHouse) -> None:
    asked = {"effort": "low", "max_tokens": 5}
    for path, body in (("chat/completions", chat()), ("responses", {"model": "small", "input": "echo x"})):
        for budget, taken in ((5, 5), (0, 0), (5.0, 5), (None, None)):
            about = {"reasoning": {**asked, "max_tokens": budget}}
            assert (await client.post(f"/v1/{path}", json={**body, **about})).status_code == 200
            assert house.engine.options[-1].thought_tokens == taken
            assert house.engine.variables == {"reasoning_effort": "low", "thinking": True}
        assert (await client.post(f"/v1/{path}", json={**body, "thinking_token_budget": 4})).status_code == 200
        assert house.engine.options[-1].thought_tokens == 4
        refused = await client.post(f"/v1/{path}", json={**body, "reasoning": {"max_tokens": -2}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reasoning.max_tokens")


async def test_what_a_request_leaves_open_is_the_makers(client: httpx.AsyncClient, house: FakeHouse) -> None:
    house.sampling.update(temperature=0.6, top_k=20, presence_penalty=1.5)
    for path, body in (("chat/completions", chat()), ("responses", {"model": "small", "input": "echo x"})):
        for own in ({}, {"temperature": 0.1, "presence_penalty": 0}):
            assert (await client.post(f"/v1/{path}", json={**body, **own})).status_code == 200
            options = house.engine.options[-1]
            wanted = {"temperature": 0.6, "top_k": 20, "presence_penalty": 1.5, "top_p": 1.0, **own}
            assert {name: getattr(options, name) for name in wanted} == wanted


async def test_the_last_message_can_be_continued(client: httpx.AsyncClient, house: FakeHouse) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "echo more"}]
    asked = {"model": "small", "messages": messages, "continue_final_message": True}
    assert (await client.post("/v1/chat/completions", json=asked)).status_code == 200
    assert house.engine.trims == [False]
    response = await client.post("/v1/chat/completions", json=chat(continue_final_message=True))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


async def test_reasoning_comes_apart(client: httpx.AsyncClient) -> None:
    """Whether the prompt begins it, or the model."""
    think = {"chat_template_kwargs": {"enable_thinking": True}}
    for asked in (chat("echo hm </think> so", **think), chat("echo <think> hm </think> so")):
        whole = await both_ways(client, asked)
        assert (whole["reasoning_content"].strip(), whole["content"]) == ("hm", " so")
    assert "reasoning_content" not in await both_ways(client, chat("echo so"))
    whole = (await client.post("/v1/chat/completions", json=asked)).json()["usage"]
    shown = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last, _ = events(await client.post("/v1/chat/completions", json={**asked, **shown}))
    assert last["usage"] == whole | {"prompt_tokens_details": last["usage"]["prompt_tokens_details"]}
    assert 0 < whole["completion_tokens_details"]["reasoning_tokens"] < whole["completion_tokens"]
    form = {"response_format": {"type": "json_object"}}
    assert (await both_ways(client, chat("echo so", **think, **form)))["content"] == "so"


@pytest.mark.parametrize(
    "switch", [{"reasoning_in_content": True}, {"reasoning_format": "none"}, {"separate_reasoning": False}]
)
async def test_reasoning_stays_in_the_content_for_who_wants_it(client: httpx.AsyncClient, switch: Any) -> None:
    asked = chat("echo hm </think> so", chat_template_kwargs={"enable_thinking": True}, **switch)
    assert (await both_ways(client, asked))["content"] == "<think>\nhm </think> so"


@pytest.mark.parametrize("message", [{"content": "<think>\na"}, {"content": "", "reasoning_content": "a"}])
async def test_a_thought_is_continued(client: httpx.AsyncClient, house: FakeHouse, message: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", **message}]
    asked = {"model": "small", "messages": messages, "continue_final_message": True}
    whole = await both_ways(client, asked)
    assert house.engine.messages[-1] == {"role": "assistant", "content": "<think>\na"}
    assert (whole["reasoning_content"], whole["content"]) == ("I do not know", "")
    assert house.engine.options[-1].thought == "<think>\na"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "status", "code", "param"),
    [
        ({"model": "nowhere"}, 404, "model_not_found", "model"),
        ({"model": "../../etc/passwd"}, 404, "model_not_found", "model"),
        (chat("echo " + "x " * CONTEXT), 400, "context_length_exceeded", "messages"),
        ({"model": "broken"}, 503, "model_unavailable", None),
        ({"n": 2}, 400, None, "n"),
    ],
    ids=["unknown", "path", "overflow", "damaged", "n"],
)
async def test_errors_before_the_answer_have_a_status(
    client: httpx.AsyncClient, stream: bool, change: dict[str, Any], status: int, code: str | None, param: str | None
) -> None:
    response = await client.post("/v1/chat/completions", json={**chat(), **change, "stream": stream})
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param)
    assert error["message"]


async def test_a_failure_in_the_middle_is_the_last_event_or_the_status(client: httpx.AsyncClient) -> None:
    chunks = events(await client.post("/v1/chat/completions", json=chat("echo a BREAK", stream=True)))
    assert chunks[1]["choices"][0]["delta"] == {"content": "a"}
    assert chunks[-1]["error"]["code"] == "model_broken"
    assert "[DONE]" not in chunks
    response = await client.post("/v1/chat/completions", json=chat("echo a BREAK"))
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")


def client_of(app: ASGIApp) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


async def test_pings_keep_a_silent_stream_alive(service: Service, house: FakeHouse) -> None:
    async with client_of(create_app(service, Security(), ping_s=0.02)) as client:
        await client.post("/v1/chat/completions", json=chat())
        house.engine.prefill_gate.clear()
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=chat(stream=True)))
        await asyncio.sleep(0.2)
        house.engine.prefill_gate.set()
        response = await asking
    assert ": ping\n\n" in response.text
    assert events(response)[-1] == "[DONE]"


async def test_a_late_error_comes_in_the_stream(
    service: Service, house: FakeHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that waits for its model begins before it is known whether the prompt fits."""
    monkeypatch.setitem(sse.__kwdefaults__, "patience_s", 0.02)
    async with client_of(create_app(service, Security())) as client:
        asked = {**chat("echo " + "x " * CONTEXT, stream=True), "model": "slow-to-load"}
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=asked))
        await asyncio.sleep(0.1)
        house.gate.set()
        response = await asking
    assert response.status_code == 200
    [event] = events(response)
    assert event["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1", 404),
        ("POST", "/v1/images/generations", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models/small", 405),
        ("OPTIONS", "/v1/chat/completions", 405),
    ],
)
async def test_paths_that_are_not_there(client: httpx.AsyncClient, method: str, path: str, status: int) -> None:
    response = await client.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert "access-control-allow-origin" not in response.headers

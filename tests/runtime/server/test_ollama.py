"""Ollama's interface."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fake_engine import CONTEXT, FakeEngine, FakeHouse

from runtime.load.loading import LoadedModel
from runtime.server.ollama.requests import OllamaChat, seconds
from runtime.server.security import Security
from runtime.server.serve import create_app
from runtime.server.service import Service
from runtime.text.constraint import Grammar
from runtime.text.sampling import SamplingOptions
from runtime.wire.requests import LoadRequest
from tests.runtime.server.conftest import wait_until

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
COUNTS = {"total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"}


def asking(text: str = "echo a b c", **more: Any) -> dict[str, Any]:
    return {"model": "small", "messages": [{"role": "user", "content": text}], "stream": False, **more}


def read(**more: Any) -> OllamaChat:
    return OllamaChat.read(json.dumps(asking(**more)).encode())


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


async def test_a_chat(client: httpx.AsyncClient, house: FakeHouse) -> None:
    options = {"temperature": 0.5, "top_k": 7, "min_p": 0.1, "seed": 3, "stop": ["END"], "repeat_penalty": 1.25}
    body = (await client.post("/api/chat", json=asking(options={**options, "num_predict": 9, "num_thread": 2}))).json()
    assert body.keys() == {"model", "created_at", "message", "done", "done_reason", *COUNTS}
    assert body["message"] == {"role": "assistant", "content": "a b c"}
    assert (body["model"], body["done"], body["done_reason"]) == ("small", True, "stop")
    assert (body["prompt_eval_count"], body["eval_count"], body["prompt_eval_duration"]) == (4, 3, 125_000_000)
    assert body["eval_duration"] == 50_000_000  # two tokens after the first, at 40 a second
    assert body["total_duration"] >= body["load_duration"] > 0
    wanted = SamplingOptions(
        temperature=0.5,
        top_k=7,
        top_p=1,
        min_p=0.1,
        seed=3,
        max_tokens=9,
        repetition_penalty=1.25,
        stop=("END",),
    )
    assert house.engine.options == [wanted]


async def test_a_stream(client: httpx.AsyncClient) -> None:
    asked = asking(f"echo <think> hm </think> well {CALL} {CALL}", tools=[ADD])
    del asked["stream"]  # it is the default
    *early, last = lines(await client.post("/api/chat", json=asked))
    assert not any(item["done"] for item in early)
    assert "".join(item["message"].get("thinking", "") for item in early).strip() == "hm"
    assert "".join(item["message"]["content"] for item in early).strip() == "well"
    calls = [call["function"] for item in early for call in item["message"].get("tool_calls", ())]
    assert [(call["name"], call["arguments"]) for call in calls] == [("add", {"a": 1})] * 2
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["done"], last["done_reason"]) == (True, "stop")
    assert last.keys() >= COUNTS
    whole = (await client.post("/api/chat", json={**asked, "stream": False})).json()
    assert whole["message"]["thinking"].strip() == "hm"
    assert [call["function"]["index"] for call in whole["message"]["tool_calls"]] == [0, 1]


async def test_a_cut_answer(client: httpx.AsyncClient) -> None:
    body = (await client.post("/api/chat", json=asking("count 9", options={"num_predict": 2}))).json()
    assert (body["message"]["content"], body["done_reason"]) == ("0 1", "length")


async def test_a_generated_text(client: httpx.AsyncClient, house: FakeHouse) -> None:
    asked = {"model": "small", "prompt": "echo a b", "system": "Be brief.", "logprobs": True, "top_logprobs": 1}
    items = lines(await client.post("/api/generate", json=asked))
    assert "".join(item["response"] for item in items) == "a b"
    assert [(one["token"], len(one["top_logprobs"])) for item in items for one in item.get("logprobs", ())] == [
        ("a", 1),
        (" b", 1),
    ]
    assert items[-1]["prompt_eval_count"] == 5
    assert house.engine.options[-1].stop == ()
    await client.post("/api/generate", json={**asked, "raw": True, "stream": False})
    assert house.engine.options[-1].stop == ()


def test_a_conversation() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "look", "images": ["eA=="]},
        {
            "role": "assistant",
            "content": "",
            "thinking": "hm",
            "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "tool_name": "add", "content": "2"},
        {"role": "user", "content": "go on"},
    ]
    told, left_out = read(messages=messages).conversation
    called = [{"id": None, "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    assert told[2:4] == [
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": called},
        {"role": "tool", "content": "2", "tool_call_id": None, "name": "add"},
    ]
    assert left_out == ["messages[1].images"]


@pytest.mark.parametrize(
    ("think", "told"),
    [
        (None, {}),
        (True, {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}),
        (False, {"enable_thinking": False, "thinking": False, "reasoning_effort": "low"}),
        ("medium", {"enable_thinking": True, "thinking": True, "reasoning_effort": "medium"}),
        (9, {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}),
    ],
)
def test_thinking_sets_the_templates_variables(think: Any, told: dict[str, Any]) -> None:
    asked = read(think=think)
    assert asked.variables == told
    assert asked.sampling().thought_tokens == (9 if think == 9 else None)


async def test_a_thought_is_continued(client: httpx.AsyncClient, house: FakeHouse) -> None:
    thought = {"role": "assistant", "content": "", "thinking": "a"}
    asked = {"model": "small", "messages": [{"role": "user", "content": "x"}, thought], "stream": False, "think": 9}
    message = (await client.post("/api/chat", json=asked)).json()["message"]
    assert house.engine.messages[-1] == {"role": "assistant", "content": "<think>\na"}
    assert (house.engine.options[-1].thought, message["thinking"]) == ("<think>\na", "I do not know")


@pytest.mark.parametrize(("form", "schema"), [("json", {"type": "object"}), (SCHEMA, SCHEMA), ("", None)])
def test_formats(form: Any, schema: Any) -> None:
    assert read(format=form).sampling().grammar == (None if schema is None else Grammar.of_schema(schema))


@pytest.mark.parametrize(
    ("options", "tokens", "seed"),
    [({"num_predict": -1, "seed": -1}, 2**31 - 1, None), ({"num_predict": -2, "seed": 0}, 2**31 - 1, 0)],
)
def test_values_that_mean_none(options: dict[str, int], tokens: int, seed: int | None) -> None:
    found = read(options=options).sampling()
    assert (found.max_tokens, found.seed) == (tokens, seed)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, None),
        (0, 0),
        (90, 90),
        (-1, math.inf),
        ("5m", 300),
        ("1h30m", 5400),
        ("250ms", 0.25),
        ("-1s", math.inf),
        ("0", 0),
    ],
)
def test_how_long_a_model_is_kept(given: Any, found: float | None) -> None:
    assert seconds(given) == found


async def test_a_model_is_unloaded_and_loaded_as_asked(client: httpx.AsyncClient, house: FakeHouse) -> None:
    first = (await client.post("/api/generate", json={"model": "small"})).json()
    assert (first["done_reason"], first["response"]) == ("load", "")
    (loaded,) = (await client.get("/api/ps")).json()["models"]
    wanted = {"name": "small", "context_length": CONTEXT, "expires_at": "9999-12-31T23:59:59Z"}
    assert loaded | wanted | {"size": 650, "size_vram": 400} == loaded
    assert (await client.post("/api/chat", json=asking(keep_alive=0))).json()["message"]["content"] == "a b c"
    await asyncio.to_thread(wait_until, lambda: house.engine.closed)
    assert (await client.get("/api/ps")).json() == {"models": []}
    await client.post("/v1/completions", json={"model": "small", "prompt": "echo x"})
    await asyncio.sleep(0.05)
    assert not house.engine.closed  # other requests keep it as the server was told
    assert (await client.post("/api/chat", json={**asking(keep_alive=0), "messages": []})).json()[
        "done_reason"
    ] == "unload"
    assert house.engine.closed


async def test_a_model_that_is_loaded_is_loaded_at_once(client: httpx.AsyncClient, house: FakeHouse) -> None:
    await client.post("/api/generate", json={"model": "small"})
    answering = asyncio.create_task(client.post("/api/chat", json=asking("slow 150")))
    await asyncio.to_thread(wait_until, lambda: house.engine.running)
    assert (await client.post("/api/generate", json={"model": "small"})).json()["done_reason"] == "load"
    assert not answering.done()
    assert (await answering).status_code == 200


async def test_a_load_forgets_how_long_a_client_kept_the_model(
    client: httpx.AsyncClient, service: Service, house: FakeHouse
) -> None:
    await client.post("/api/chat", json=asking(keep_alive=0))
    assert [report.phase async for report in service.load(LoadRequest(model="small"))]
    await asyncio.sleep(0.05)
    assert not house.engine.closed


def with_small_contexts(house: FakeHouse, monkeypatch: pytest.MonkeyPatch, *, most: int) -> None:
    """Loads leave 50 tokens of context where nothing else is asked, and have memory for `most`; the model knows 200."""
    load = house.load

    def limited(request: LoadRequest, *rest: Any) -> LoadedModel:
        if (request.context or 0) > most:
            house.loads.append(request)
            raise MemoryError
        return replace(load(request, *rest), context=request.context or 50)

    monkeypatch.setattr(house, "load", limited)


async def test_a_context_grows_as_far_as_the_model_knows(
    client: httpx.AsyncClient, house: FakeHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_small_contexts(house, monkeypatch, most=CONTEXT)
    for asked in (20, 100, 80, 1000, 1):
        assert (await client.post("/api/chat", json=asking(options={"num_ctx": asked}))).status_code == 200
    assert [load.context for load in house.loads] == [None, 100, CONTEXT]


async def test_a_context_that_does_not_fit_leaves_the_model_as_it_was(
    client: httpx.AsyncClient, house: FakeHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_small_contexts(house, monkeypatch, most=60)
    statuses = [
        (await client.post("/api/chat", json=asking(options={"num_ctx": asked}))).status_code for asked in (20, 100, 20)
    ]
    assert statuses == [200, 503, 200]
    assert [load.context for load in house.loads] == [None, 100, None]


async def test_models(client: httpx.AsyncClient) -> None:
    models = {model["model"]: model for model in (await client.get("/api/tags")).json()["models"]}
    small = models["small"]
    assert (small["size"], small["modified_at"], len(small["digest"])) == (1000, "2023-11-14T22:13:20Z", 64)
    assert small["details"]["parameter_size"] == "0.00M"
    assert small["digest"] != models["demo"]["digest"]
    for name in ({"model": "small:latest"}, {"name": "small"}):
        shown = (await client.post("/api/show", json=name)).json()
        assert shown["model_info"]["llama.context_length"] == CONTEXT
        assert shown["capabilities"] == ["completion", "tools", "embedding", "thinking"]
    assert "version" in (await client.get("/api/version")).json()
    assert (await client.get("/")).text == "lowbit-chat is running"


async def test_embeddings(client: httpx.AsyncClient) -> None:
    body = (await client.post("/api/embed", json={"model": "small", "input": ["one", "two three"]})).json()
    assert [len(vector) for vector in body["embeddings"]] == [4, 4]
    assert body["prompt_eval_count"] == 3
    older = (await client.post("/api/embeddings", json={"model": "small", "prompt": "two three"})).json()
    assert older == {"embedding": body["embeddings"][1]}
    long = (await client.post("/api/embed", json={"model": "small", "input": "x " * CONTEXT})).json()
    assert long["prompt_eval_count"] == CONTEXT - 1


async def test_a_download_reports_and_becomes_a_model(client: httpx.AsyncClient, house: FakeHouse) -> None:
    told = lines(await client.post("/api/pull", json={"model": "hf.co/owner/name:Q8_0"}))
    assert [told[0]["status"], told[-1]["status"]] == ["pulling owner/name:Q8_0", "success"]
    assert {item["status"] for item in told} >= {"download 1", "quantize 2"}
    (made,) = house.quantized
    assert (made.source, made.name) == ("/cache/owner/name:Q8_0/None", "owner/name-Q8_0")
    answer = (await client.post("/api/chat", json={**asking(), "model": "hf.co/owner/name:Q8_0"})).json()
    assert (answer["model"], answer["message"]["content"]) == ("hf.co/owner/name:Q8_0", "a b c")
    again = await client.post("/api/pull", json={"model": "owner/name:Q8_0", "stream": False})
    assert again.json() == {"status": "success"}
    assert len(house.quantized) == 1


@pytest.mark.parametrize("name", ["../secret", "/etc", "~/x", "a/b/c", "nothing", "http://x/y", "owner/name:../x"])
async def test_only_names_of_the_catalogue_or_the_hub_are_downloaded(
    client: httpx.AsyncClient, house: FakeHouse, name: str
) -> None:
    answer = await client.post("/api/pull", json={"model": name})
    assert (answer.status_code, house.quantized) == (400, [])
    assert "is neither in the catalogue nor a name on the hub" in answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "change", "said"),
    [
        ("/api/chat", {"model": None}, "model"),
        ("/api/chat", {"messages": "x"}, "messages: "),
        ("/api/chat", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role: "),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["x"]}]}, "messages[0].images holds"),
        ("/api/chat", {"options": []}, None),
        ("/api/chat", {"options": "x"}, "options: "),
        ("/api/chat", {"options": {"temperature": "hot"}}, "options.temperature: "),
        ("/api/chat", {"options": {"repeat_penalty": 99}}, "options.repeat_penalty: "),
        ("/api/chat", {"options": {"num_predict": 1.5}}, "options.num_predict: "),
        ("/api/chat", {"options": {"num_ctx": -1}}, "options.num_ctx: "),
        ("/api/chat", {"options": {"mirostat": 2}}, "options.mirostat is not supported"),
        ("/api/chat", {"options": {"mirostat": 0, "tfs_z": 1.0}}, None),
        ("/api/chat", {"format": "xml"}, "format: "),
        ("/api/chat", {"format": {"type": "no"}}, "format: "),
        ("/api/chat", {"think": -1}, "think: "),
        ("/api/chat", {"keep_alive": "soon"}, "keep_alive must be"),
        ("/api/chat", {"keep_alive": []}, "keep_alive: "),
        ("/api/chat", {"tools": [{"type": "function", "function": {"name": 3}}]}, "tools[0].function.name: "),
        ("/api/generate", {"prompt": 3}, "prompt: "),
        ("/api/generate", {"prompt": "x", "images": ["eA=="]}, "images holds pictures"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, "suffix is not supported"),
        ("/api/generate", {"prompt": "x", "context": [1, 2]}, "context is not supported"),
        ("/api/embed", {"input": [""]}, "input holds an empty text"),
        ("/api/embed", {"input": "x", "dimensions": 3}, "dimensions is not supported"),
        ("/api/embeddings", {"prompt": 3}, "prompt"),
        ("/api/embeddings", {"prompt": ["a", "b"]}, "prompt holds 2 texts"),
        ("/api/embeddings", {"prompt": "x " * CONTEXT, "truncate": False}, "the prompt has"),
        ("/api/show", {"model": 3}, "model: "),
        ("/api/pull", {"model": ""}, "model: "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_is_wrong_is_named(client: httpx.AsyncClient, path: str, change: Any, said: str | None) -> None:
    body = asking() if path == "/api/chat" else {"model": "small", "stream": False}
    answer = await client.post(path, json={**body, **change})
    assert answer.status_code == (200 if said is None else 400), answer.text
    assert said is None or answer.json()["error"].startswith(said)


async def test_errors(service: Service) -> None:
    transport = httpx.ASGITransport(create_app(service, Security(token="secret")))
    key = {"Authorization": "Bearer secret"}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=key) as to:
        answers = [
            (401, await to.get("/api/tags", headers={"Authorization": "x"})),
            (403, await to.post("/api/pull", json={"model": "a/b"}, headers={"Origin": "https://evil.example"})),
            (404, await to.post("/api/chat", json=asking() | {"model": "gone"})),
            (404, await to.post("/api/nothing", json={})),
            (405, await to.get("/api/chat")),
            (501, await to.request("DELETE", "/api/delete", json={"model": "small"})),
            (501, await to.post("/api/create", json={})),
            (503, await to.post("/api/chat", json=asking() | {"model": "broken"})),
        ]
        late = lines(await to.post("/api/chat", json=asking("echo a BREAK", stream=True)))
    for status, answer in answers:
        assert (answer.status_code, type(answer.json()["error"])) == (status, str)
    assert late[-1]["error"].startswith("NaN")


def test_hanging_up_cancels(serve: Callable[..., Any], house: FakeHouse) -> None:
    asked = asking("slow 190", stream=True)
    with httpx.stream("POST", f"{serve().url}/api/chat", json=asked) as answer:
        next(answer.iter_lines())
    wait_until(lambda: house.engine.cancellations == 1)


async def test_a_template_that_begins_the_reasoning(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "reasons", True)
    message = (await client.post("/api/chat", json=asking("echo hm </think> yes"))).json()["message"]
    assert (message["thinking"].strip(), message["content"].strip()) == ("hm", "yes")


async def test_an_answer_that_was_begun_is_continued(client: httpx.AsyncClient, house: FakeHouse) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "echo so"}]
    assert (await client.post("/api/chat", json=asking() | {"messages": messages})).json()["message"]["content"] == "so"
    assert house.engine.trims == [False]

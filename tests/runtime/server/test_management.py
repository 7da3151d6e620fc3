from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, FakeHouse

from runtime.wire.requests import LoadRequest, QuantizeRequest, TuneRequest


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200
    return [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n") if line.startswith("data: ")]


async def test_status(manager: httpx.AsyncClient) -> None:
    status = (await manager.get("/runtime/status")).json()
    wanted = (
        "state model backend reason bits kv k_chunk budget_percent slowdown_percent n_tb context memory_bytes "
        "weight_bytes kv_bytes pid version error"
    )
    assert set(wanted.split()) <= set(status)
    assert (status["state"], status["model"], status["error"]) == ("empty", None, None)


async def test_load_tells_its_progress_and_its_end(manager: httpx.AsyncClient, house: FakeHouse) -> None:
    asked = {"model": "small", "kv": "int8", "k_chunk": {"qkv": 8, "down": 16}, "context": 128, "backend": "cpu"}
    *reports, last = events(await manager.post("/runtime/load", json=asked))
    assert [report["message"] for report in reports] == ["loading small", "block 0", "block 1", "block 2"]
    assert all(set(report) == {"phase", "done", "total", "unit", "message"} for report in reports)
    assert last["phase"] == "done"
    assert last["status"]["state"] == "ready"
    assert last["status"]["k_chunk"] == {"qkv": 8, "down": 16}
    assert house.loads == [
        LoadRequest(model="small", kv="int8", k_chunk={"qkv": 8, "down": 16}, context=128, backend="cpu")
    ]
    models = (await manager.get("/runtime/models")).json()["models"]
    assert [model["name"] for model in models if model["loaded"]] == ["small"]
    assert [model["name"] for model in models if model["bundled"]] == ["demo"]


async def test_tuning_tells_its_progress_and_applies(manager: httpx.AsyncClient, house: FakeHouse) -> None:
    await manager.post("/runtime/load", json={"model": "small", "budget": 2.5})
    assert house.loads == [LoadRequest(model="small", budget=2.5)]
    *reports, last = events(await manager.post("/runtime/tune", json={"budget": 10, "force": True}))
    assert house.tunes == [TuneRequest(budget=10, force=True)]
    assert [(report["phase"], report["message"]) for report in reports] == [("tune", f"layer {i}") for i in range(3)]
    assert last["phase"] == "done"
    status = last["status"]
    assert (status["budget_percent"], status["slowdown_percent"], status["k_chunk"]) == (10, 9, {"qkv": 10})
    assert status["n_tb"] is None
    *_, last = events(await manager.post("/runtime/tune", json={"k_chunk": 3}))
    assert (last["status"]["budget_percent"], last["status"]["k_chunk"]) == (None, {"qkv": 3})
    assert len(house.engines) == 1, "tuning must not load again"


async def test_without_a_model_there_is_nothing_to_tune(manager: httpx.AsyncClient) -> None:
    response = await manager.post("/runtime/tune", json={"budget": 5})
    assert (response.status_code, response.json()["error"]["code"]) == (409, "no_model")


async def test_device(manager: httpx.AsyncClient) -> None:
    device = (await manager.get("/runtime/device")).json()
    assert (device["bandwidth_gb_s"], device["tuning"]) == (10.0, None)
    assert device["problems"] == [{"what": "it is hot", "fix": "open a window", "failure": False}]
    await manager.post("/runtime/load", json={"model": "small"})
    await manager.post("/runtime/tune", json={"budget": 5})
    device = (await manager.get("/runtime/device")).json()
    assert device["machine"]["cpu"] == {"name": "Some Processor"}
    assert device["machine"]["backend"] == "reference"
    assert set(device["tuning"]) >= {
        "device",
        "budget_percent",
        "n_tb_max",
        "n_tb",
        "k_chunk",
        "predicted_slowdown_percent",
        "measured_slowdown_percent",
        "seconds",
    }
    assert device["tuning"]["curve"] == [{"kind": "qkv", "n_tb": 0, "points": [[0, 1.0], [8, 1.25]]}]


async def test_a_load_that_fails_says_so_at_its_end(manager: httpx.AsyncClient) -> None:
    *_, last = events(await manager.post("/runtime/load", json={"model": "broken"}))
    assert set(last["error"]) == {"message", "type", "param", "code"}
    status = (await manager.get("/runtime/status")).json()
    assert status["state"] == "failed"
    assert status["error"] == last["error"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("load", {"model": "nowhere"}, 404, "model"),
        ("load", {}, 400, "model"),
        ("load", {"model": "small", "kv": "int3"}, 400, "kv"),
        ("load", {"model": "small", "k_chunk": 1025}, 400, "k_chunk"),
        ("load", {"model": "small", "k_chunk": {"qkv": -1}}, 400, None),
        ("load", {"model": "small", "k_chunk": {"nose": 1}}, 400, None),
        ("load", {"model": "small", "context": 0}, 400, "context"),
        ("load", {"model": "small", "budget": 101}, 400, "budget"),
        ("load", {"model": "small", "budget": -1}, 400, "budget"),
        ("load", {"model": "small", "budget": "best"}, 400, "budget"),
        ("load", {"model": "small", "budget": "exact", "k_chunk": 5}, 400, "k_chunk"),
        ("tune", {"budget": 101}, 400, "budget"),
        ("tune", {"budget": "5"}, 400, "budget"),
        ("tune", {"budget": 5, "k_chunk": 5}, 400, "k_chunk"),
        ("tune", {"model": "small"}, 400, "model"),
        ("load", {"model": "small", "unknown": 0}, 400, "unknown"),
        ("quantize", {"source": "x", "bits": 2.9}, 400, "bits"),
        ("quantize", {"source": "x", "bits": True}, 400, "bits"),
        ("quantize", {"source": "x", "method": "best"}, 400, "method"),
        ("quantize", {"source": "x", "bits": "3"}, 400, "bits"),
        ("quantize", {"source": "x", "smooth_attention": 1}, 400, "smooth_attention"),
        ("quantize", {}, 400, "source"),
        ("quantize", {"source": "x", "bits": 5}, 400, "bits"),
        ("pull", {}, 400, "name"),
        ("remove", {"name": 3}, 400, "name"),
        ("forget", {"chat": ""}, 400, "chat"),
        ("forget", {"name": "x"}, 400, "name"),
        ("forget", {"chat": "stuck"}, 503, None),
        ("remove", {"name": "demo"}, 400, None),
    ],
)
async def test_what_is_refused(
    manager: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    response = await manager.post(f"/runtime/{path}", json=body)
    assert response.status_code == status
    if param is not None:
        assert response.json()["error"]["param"] == param


async def test_quantize(manager: httpx.AsyncClient, house: FakeHouse) -> None:
    asked = {"source": "x", "bits": 3.5, "method": "awq", "name": "new", "smooth_attention": True}
    *reports, last = events(await manager.post("/runtime/quantize", json=asked))
    assert house.quantized == [QuantizeRequest(source="x", bits=3.5, method="awq", name="new", smooth_attention=True)]
    assert [report["phase"] for report in reports] == ["quantize"] * 3
    assert last["phase"] == "done"
    assert (last["model"]["name"], last["model"]["bits"]) == ("new", 3.5)
    assert last["model"]["warning"] == "a warning about awq"
    assert "new" in [model["id"] for model in (await manager.get("/v1/models")).json()["data"]]


async def test_pull(manager: httpx.AsyncClient) -> None:
    *reports, last = events(await manager.post("/runtime/pull", json={"name": "a/b", "revision": "r"}))
    assert [report["phase"] for report in reports] == ["download"] * 3
    assert last == {"phase": "done", "name": "a/b", "path": "/cache/a/b/r"}


async def test_remove_unloads_first(manager: httpx.AsyncClient, house: FakeHouse) -> None:
    for path, answer in (("unload", None), ("remove", {"removed": "small"})):
        await manager.post("/runtime/load", json={"model": "small"})
        told = (await manager.post(f"/runtime/{path}", json={"name": "small"} if answer else None)).json()
        assert told == answer or told["status"]["state"] == "empty"
        assert house.engine.closed
        assert (await manager.get("/runtime/status")).json()["state"] == "empty"
    assert house.removed == ["small"]


async def test_what_is_kept_of_chats_can_be_deleted(manager: httpx.AsyncClient, house: FakeHouse) -> None:
    assert (await manager.get("/runtime/caches")).json() == {"files": 3, "bytes": 3000, "kinds": {}, "usual": "int4"}
    assert (await manager.post("/runtime/forget", json={"chat": "one"})).json() == {"files": 2, "bytes": 2000}
    assert house.forgotten == ["one"]
    await manager.post("/runtime/load", json={"model": "small"})
    kinds = (await manager.get("/runtime/caches")).json()["kinds"]
    assert kinds == {"int4": {"bytes_per_token": 12.5, "context": 77}}
    await manager.post("/runtime/forget", json={})
    assert (house.forgotten, house.engine.forgotten) == (["one", None], [None])


async def test_a_prompt_says_whose_it_is(manager: httpx.AsyncClient, house: FakeHouse) -> None:
    for key in ({"prompt_cache_key": "my chat"}, {}):
        asked = {"model": "small", "messages": [{"role": "user", "content": "echo a"}], **key}
        assert (await manager.post("/v1/chat/completions", json=asked)).status_code == 200
    assert house.engine.chats == ["my chat", None]


async def test_the_tokens_of_an_answer_are_told(manager: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tag of reasoning, which the prompt ends with, is none of them."""
    asked = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "answer": "one two"}
    report, told = events(await manager.post("/runtime/inspect", json=asked))
    assert report["message"] == "reading the answer"
    assert [token["text"] for token in told["tokens"]] == ["one", "two"]
    assert (told["phase"], told["model"]) == ("done", "small")
    monkeypatch.setattr(FakeEngine, "reasons", True)
    *_, told = events(await manager.post("/runtime/inspect", json={**asked, "answer": "<think>\none two"}))
    assert [token["text"] for token in told["tokens"]] == ["one", "two"]


@pytest.mark.parametrize(
    "change", [{"answer": ""}, {"messages": [{"role": "wizard", "content": "hi"}]}, {"answer": "word " * 300}]
)
async def test_an_answer_that_cannot_be_read_is_refused(manager: httpx.AsyncClient, change: dict[str, Any]) -> None:
    asked = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "answer": "one two"} | change
    assert (await manager.post("/runtime/inspect", json=asked)).status_code == 400


async def test_models_that_can_be_fetched_are_seen_from_this_machine(manager: httpx.AsyncClient) -> None:
    found = (await manager.get("/runtime/prospects")).json()["prospects"]
    assert found[0]["source"] == "smollm2-135m"
    assert {"license", "sizes", "fits", "tokens_per_s", "bits"} <= found[0].keys()
    assert all(len(one["sizes"]) == 3 for one in found)

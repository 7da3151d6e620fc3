"""`ps`, `stop`, `man`, and `rm` of a model that the runtime has loaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from app.protocol import ChatDelta
from runtime import program_version
from runtime.server.lock import LockRecord, lock_path, write_lock
from runtime.system.lifetimes import own_record_time
from runtime.wire.answers import Caches, Status, Timings

Answer = Callable[..., dict[str, Any]]
Run = Callable[..., Any]


class Client:
    """A runtime that is up and holds a model."""

    home = Path()
    model = "small"
    exact = False
    asked: list[str] = []  # noqa: RUF012  the program makes a client for each question

    def __init__(self, base_url: str, token: str) -> None:
        assert (base_url, token) == ("http://127.0.0.1:4321", "secret")

    async def status(self) -> Status:
        held = {"memory_bytes": 812_000_000, "exact": self.exact, "context": 512}
        return Status(state="ready", model=self.model, backend="cpu", pid=1, **held)

    async def caches(self) -> Caches:
        return Caches(files=2, bytes=34_000_000, kinds={})

    async def unload(self) -> None:
        self.asked.append("unload")

    async def shutdown(self) -> None:
        self.asked.append("shutdown")
        lock_path(self.home).unlink()

    async def chat(self, messages: Any, options: Any) -> AsyncIterator[ChatDelta]:
        self.asked.append(f"{messages[-1]['content']} {options.max_tokens}")
        for text in ("It ", "answers."):
            yield ChatDelta(text=text)
        timings = Timings(
            ttft_s=0.25, prefill_tokens_per_s=9.0, decode_tokens_per_s=40.0, prompt_tokens=3, cached_tokens=0,
            completion_tokens=2, k_chunk={"qkv": 8}, slowdown_percent=1.0, speculation=None,
        )  # fmt: skip
        yield ChatDelta(text="", finish_reason="length", timings=timings)

    async def complete(self, text: str, options: Any) -> AsyncIterator[ChatDelta]:
        async for delta in self.chat([{"content": f"raw {text}"}], options):
            yield delta

    async def aclose(self) -> None:
        pass


@pytest.fixture
def up(isolated_home: Path, monkeypatch: pytest.MonkeyPatch) -> type[Client]:
    """A runtime is up."""
    record = LockRecord(
        pid=os.getpid(), create_time=own_record_time(), host="127.0.0.1", port=4321, token="secret",
        version=program_version(),
    )  # fmt: skip
    isolated_home.mkdir(exist_ok=True)
    write_lock(lock_path(isolated_home), record)
    monkeypatch.setattr("app.client.RuntimeClient", Client)
    monkeypatch.setattr("runtime.server.lock.is_alive", lambda _record: lock_path(isolated_home).exists())
    Client.asked, Client.model, Client.exact, Client.home = [], "small", False, isolated_home
    return Client


def test_ps(answer: Answer, run: Run, up: type[Client]) -> None:
    found = answer("ps")
    assert found.pop("since").startswith("20")
    assert found == {
        "running": True, "pid": os.getpid(), "version": program_version(), "state": "ready", "model": "small",
        "also_loaded": [], "backend": "cpu", "exact": False, "context": 512, "memory_bytes": 812_000_000,
        "answering": 0, "waiting": 0, "saved_chats": 2, "saved_bytes": 34_000_000,
    }  # fmt: skip
    header, line = run("ps").stdout.splitlines()
    assert header.split()[:3] == ["PID", "STATE", "MODEL"]
    assert "812 MB" in line
    assert "2 (34 MB)" in line
    up.exact = True
    assert answer("ps")["exact"]
    assert "small (exact)" in run("ps").stdout


def test_a_prompt_is_answered_by_the_runtime_that_has_loaded_the_model(
    run: Run, answer: Answer, up: type[Client]
) -> None:
    up.model = "demo"
    result = run("run", "demo", "hi")
    assert (result.stdout, up.asked) == ("It answers.\n", ["hi None"])
    assert "the answer was cut: the context of 512 tokens is full" in result.stderr
    found = answer("run", "demo", "hi", "--raw", "--max-tokens", 2)
    assert up.asked[1:] == ["raw hi 2"]
    assert (found["text"], found["finish_reason"], found["completion_tokens"]) == ("It answers.", "length", 2)
    assert (found["backend"], found["bits"], found["k_chunk"]) == ("cpu", 4, {"qkv": 8})
    up.model = "another"
    assert answer("run", "demo", "hi", "--max-tokens", 2).keys() == found.keys()


@pytest.mark.parametrize("option", [("--seed", 3), ("--temperature", 0), ("--kv", "int8"), ("--k-chunk", 0)])
def test_what_the_runtime_cannot_promise_is_answered_here(
    answer: Answer, up: type[Client], option: tuple[str, object]
) -> None:
    up.model = "demo"
    assert answer("run", "demo", "hi", "--max-tokens", 1, *option)["completion_tokens"] == 1
    assert up.asked == []


def test_ps_where_none_is_up(answer: Answer, run: Run, isolated_home: Path) -> None:
    assert answer("ps") == {"running": False}
    assert run("ps").stdout == "no runtime is running\n"
    assert answer("stop") == {"stopped": None}


def test_stop(answer: Answer, up: type[Client]) -> None:
    assert answer("stop") == {"stopped": os.getpid()}
    assert up.asked == ["shutdown"]


def test_a_loaded_model_is_not_removed_unless_forced(
    answer: Answer, error: Callable[..., str], up: type[Client], services: Any
) -> None:
    services.store().root.mkdir(parents=True, exist_ok=True)
    shutil.copytree(services.packed, services.store().root / "small")
    assert "small is loaded in the runtime" in error("rm", "small")
    assert [info.name for info in services.store().list()] == ["small"]
    assert answer("rm", "small", "--force") == {"removed": "small"}
    assert up.asked == ["unload"]
    assert services.store().list() == []


def test_another_model_is_removed(answer: Answer, stored: str, up: type[Client]) -> None:
    up.model = "demo"
    assert answer("rm", stored) == {"removed": stored}


@pytest.mark.parametrize(("typed", "stays"), [("n\n", True), ("\n", True), ("y\n", False)])
def test_rm_asks_at_a_terminal(
    run: Run, stored: str, services: Any, monkeypatch: pytest.MonkeyPatch, typed: str, stays: bool
) -> None:
    monkeypatch.setattr("app.cli.models.at_a_terminal", lambda: True)
    said = run("rm", stored, piped=typed)
    assert "delete small, " in said.stderr
    assert bool(services.store().list()) is stays
    assert ("small is kept" in said.stderr) is stays


def test_the_manual_page_tells_every_verb(run: Run) -> None:
    page = run("man").stdout
    assert page.startswith(".TH LOWBIT-CHAT 1")
    for verb in ("run", "pull", "quantize", "list", "rm", "serve", "eval", "bench", "doctor", "ps", "stop"):
        assert f".SS lowbit-chat {verb}" in page
    assert ".SS lowbit-chat chats search" in page
    assert r"\-\-temperature" in page
    assert not [line for line in page.splitlines() if line.startswith(("'", ". "))]

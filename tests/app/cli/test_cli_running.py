"""`ps`, `stop`, `man`, and `rm` of a model that the runtime has loaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime import program_version
from runtime.server.lock import LockRecord, lock_path, write_lock
from runtime.system.parent import own_record_time
from runtime.wire.answers import Caches, Status

Answer = Callable[..., dict[str, Any]]


class Client:
    """A runtime that is up and holds a model."""

    home = Path()
    model = "small"
    asked: list[str] = []  # noqa: RUF012  the program makes a client for each question

    def __init__(self, base_url: str, token: str) -> None:
        assert (base_url, token) == ("http://127.0.0.1:4321", "secret")

    async def status(self) -> Status:
        return Status(state="ready", model=self.model, backend="cpu", context=512, memory_bytes=812_000_000, pid=1)

    async def caches(self) -> Caches:
        return Caches(files=2, bytes=34_000_000, kinds={})

    async def unload(self) -> None:
        self.asked.append("unload")

    async def shutdown(self) -> None:
        self.asked.append("shutdown")
        lock_path(self.home).unlink()

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
    Client.asked, Client.model, Client.home = [], "small", isolated_home
    return Client


def test_ps(answer: Answer, run: Callable[..., Any], up: type[Client]) -> None:
    found = answer("ps")
    assert found.pop("since").startswith("20")
    assert found == {
        "running": True, "pid": os.getpid(), "version": program_version(), "state": "ready", "model": "small",
        "backend": "cpu", "context": 512, "memory_bytes": 812_000_000, "answering": 0, "waiting": 0, "saved_chats": 2,
        "saved_bytes": 34_000_000,
    }  # fmt: skip
    header, line = run("ps").stdout.splitlines()
    assert header.split()[:3] == ["PID", "STATE", "MODEL"]
    assert "812 MB" in line
    assert "2 (34 MB)" in line


def test_ps_where_none_is_up(answer: Answer, run: Callable[..., Any], isolated_home: Path) -> None:
    assert answer("ps") == {"running": False}
    assert run("ps").stdout == "no runtime is up\n"
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
    run: Callable[..., Any], stored: str, services: Any, monkeypatch: pytest.MonkeyPatch, typed: str, stays: bool
) -> None:
    monkeypatch.setattr("app.cli.stored.at_a_terminal", lambda: True)
    said = run("rm", stored, piped=typed)
    assert "delete small, " in said.stderr
    assert bool(services.store().list()) is stays
    assert ("small is kept" in said.stderr) is stays


def test_the_manual_page_tells_every_verb(run: Callable[..., Any]) -> None:
    page = run("man").stdout
    assert page.startswith(".TH LOWBIT-CHAT 1")
    for verb in ("run", "pull", "quantize", "list", "rm", "serve", "eval", "bench", "doctor", "ps", "stop"):
        assert f".SS lowbit-chat {verb}" in page
    assert ".SS lowbit-chat chats search" in page
    assert r"\-\-temperature" in page
    assert not [line for line in page.splitlines() if line.startswith(("'", ". "))]

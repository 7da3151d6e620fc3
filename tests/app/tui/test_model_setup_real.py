"""Model setup with the real runtime and a hub on loopback: download, cancel, resume, quantize, load, answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app import paths
from app.settings import Settings
from app.supervisor import Supervisor
from app.tui.app import ChatApp
from app.tui.messages import QuantizeAsked
from app.tui.model_setup import unfinished
from runtime.wire.requests import QuantizeRequest
from tests.app.cli.conftest import write_checkpoint
from tests.models.hub.hub_server import HubServer

NAME = "owner/tiny-model"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A hub with one checkpoint, which the runtime asks in place of the real one."""
    server = HubServer()
    folder = write_checkpoint(tmp_path / "checkpoint")
    server.add(NAME, {file.name: file.read_bytes() for file in folder.iterdir()})
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    try:
        yield server
    finally:
        server.close()


async def until(pilot: Any, predicate: Any, what: str, seconds: float = 30) -> None:
    for _ in range(round(seconds / 0.05)):
        if predicate():
            return
        await pilot.pause(0.05)
    raise AssertionError(f"waited in vain for {what}; the job is {pilot.app.session.job}")


@pytest.mark.slow
async def test_a_model_comes_from_the_hub_into_the_chat(hub: Any) -> None:
    app = ChatApp(Settings(budget=0, prompt_budget=0), supervisor=lambda: Supervisor(paths.home()))
    async with app.run_test(size=(100, 30)) as pilot:
        session = app.session
        await until(pilot, lambda: session.ready and not session.working, "demo")
        assert session.newcomer
        hub.faults.bytes_per_s = 20_000
        app.post_message(QuantizeAsked(QuantizeRequest(source=NAME, method="rtn", group_size=32)))
        await until(pilot, lambda: session.job.phase == "download", "the download")
        await pilot.press("ctrl+t")
        await until(pilot, lambda: session.job.outcome == "stopped", "its end")
        assert unfinished() is not None
        hub.faults.bytes_per_s = None
        app.action_resume_work()
        stored = "owner/tiny-model-rtn-4bit-g32"  # in between the status may name no model: one is unloaded first
        await until(pilot, lambda: not session.working and session.status.model == stored, "the model")
        assert session.job.course == "✓ fetch  ✓ quantize  ✓ load  · tune" or session.job.outcome == "done"
        assert unfinished() is None
        app.chat.composer.load_text("hello")
        await pilot.press("enter")
        await until(pilot, lambda: session.conversation.head and not app.chat.busy, "an answer")
        assert session.conversation.path()[-1].model == session.status.model


async def test_a_name_that_the_hub_does_not_know_is_told(hub: Any) -> None:
    app = ChatApp(Settings(model="demo", budget=0, prompt_budget=0), supervisor=lambda: Supervisor(paths.home()))
    async with app.run_test(size=(100, 30)) as pilot:
        session = app.session
        await until(pilot, lambda: session.ready and not session.working, "demo")
        app.post_message(QuantizeAsked(QuantizeRequest(source="nobody/nothing")))
        await until(pilot, lambda: session.job.outcome == "failed", "the refusal")
        assert "nobody/nothing" in session.job.error
        assert session.status.model == "demo"

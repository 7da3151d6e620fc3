"""Model setup in the UI: offers, one view of all stages, leaving, cancelling, resuming."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input

from app import network, settings
from app.tui.jobs import STAGES, Meter
from app.tui.messages import QuantizeAsked
from app.tui.model_setup import unfinished
from app.tui.screens.dialogs import ConfirmDialog, QuantizeDialog, checkpoint_problem
from app.tui.screens.models import ModelsScreen
from models.progress import Progress
from runtime.wire.device import Prospect
from runtime.wire.requests import QuantizeRequest

Stage = Callable[..., Any]
WIDE = (140, 40)


async def open_offers(s: Any) -> Any:
    await s.ready()
    await s.pilot.press("f2")
    await s.shows("SmolLM2 360M")
    return s.app.screen


async def point_at(s: Any, title: str) -> None:
    table = s.app.screen.query_one("ModelTable")
    titles = [str(table.get_row_at(row)[1]) for row in range(table.row_count)]
    table.move_cursor(row=titles.index(title))
    await s.settled()


@pytest.fixture
def newcomer(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A runtime of somebody who has nothing but the bundled model."""
    runtime.entries = runtime.entries[:1]
    monkeypatch.setattr("app.network.offline", lambda: False)
    return runtime


async def test_a_first_run_tells_what_was_found_and_what_to_get(stage: Stage, newcomer: Any) -> None:
    async with stage(newcomer, size=(100, 30), model=None, ready=False) as s:
        await s.shows("Example 7840U, 8 cores", "You are chatting with demo, a tiny bundled model")
        await s.shows("Qwen3.5 4B suits this machine best", "Ask anything.")
        await s.say("Hello")
        await s.pilot.press("f2")
        await s.shows("Enter downloads it", "Recommended: the largest that needs no login")
        table = s.app.screen.query_one("ModelTable")
        assert [cell.plain for cell in table.get_row_at(table.cursor_row)][1::4] == ["Qwen3.5 4B", "best here"]
    async with stage(newcomer, size=(100, 30), model=None, ready=False) as s:
        await s.shows("You are chatting with demo, a tiny bundled model")
        s.app.post_message(QuantizeAsked(QuantizeRequest(source="owner/some-model")))
        await s.until(lambda: s.app.session.status.model == "some-model")
        await s.hides("You are chatting with demo")
        await s.shows("Ask anything.")


async def test_without_a_network_it_says_so_and_chats(
    stage: Stage, newcomer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.network.offline", lambda: True)
    async with stage(newcomer, size=(100, 30), model=None, ready=False) as s:
        await s.shows("There is no network, so nothing can be downloaded now. You are chatting with demo")
        await s.say("Hello")


async def test_whoever_has_models_is_greeted_as_ever(stage: Stage, runtime: Any) -> None:
    async with stage(runtime, model=None) as s:
        assert s.app.session.status.model == "tiny-3bit", "the only one of the user's own"
    runtime.entries.append(replace(runtime.entries[1], name="other"))
    async with stage(runtime, size=(100, 30), model=None, ready=False) as s:
        await s.shows("no model loaded")
        assert not s.app.session.newcomer
        assert "tiny bundled model" not in s.screen_text()


def test_the_hub_may_be_forbidden_and_a_proxy_is_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "https_proxy", "http_proxy", "all_proxy", "HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(network, "_reachable", lambda family, address: family == socket.AF_INET6)
    assert not network.offline()
    monkeypatch.setattr(network, "_reachable", lambda family, address: False)
    assert network.offline()
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    assert not network.offline()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert network.offline()


async def test_models_are_offered_with_what_they_take_here(stage: Stage, runtime: Any) -> None:
    async with stage(runtime, size=WIDE, ready=False) as s:
        await open_offers(s)
        await s.shows("Example 7840U, 8 cores · 21.4 GB free of 32.0 GB. Models run on the processor, which reads")
        await s.shows("55 · 62 · 68 MB", "best here")
        await point_at(s, "Qwen3 0.6B")
        await s.shows("Qwen/Qwen3-0.6B-GGUF by Qwen · Apache-2.0 · GGUF, 633 MB to download")
        await s.shows("Enter downloads it")
        await point_at(s, "Llama 3.2 1B")
        await s.shows("needs a login")
        await point_at(s, "Qwen3 1.7B")
        await s.open(QuantizeDialog, "q")
        name = s.app.screen.query_one(Input)
        assert name.value == "Qwen/Qwen3-1.7B-GGUF", "the dialog knows the model under the cursor"
        assert checkpoint_problem("owner/some-model") is None
        assert "Ollama has no model 'qwen' here" in str(checkpoint_problem("ollama:qwen"))
        name.value = "owner/some-model"
        await s.open(ConfirmDialog, "enter")
        await s.pilot.press("y")
        await s.until(lambda: s.app.session.status.model == "some-model")
        assert [one.source for one in runtime.named("quantize")] == ["owner/some-model"]


async def test_a_model_that_does_not_fit_now_is_not_fetched(stage: Stage, runtime: Any) -> None:
    runtime.free_bytes = 300_000_000
    async with stage(runtime, size=WIDE, ready=False) as s:
        await open_offers(s)
        await point_at(s, "Qwen3 8B")
        await s.shows("too large")
        await s.pilot.press("enter")
        await s.shows("more than is free now")
        assert isinstance(s.app.screen, ModelsScreen)
        assert runtime.named("quantize") == []


async def test_what_arrives_late_moves_neither_the_cursor_nor_the_list(stage: Stage, newcomer: Any) -> None:
    async with stage(newcomer, size=(100, 16), model=None) as s:
        client = s.app.session.client()
        prospects = client.prospects

        async def without_speeds() -> list[Prospect]:
            return [replace(one, tokens_per_s=None) for one in reversed(await prospects())]

        client.prospects = without_speeds
        await s.open(ModelsScreen, "f2")
        table = s.app.screen.query_one("ModelTable")
        await s.until(lambda: table.row_count > 5)
        assert table.cursor_row == 1
        await s.pilot.press(*["down"] * 15, "up", "up")
        row = table.get_row_at(table.cursor_row)[1]
        line, seen = table.cursor_row, table.cursor_row - table.scroll_offset.y
        client.prospects = prospects
        s.app.screen.refill()
        await s.until(lambda: "≈" in str(table.get_row_at(table.cursor_row)[4]))
        await s.settled()
        assert table.get_row_at(table.cursor_row)[1] == row
        assert table.cursor_row != line
        assert table.cursor_row - table.scroll_offset.y == seen


async def test_enter_fetches_makes_loads_and_chats(stage: Stage, runtime: Any) -> None:
    async with stage(runtime, size=WIDE, ready=False) as s:
        await open_offers(s)
        await point_at(s, "Qwen3 0.6B")
        for refuse in ("enter", "escape", "n"):
            await s.open(ConfirmDialog, "enter")
            await s.shows("633 MB", "of disk are free")
            await s.pilot.press(refuse)
            await s.until(lambda: isinstance(s.app.screen, ModelsScreen))
        assert not runtime.named("quantize")
        await s.open(ConfirmDialog, "enter")
        await s.pilot.press("y")
        await s.until(lambda: s.app.session.status.model == "Qwen3-0.6B-GGUF")
        await s.ready()
        assert [one.source for one in runtime.named("quantize")] == ["Qwen/Qwen3-0.6B-GGUF"]
        assert settings.load().model == "Qwen3-0.6B-GGUF"
        assert unfinished() is None
        await s.say("Hello")
        assert s.app.session.conversation.extras.model == "Qwen3-0.6B-GGUF"


async def test_what_is_said_meanwhile_keeps_its_model(stage: Stage, runtime: Any, tmp_path: Path) -> None:
    async with stage(runtime, size=WIDE, kept=tmp_path / "history.db") as s:
        runtime.load_gate = asyncio.Event()
        s.app.post_message(QuantizeAsked(QuantizeRequest(source="Qwen/Qwen3-0.6B")))
        await s.shows("✓ fetch  ▸ quantize  · load  · tune")
        await s.say("still there?")
        runtime.load_gate.set()
        told = "Qwen3-0.6B is ready: ^N starts a chat with it."
        await s.until(lambda: any(one.message == told for one in s.app._notifications), "word that it is made")
        assert s.app.session.status.model == "demo"
        assert settings.load().model == "Qwen3-0.6B", "the next start has it, too"
        s.app.clear_notifications()
        await s.shows("Qwen3-0.6B is ready: ^N")
        await s.pilot.press("ctrl+n")
        await s.until(lambda: s.app.session.status.model == "Qwen3-0.6B", "the model in the new chat")
        await s.hides("is ready")
        await s.say("and now?")
        assert s.app.session.conversation.extras.model == "Qwen3-0.6B"


async def test_a_setup_is_stopped_and_resumed(stage: Stage, runtime: Any) -> None:
    async with stage(runtime, size=WIDE) as s:
        runtime.load_delay_s = 60
        s.app.post_message(QuantizeAsked(QuantizeRequest(source="owner/some-model")))
        await s.shows("Getting some-model at 4 bits")
        await s.pilot.press("ctrl+t")
        await s.shows("finished steps are kept")
        assert runtime.cancelled == ["quantize"]
        runtime.load_delay_s = 0.0
        await s.click(".progress-action", offset=(1, 0))
        await s.until(lambda: s.app.session.status.model == "some-model")
        assert len(runtime.named("quantize")) == 2
        assert unfinished() is None


async def test_who_quits_meanwhile_is_asked_next_time(stage: Stage, runtime: Any) -> None:
    async with stage(runtime, size=WIDE) as s:
        runtime.load_delay_s = 60
        s.app.post_message(QuantizeAsked(QuantizeRequest(source="owner/some-model", bits=3.0)))
        await s.shows("Getting some-model at 3 bits")
    runtime.load_delay_s = 0.0
    async with stage(runtime, size=WIDE, ready=False) as s:
        await s.shows("Getting some-model at 3 bits stopped; finished steps are kept")
        await s.say("May I chat?")
        await s.pilot.press("escape")
        await s.hides("Getting some-model")
        assert unfinished() is None


def test_stages_follow_from_phases_and_are_never_gone_back_to() -> None:
    meter = Meter("Getting x", lambda: 0.0, stages=STAGES)
    phases = ("check", "download", "check", "quantize", "verify", "load", "compile", "tune", "load")
    seen = [meter.take(Progress(phase=phase, done=0, total=1, unit="", message="")).stage for phase in phases]
    assert seen == [0, 0, 0, 1, 1, 2, 2, 3, 3]
    assert meter.job.course == "✓ fetch  ✓ quantize  ✓ load  ▸ tune"

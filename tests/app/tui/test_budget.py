"""The slowdown budget: chosen, tuned during a chat, shown, cancelled, stored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from textual.widgets import Button, Collapsible, Input, RadioSet, Select

from app import settings
from app.settings import Settings
from app.tui.messages import QuantizeAsked
from app.tui.screens.settings import SettingsScreen
from app.tui.widgets.quality_chart import QualityChart, axis
from app.tui.widgets.setting_row import changes, effect
from runtime.errors import Problem
from runtime.wire.device import DeviceReport, Offer
from runtime.wire.requests import LoadRequest, QuantizeRequest, TuneRequest
from tests.grid import grid

Stage = Callable[..., Any]


async def open_settings(s: Any) -> Any:
    await s.pilot.press("f3")
    await s.until(lambda: isinstance(s.app.screen, SettingsScreen) and s.app.screen.query(RadioSet))
    await s.settled()
    return s.app.screen


async def choose(s: Any, *keys: str) -> None:
    await s.pilot.press(*keys, "enter")


async def leave(s: Any) -> None:
    """Back to the chat."""
    await s.pilot.press("escape")
    await s.until(lambda: s.app.screen is s.app.chat)


async def test_a_budget_is_applied_at_once_without_a_reload_and_kept(stage: Stage, runtime: Any) -> None:
    async with stage(runtime, size=(120, 40)) as s:
        screen = await open_settings(s)
        await leave(s)
        assert s.app.session.settings.budget is settings.load().budget is None, "the default was left alone"
        assert runtime.named("tune") == []
        screen = await open_settings(s)
        await s.shows("wins back about half of the lost quality", "4.2 % slower, measured")
        await s.shows("quality won back by slowdown", "▲5 %", "66.7 %")  # the end of the curve
        await choose(s, "right")
        await s.until(lambda: runtime.status.budget_percent == 10 and not s.app.session.working)
        await s.shows("8.4 % slower, measured", "budget 10 %")
        assert runtime.named("tune") == [TuneRequest(budget=10.0)]
        assert len(runtime.named("load")) == 1
        assert settings.load().budget == 10
        screen.query_one("#setting-top_k Input", Input).value = "7"
        await s.pilot.press("f4")  # another screen takes along what was typed
        await s.until(lambda: s.app.session.settings.top_k == 7)
        await leave(s)
        await s.say("hi")
        s.transcript.view(s.last.id).action_toggle_details()
        await s.shows("error compensation: 82 to 96 of 1,024 channels (k_chunk), 8.4 % slower")


async def test_off_compensates_nothing_and_says_so(stage: Stage, runtime: Any) -> None:
    async with stage(runtime) as s:
        await open_settings(s)
        await choose(s, "left", "left")
        await s.shows("no compensation: plain low-bit model", "budget off")
        await s.pilot.press("escape")
        await s.say("hi")
        await s.hides("slowdown")


async def test_the_last_stop_is_exact(stage: Stage, runtime: Any) -> None:
    async with stage(runtime, size=(120, 40)) as s:
        screen = await open_settings(s)
        runtime.tune_delay_s = 600
        await choose(s, "left", "left", "left")
        await s.shows("Loading the full-precision weights")
        await leave(s)
        await s.ask("hi")
        await s.settled()
        assert runtime.named("chat") == [], "it waits for the model"
        await s.pilot.press("ctrl+t")
        await s.answered()
        assert s.last.state == "done", "the prompt loaded it"
        runtime.tune_delay_s = 0
        await open_settings(s)
        await s.shows("as full precision, token for token", "demo · 4-bit · exact")
        await s.hides("A chart appears")
        assert settings.load().budget == "exact"
        assert runtime.named("tune") == [TuneRequest(budget="exact")]
        await s.pilot.press("f4")
        await s.shows("Answers are exact (F3)")
        await s.pilot.press("r")
        await s.until(lambda: any("nothing to tune" in note.message for note in s.app._notifications))
        await leave(s)
        await leave(s)
        for budget in ("10", "exact"):
            s.composer.load_text(f"/budget {budget}")
            await s.pilot.press("enter")
            await s.until(lambda budget=budget: str(runtime.status.budget).removesuffix(".0") == budget)
    async with stage(runtime, budget="exact") as s:
        assert runtime.named("load")[-1] == LoadRequest(model="demo", budget="exact", or_usual=True, num_parallel=2)
        screen = await open_settings(s)
        assert screen.query_one(RadioSet).pressed_index == 6


async def test_a_model_that_cannot_be_exact_answers_with_the_usual_budget(stage: Stage, runtime: Any) -> None:
    why = "demo does not answer exactly, as the settings want"
    runtime.inexact = Problem(what=why, fix="choose another budget")
    async with stage(runtime, size=(120, 40), budget="exact") as s:
        await s.until(lambda: any(note.message == f"{why}: choose another budget" for note in s.app._notifications))
        await s.shows("budget 5 %")
        await s.say("hi")
        assert s.last.state == "done"
        await open_settings(s)
        await s.shows("Not applied yet: still 5 %", "settings want → choose another budget")
        await s.pilot.press("f4", "r")
        await s.shows(f"failed: {why}")


async def test_a_custom_budget_is_checked(stage: Stage, runtime: Any) -> None:
    async with stage(runtime) as s:
        screen = await open_settings(s)
        field = screen.query_one("#setting-budget Input", Input)
        assert not field.visible
        await choose(s, "right", "right", "right")
        await s.until(lambda: field.has_focus)
        assert runtime.named("tune") == []
        for bad in ("", "101", "-1", "much"):
            field.value = bad
            await s.pilot.press("enter")
            await s.shows("it must be a number from 0 to 100")
        field.value = "7.5 %"
        await s.pilot.press("enter")
        await s.until(lambda: runtime.status.budget_percent == 7.5)
        await s.hides("allowed")
        assert settings.load().budget == 7.5
    async with stage(runtime, budget=7.5) as s:
        assert runtime.named("load")[-1] == LoadRequest(model="demo", budget=7.5, num_parallel=2)
        screen = await open_settings(s)
        assert screen.query_one("#setting-budget Input", Input).value == "7.5"
        assert screen.query_one("#setting-budget Input", Input).visible


async def test_k_chunk_overrides_the_budget(stage: Stage, runtime: Any) -> None:
    async with stage(runtime, size=(100, 40)) as s:
        screen = await open_settings(s)
        screen.query_one("#setting-k_chunk Input", Input).value = "64"
        screen.query_one("#setting-k_chunk Input", Input).focus()
        await s.pilot.press("enter")
        await s.until(lambda: runtime.status.k_chunk["qkv"] == 64)
        await s.shows("k_chunk 64, set below, overrides the budget", "demo · 4-bit · k_chunk 64")
        screen.query_one(RadioSet).focus()
        await choose(s, "right")
        await s.until(lambda: settings.load().budget == 10)
        await s.settled()
        assert [call.k_chunk for call in runtime.named("tune")] == [64]
        screen.query_one("#setting-k_chunk Input", Input).value = "auto"
        await s.pilot.press("escape")
        await s.until(lambda: runtime.status.budget_percent == 10)
        assert len(runtime.named("load")) == 1


async def test_the_chat_waits_for_the_tuning_and_says_so(stage: Stage, runtime: Any) -> None:
    runtime.tune_delay_s = 600
    async with stage(runtime, size=(120, 40)) as s:
        screen = await open_settings(s)
        await choose(s, "right")
        await s.shows("Tuning for a budget of 10 % · timing qkv", "A new budget is being applied")
        await s.shows("10 % slower at most wins back about half")  # before it is applied
        assert screen.query_one(QualityChart).size.height == 6
        await leave(s)
        await s.shows("0 of 4 layer types")
        await s.ask("take this back")
        await s.pilot.press("escape")
        await s.answered()
        assert s.last.state == "stopped"
        assert s.app.session.tuning
        await s.ask("hi")
        await s.shows("waiting for the tuning to end")
        await s.pilot.press("ctrl+t")
        await s.answered()
        assert s.last.state == "done"
        assert runtime.cancelled == ["chat", "tune"]
        await s.shows("Tuning for a budget of 10 % stopped")
        s.transcript.view(s.last.id).action_toggle_details()
        await s.shows("error compensation: 41 to 48 of 1,024 channels (k_chunk)")
        await open_settings(s)
        await s.shows("Not applied yet: still 5 %")
        await choose(s, "right")
        await s.until(lambda: s.app.session.tuning)
        await leave(s)
        await s.pilot.press("escape")
        await s.until(lambda: not s.app.session.working)
        assert runtime.cancelled == ["chat", "tune", "tune"]


async def test_a_budget_changed_during_an_answer_waits_for_its_end(stage: Stage, runtime: Any) -> None:
    runtime.answers = ["one two three four"]
    runtime.hold_after = 2
    async with stage(runtime, size=(100, 30)) as s:
        await s.ask("count")
        await s.until(lambda: "one two" in s.last.text)
        await open_settings(s)
        await choose(s, "right")
        await s.shows("waiting for the answer to end")
        assert s.last.state == "streaming"
        await leave(s)
        await s.pilot.press("escape")
        await s.until(lambda: runtime.status.budget_percent == 10)
        assert s.last.state == "stopped"
        assert s.last.text == "one two"


async def test_the_newest_budget_wins_even_when_the_runtime_dies(stage: Stage, runtime: Any) -> None:
    runtime.tune_delay_s = 600
    async with stage(runtime, size=(100, 30)) as s:
        await open_settings(s)
        await choose(s, "right")
        await s.until(lambda: s.app.session.tuning)
        runtime.tune_delay_s = 0
        await choose(s, "right")
        await s.until(lambda: runtime.status.budget_percent == 20)
        await s.until(lambda: not s.app.session.working and not s.app.session.tuning)
        assert [call.budget for call in runtime.named("tune")] == [10, 20]
        assert settings.load().budget == 20
        runtime.tune_delay_s = 600
        await choose(s, "left")
        await s.until(lambda: s.app.session.tuning)
        runtime.die()
        await s.app.session.stop_work()
        await s.until(lambda: runtime.starts == 2 and s.app.session.ready and not s.app.session.working)
        assert runtime.named("load")[-1].budget == 10


async def test_a_failed_tuning_is_told_and_the_setting_stays(stage: Stage, runtime: Any) -> None:
    runtime.tune_error = "the model has no residuals: quantize it again with residual_bits 4"
    async with stage(runtime, size=(120, 30)) as s:
        await open_settings(s)
        await choose(s, "right")
        await s.shows("failed: the model has no residuals: quantize it again")
        assert settings.load().budget == 10
        await s.pilot.press("escape")
        await s.say("hi")
        assert s.last.state == "done"
        assert runtime.starts == 1


async def test_other_work_is_not_stopped_by_a_new_budget(stage: Stage, runtime: Any, tmp_path: Any) -> None:
    runtime.load_gate = asyncio.Event()
    async with stage(runtime, size=(100, 30), ready=False) as s:
        await s.until(lambda: s.app.session.working)
        await open_settings(s)
        await choose(s, "right")
        await s.until(lambda: settings.load().budget == 10)
        await s.settled()
        assert runtime.named("tune") == []
        runtime.load_gate.set()
        await s.until(lambda: runtime.status.budget_percent == 10, "the budget to be applied after the load")
        assert [call.model for call in runtime.named("load")] == ["demo"]
        assert runtime.cancelled == []
        await s.ready()
        runtime.load_delay_s = 600
        s.app.post_message(QuantizeAsked(QuantizeRequest(source=str(tmp_path))))
        await s.until(lambda: s.app.session.working)
        tuned = len(runtime.named("tune"))
        await choose(s, "right")
        await s.until(lambda: settings.load().budget == 20)
        await s.settled()
        assert s.app.session.working
        assert len(runtime.named("tune")) == tuned
        await s.pilot.press("ctrl+t")
        await s.until(lambda: runtime.status.budget_percent == 20)
        assert runtime.cancelled == ["quantize"]


def test_the_effect_in_words(runtime: Any) -> None:
    status = replace(
        runtime.status, state="ready", model="demo", budget_percent=5.0, k_chunk={"qkv": 16, "o": 16}, backend="cpu"
    )
    lines = effect(Settings(), status, None, speed=None, tuning=False)
    assert lines == [
        "closer to full precision; details: F4",
        "slowdown not measured",
        "tok/s: after the next answer",
    ]
    measured = DeviceReport(machine={}, lost_percent=3.94)
    lines = effect(Settings(), status, measured, speed=None, tuning=False)
    assert lines[1] == "perplexity 3.9 % above full precision's"
    assert effect(Settings(), None, None, speed=None, tuning=False) == [
        "Its effect is shown here once a model is loaded."
    ]
    assert effect(Settings(budget=20.0), status, None, speed=9.04, tuning=False)[0].startswith("Not applied yet")
    assert effect(Settings(), status, None, speed=9.04, tuning=False)[-1] == "9.0 tok/s in the last answer"


async def test_what_few_people_change_is_folded_until_they_do(stage: Stage, runtime: Any) -> None:
    for given, folded in (({}, True), ({"num_parallel": 2}, False)):
        async with stage(runtime, size=(120, 60), **given) as s:
            screen = await open_settings(s)
            assert screen.query_one("#settings-advanced", Collapsible).collapsed is folded
            assert ("requests answered at the same time" in s.screen_text()) is not folded
            assert "context" in s.screen_text()


async def test_nothing_jumps_while_a_budget_is_chosen(stage: Stage, runtime: Any) -> None:
    async with stage(runtime, size=(120, 40)) as s:
        screen = await open_settings(s)
        await s.shows("▲5 %")

        def places() -> list[int]:
            return [screen.query_one(f"#setting-{key}").region.y for key in ("prompt_budget", "kv", "context")]

        before = places()
        for _ in range(4):  # 2.5 %, off, exact, custom
            await choose(s, "left")
            await s.settled()
            assert places() == before
        await s.until(lambda: screen.query_one("#setting-budget Input", Input).visible)
        screen.query_one("#setting-kv Select", Select).value = "int8"
        await s.shows("% of fp16")
        assert places() == before


async def test_an_offer_is_taken_up(stage: Stage, runtime: Any) -> None:
    async with stage(runtime, size=(120, 40)) as s:
        screen = await open_settings(s)
        await s.shows("within 0.3 % of full precision and 11 % slower than low bits")
        await s.click("#offer-take")
        await s.shows("in use: within 0.3 %")
        assert screen.query_one("#offer-take", Button).disabled
        await s.shows("the model is reloaded when you leave this screen")
        await s.pilot.press("escape")
        await s.until(lambda: len(runtime.named("load")) == 2)
        asked = runtime.named("load")[-1]
        assert (asked.kv, asked.speculate, asked.k_chunk) == ("hierarchical", None, None), "the load finds the best way"
        kept = settings.load()
        assert (kept.kv, kept.speculate, kept.k_chunk) == ("hierarchical", "auto", None)


def test_what_takes_an_offer_up() -> None:
    drafted = {"k_chunk": "auto", "kv": "hierarchical", "speculate": "auto"}
    assert changes(Offer(words="", target="compensated", gamma=3)) == drafted
    assert changes(Offer(words="", target="residual", gamma=0)) == {"k_chunk": "auto"}


def test_where_the_mark_of_a_budget_stands() -> None:
    assert axis(30, 12.0, 5.0) == "0" + "─" * 11 + "▲5 %" + "─" * 10 + "12 %"
    assert axis(30, 12.0, 40.0).endswith("40 %▲")
    assert axis(30, 12.0, None) == "0" + "─" * 25 + "12 %"
    assert all(len(axis(30, 12.0, budget / 4)) == 30 for budget in range(100))


@pytest.mark.parametrize("size", grid([(80, 24), (40, 15)], {(40, 15)}))
async def test_the_first_field_is_the_budget(stage: Stage, runtime: Any, size: tuple[int, int]) -> None:
    async with stage(runtime, size=size) as s:
        screen = await open_settings(s)
        assert screen.focused is screen.query_one(RadioSet)
        await s.shows("custom")

"""The device screen: with nothing loaded, without a tuning, while tuning, and with curves."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from textual.events import Key
from textual.widgets import Sparkline

from app import settings
from app.amounts import prompt_words
from app.tui.answers import KEPT, Recent
from app.tui.machine import chosen_curve, layer_rows, machine_lines, tuning_lines
from app.tui.screens.device import DeviceScreen
from app.tui.widgets.knee_chart import KneeChart, at, axis, plot
from runtime.errors import Problem
from runtime.wire.device import DeviceReport, PromptTuning
from runtime.wire.requests import TuneRequest
from tests.app.tui.conftest import tuned
from tuner.curve import Curve
from tuner.placement import ExpertPlacement

Stage = Callable[..., Any]


async def open_device(s: Any) -> Any:
    await s.pilot.press("f4")
    await s.until(lambda: isinstance(s.app.screen, DeviceScreen) and s.app.screen.query(Sparkline))
    return s.app.screen


async def test_everything_that_is_known_is_shown(stage: Stage, runtime: Any) -> None:
    runtime.problems = [Problem(what="memory cannot be locked", fix="raise the memlock limit")]
    async with stage(runtime, size=(120, 45)) as s:
        await s.say("hi")
        screen = await open_device(s)
        await s.until(lambda: len(screen.query(KneeChart)) == 4)
        for words in (
            "Example 7840U · 8 of 8 cores · kernels for avx512_vnni", "none found", "21.4 GB free of 32.0 GB",
            "41.3 GB/s", "! memory cannot be locked", "→ raise the memlock limit", "58.1 tok/s in the last answer",
            "812 MB held", "4.6 % predicted · 4.2 % measured", "in 42 s", "o · k_chunk 41",
            "▲41", "1.00×", "F4 device",
        ):  # fmt: skip
            await s.shows(words)
        assert re.search(r"gate_up +44", s.screen_text())
        await s.click("#header-settings")
        await s.until(lambda: not isinstance(s.app.screen, DeviceScreen))
        await s.pilot.press("escape")
        await s.until(lambda: s.app.screen is s.app.chat)
        await s.click("#header-device")
        await s.until(lambda: isinstance(s.app.screen, DeviceScreen), "the screen, which the header opens, too")
        await s.pilot.press("escape")
        await s.until(lambda: s.app.screen is s.app.chat)


async def test_without_a_runtime_it_says_why(stage: Stage, runtime: Any) -> None:
    runtime.start_error = "the runtime ended at once"
    async with stage(runtime, size=(100, 30), ready=False) as s:
        await s.until(lambda: s.app.session.problem)
        await open_device(s)
        await s.until(lambda: s.screen_text().count("the runtime ended at once") == 2)
        await s.pilot.press("r")
        await s.settled()
        assert runtime.named("tune") == []


async def test_without_a_model_it_says_how_to_get_one(stage: Stage, runtime: Any) -> None:
    runtime.entries.append(replace(runtime.entries[1], name="other"))
    async with stage(runtime, size=(100, 30), model=None, ready=False) as s:
        await s.until(lambda: s.app.session.status is not None)
        await open_device(s)
        await s.shows("No model is loaded; F2 picks one.", "Example 7840U")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"k_chunk": 32}, "k_chunk 32 is set manually (F3), so the budget has no effect."),
        ({"budget": 0.0}, "The budget is off (F3)"),
    ],
)
async def test_what_is_not_tuned_says_why_and_is_not_retuned(
    stage: Stage, runtime: Any, values: dict[str, Any], words: str
) -> None:
    async with stage(runtime, size=(100, 30), **values) as s:
        await open_device(s)
        await s.until(lambda: words in s.screen_text())
        await s.pilot.press("r")
        await s.settled()
        assert runtime.named("tune") == []


async def test_a_model_that_cannot_be_tuned(stage: Stage, runtime: Any) -> None:
    runtime.untunable = Problem(what="demo was stored without residuals", fix="quantize it again")
    async with stage(runtime, size=(100, 30)) as s:
        await open_device(s)
        await s.shows("Not tuned, for the reason above.", "! demo was stored without residuals")
        await s.pilot.press("f3")
        await s.shows("demo was stored without residuals → quantize it again")
        await s.pilot.press("right", "enter")
        await s.until(lambda: settings.load().budget == 10 and not s.app.session.working)
        await s.until(lambda: any("without residuals" in note.message for note in s.app._notifications))


async def test_retuning_measures_again_and_can_be_stopped(stage: Stage, runtime: Any) -> None:
    async with stage(runtime, size=(100, 30), budget=10) as s:
        s.app.post_message(Key("f4", None))
        s.app.post_message(Key("r", "r"))  # typed right after the screen was asked for: it reaches it
        await s.until(lambda: runtime.named("tune") and not s.app.session.working)
        assert s.composer.text == ""
        await s.shows("8.4 % measured")
        assert runtime.named("tune") == [TuneRequest(budget=10.0, force=True)]
        runtime.tune_delay_s = 600
        await s.pilot.press("r")
        await s.shows("timing qkv", "8.4 % measured")
        await s.pilot.press("s")
        await s.until(lambda: not s.app.session.working)
        assert runtime.cancelled == ["tune"]


async def test_it_follows_the_tuning_and_the_size(stage: Stage, runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.tui.app.CHECK_INTERVAL_S", 0.1)
    async with stage(runtime, size=(100, 40)) as s:
        runtime.tuning = replace(runtime.tuning, k_chunk=dict.fromkeys(runtime.tuning.k_chunk, 7))
        screen = await open_device(s)
        await s.shows("qkv · k_chunk 7")
        await s.pilot.press("r")
        await s.shows("qkv · k_chunk 48")
        await s.until(lambda: not s.app.session.working)
        refined = dict.fromkeys(runtime.tuning.k_chunk, 9)  # in the background
        runtime.tuning = replace(runtime.tuning, k_chunk=refined, refined=True)
        runtime.status = replace(runtime.status, k_chunk=refined)
        await s.shows("qkv · k_chunk 9", "refined on a text")
        await s.pilot.resize_terminal(40, 15)
        await s.settled()
        await s.pilot.press("end")
        await s.shows("down · k_chunk 9")
        assert all(chart.size.width <= 38 for chart in screen.query(KneeChart))


def test_a_graphics_card_and_its_link_in_words() -> None:
    machine = {
        "gpu": {
            "name": "RTX 4050M", "memory_total_bytes": 6_000_000_000, "memory_free_bytes": 4_900_000_000,
            "compute_capability": "8.9", "driver": "570.1",
            "pcie": {"generation": 4, "lanes": 8, "gb_s": 15.8},
        },
        "cpu": {}, "memory": None, "backend": "triton",
    }  # fmt: skip
    experts = ExpertPlacement(on_device=34, held=128, host_bytes=12 << 30, hit_rate=0.714)
    report = DeviceReport(machine=machine, bandwidth_gb_s=189.04, experts=experts, cache="int8 · its numbers")
    lines = dict(machine_lines(report))
    assert lines["GPU"] == "RTX 4050M · 4.9 GB free of 6.0 GB · compute 8.9 · driver 570.1"
    assert lines["PCIe"] == "4.0 ×8 · 15.8 GB/s at most"
    assert lines["bandwidth"] == "189.0 GB/s read, measured"
    assert (lines["runs on"], lines["cache"]) == ("triton", "int8 · its numbers")
    where = "34 of 128 of each block on the card, 12.9 GB of others in main memory"
    assert lines["experts"] == f"{where}; 71 % of those chosen lately were on the card"
    uncounted = replace(report, experts=replace(experts, hit_rate=None))
    assert dict(machine_lines(uncounted))["experts"] == where
    assert dict(machine_lines(DeviceReport(machine={}))) == {"GPU": "none found", "bandwidth": "not measured yet"}


def test_thread_blocks_are_shown_where_there_are_any(runtime: Any) -> None:
    found = replace(tuned(5.0), n_tb={"qkv": 8, "o": 4})
    assert layer_rows(found)[:3] == [["layer", "n_tb", "k_chunk"], ["qkv", "8", "48"], ["o", "4", "41"]]
    assert layer_rows(found)[3][1] == "–"
    assert layer_rows(tuned(5.0))[0] == ["layer", "k_chunk"]
    apart = replace(found, k_chunk={**found.k_chunk, "layers.29.qkv": 64})
    assert layer_rows(apart)[-1] == ["qkv of block 29", "8", "64"]
    assert dict(tuning_lines(found))["slowdown"] == "4.6 % predicted · 4.2 % measured"
    assert "prompts" not in dict(tuning_lines(found))
    prompts = PromptTuning(budget_percent=20, k_chunk=1024, measured_slowdown_percent=7.64, tokens=512)
    assert dict(tuning_lines(found, prompts))["prompts"] == prompt_words(prompts)
    curves = [Curve(kind="qkv", n_tb=n_tb, points=((0, 1.0),)) for n_tb in (2, 8, 24)]
    assert chosen_curve(curves, 8).n_tb == 8


def picture(cells: list[list[int]]) -> list[str]:
    return ["".join(chr(0x2800 + cell) for cell in row) for row in cells]


def test_a_curve_is_drawn_with_dots() -> None:
    assert picture(plot([((0, 1.0), (8, 1.0))], 4, 1, 8, (1.0, 2.0))) == ["⣀⣀⣀⣀"]
    assert picture(plot([((0, 1.0), (8, 2.0))], 2, 1, 8, (1.0, 2.0))) == ["⡠⠊"]
    assert picture(plot([((0, 1.0), (8, 2.0))], 2, 2, 8, (1.0, 2.0))) == ["⠀⡜", "⡰⠁"]
    assert picture(plot([((0, 9.0), (8, 9.0))], 2, 1, 8, (1.0, 2.0))) == ["⠀⠀"]
    assert picture(plot([((0, 1.0), (4, 1.0))], 4, 1, 8, (1.0, 2.0))) == ["⣀⣀⠀⠀"]
    assert picture(plot([], 2, 1, 8, (1.0, 2.0))) == ["⠀⠀"]


def test_a_curve_is_linear_between_its_points() -> None:
    points = ((0, 1.0), (4, 3.0), (4, 5.0))
    assert at(points, 2) == 2.0
    assert at(points, 5) is None
    assert at(((8, 1.5),), 8) == 1.5
    assert at((), 0) is None


@pytest.mark.parametrize(
    ("k_chunk", "text"),
    [(None, "0───────────128"), (50, "0────▲50────128"), (127, "0──────────127▲"), (1, "▲1──────────128")],
)
def test_the_axis_marks_what_was_chosen(k_chunk: int | None, text: str) -> None:
    assert axis(15, 128, k_chunk) == text


def test_speeds_are_averaged_and_forgotten() -> None:
    recent = Recent()
    recent.begin()
    for tenth in range(31):
        recent.count(5 + tenth / 8)
    assert list(recent.speeds) == [8.0, 8.0, 8.0]
    recent.begin()
    recent.count(1000.0)
    recent.count(1002.0)
    assert recent.speeds[-1] == 0.5
    recent.hold(None)
    for number in range(KEPT + 5):
        recent.hold(number)
    assert (len(recent.memory), recent.memory[0]) == (KEPT, 5)

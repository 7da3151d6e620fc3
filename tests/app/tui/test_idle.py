"""Unloading of an idle model, and a machine that was suspended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from app import paths
from app.settings import Settings
from app.supervisor import Supervisor
from app.tui.app import ChatApp, _own_supervisor
from app.tui.messages import LoadAsked
from app.tui.terminal import LONG_S, NO_PROGRESS, LongWork, SuspendDetector

Stage = Callable[..., Any]


def rest(runtime: Any) -> None:
    """As the runtime does when a model was not used for long."""
    runtime.status = replace(runtime.status, state="empty", model=None, bits=None)


async def test_a_model_that_rests_wakes_when_something_is_said(stage: Stage, runtime: Any) -> None:
    async with stage(runtime, size=(100, 30)) as s:
        rest(runtime)
        await s.app.session.refresh()
        await s.shows("demo unloaded; loads when you write")
        await s.say("Are you there?")
        assert s.last.state == "done"
        assert [call.model for call in runtime.named("load")] == ["demo", "demo"]
        await s.ask("And again?")  # in the same chat, which belongs to its model now
        await s.answered()
        rest(runtime)
        await s.app.session.refresh()
        await s.say("And now?")
        assert s.last.state == "done"
        assert len(runtime.named("load")) == 3


async def test_a_model_that_failed_does_not_count_as_resting(stage: Stage, runtime: Any) -> None:
    runtime.load_error = "not enough memory"
    async with stage(runtime, size=(100, 30), ready=False) as s:
        await s.until(lambda: s.app.session.problem)
        assert not s.app.session.resting
        await s.shows("not enough memory")


@pytest.mark.parametrize(("backend", "starts"), [("triton", 2), ("cpu", 1)])
async def test_what_ran_on_a_card_is_started_again_after_a_sleep(
    stage: Stage, runtime: Any, backend: str, starts: int
) -> None:
    async with stage(runtime, size=(100, 30)) as s:
        runtime.status = replace(runtime.status, backend=backend)
        await s.app.session.refresh()
        s.app._suspend.suspended_s = lambda: 3600.0
        await s.app._check()
        await s.ready()
        assert runtime.starts == starts
        assert s.app.session.status.model == "demo"


def test_suspends_are_told_from_busy_machines() -> None:
    running, day = [0.0], [1000.0]
    detector = SuspendDetector(5.0, lambda: running[0], lambda: day[0])

    def after(ran: float, passed: float) -> float | None:
        running[0] += ran
        day[0] += passed
        return detector.suspended_s()

    assert after(5, 5) is None
    assert after(12, 12) is None  # a busy machine
    assert after(5, 3605) == 3600  # Linux: the running clock stands still in a suspend
    assert after(3600, 3600) == 3590  # elsewhere: both go on, and nobody looked
    assert after(5, -3600) is None  # the time of day was set back
    assert after(5, 5) is None


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="only Linux has a clock that tells them apart")
def test_a_process_that_was_stopped_was_not_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    running = [0.0]
    monkeypatch.setattr(time, "clock_gettime", lambda _: running[0])
    detector = SuspendDetector(5.0, lambda: running[0])
    running[0] += 3600
    assert detector.suspended_s() is None


async def test_the_end_of_long_work_is_told_to_who_looks_elsewhere(stage: Any, runtime: Any) -> None:
    """Checked by hand instead of every five seconds: a long answer, one while the user looks, a short one."""
    async with stage(runtime) as s:
        clock, written = [0.0], list[str]()
        s.app._long = LongWork(lambda: clock[0])
        s.app._driver.write = written.append
        for seconds, looking in ((LONG_S, False), (LONG_S, True), (1.0, False)):
            runtime.hold_after = 0
            runtime.released.clear()
            await s.pilot.press("h", "i", "enter")
            await s.until(lambda: s.app.session.answers.any)
            s.app._ring()
            clock[0] += seconds
            runtime.released.set()
            await s.until(lambda: not s.app.session.answers.any)
            s.app.app_focus = looking
            s.app._ring()
    assert "\x1b]2;hi · lowbit-chat\x1b\\" in written, "the window's title"
    assert [text for text in written if "\x1b]9;" in text] == ["\x1b]9;lowbit-chat has finished\x07\a"]


@pytest.mark.parametrize("outcome", ["done", "failed", "stopped"])
async def test_the_window_is_marked_with_the_progress_of_work(
    stage: Any, runtime: Any, monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    monkeypatch.setenv("WT_SESSION", "{1}")
    monkeypatch.delenv("TMUX", raising=False)
    async with stage(runtime) as s:
        written = list[str]()
        s.app._driver.write = written.append
        runtime.load_gate = asyncio.Event()
        runtime.load_error = "no" if outcome == "failed" else None
        s.app.post_message(LoadAsked("tiny-3bit"))
        await s.until(lambda: "\x1b]9;4;1;67\x07" in written)
        if outcome == "stopped":
            await s.app.session.stop_work()
        runtime.load_gate.set()
        await s.until(lambda: not s.app.session.working and s.app.session.job.outcome == outcome)
        await s.until(lambda: written[-1] == NO_PROGRESS)
        marks = [text for text in written if "\x1b]9;4" in text]
    percents = (0, 33, 67, 100) if outcome == "done" else (0, 33, 67)
    possible = [*(f"\x1b]9;4;1;{percent}\x07" for percent in percents), NO_PROGRESS]
    assert marks == [mark for mark in possible if mark in marks], "steps between two frames may be missing"


def test_the_runtime_is_told_when_to_unload() -> None:
    def told(settings: Settings) -> object:
        found = _own_supervisor(settings)
        assert isinstance(found, Supervisor)
        return found._idle_minutes, found._max_models

    assert told(Settings()) == (30, 3)
    assert told(Settings(idle_unload=0)) == (0, 3)
    assert told(Settings(idle_unload=5, max_models=1)) == (5, 1)


async def test_a_real_runtime_unloads_and_wakes() -> None:
    settings = Settings(model="demo", budget=0, prompt_budget=0)
    app = ChatApp(settings, supervisor=lambda: Supervisor(paths.home(), idle_minutes=1 / 60))
    async with app.run_test(size=(100, 30)) as pilot:
        session = app.session

        async def until(predicate: Callable[[], object]) -> None:
            for _ in range(1200):
                if predicate():
                    return
                await session.refresh()
                await pilot.pause(0.05)
            raise AssertionError(f"waited in vain; {session.status} {session.job}")

        await until(lambda: session.resting)
        app.chat.composer.load_text("hello")
        await pilot.press("enter")
        await until(lambda: session.conversation.head and session.conversation.path()[-1].state != "streaming")
        assert session.conversation.path()[-1].state == "done"
        assert session.conversation.path()[-1].text

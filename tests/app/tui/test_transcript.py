"""The transcript: following the end, scrolling away, the window of mounted messages, resizing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from app.tui import window
from tests.grid import grid

Stage = Callable[..., Any]

LONG = "\n\n".join(f"Paragraph {n} with a few words in it." for n in range(40))
FIRST, STEP, MOST = 8, 4, 14


@pytest.fixture(autouse=True)
def _small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer messages at once than a person gets: mounting them is what takes the time."""
    for name, count in (("FIRST", FIRST), ("STEP", STEP), ("MOST", MOST)):
        monkeypatch.setattr(window, name, count)


def fill(s: Any, count: int) -> None:
    conversation = s.app.session.conversation
    for n in range(count // 2):
        user = conversation.add("user", f"question {n}", parent=conversation.head)
        conversation.add("assistant", f"answer {n}\n\nand more", parent=user.id)


async def test_it_follows_the_end_or_stays_where_the_person_scrolled_to(stage: Stage, runtime: Any) -> None:
    runtime.answers = [LONG]
    async with stage(runtime) as s:
        await s.say("warm up")
        await s.until(lambda: s.transcript.following and s.transcript.max_scroll_y > 20)
        await s.shows("412 tokens")
        runtime.hold_after = 60
        await s.ask("go")
        await s.until(lambda: "Paragraph 6" in s.screen_text() and s.transcript.following, "the first part")
        await s.pilot.press("pageup", "pageup")
        await s.settled()
        place, height = s.transcript.scroll_y, s.transcript.max_scroll_y
        runtime.released.set()
        await s.until(lambda: s.transcript.max_scroll_y > height + 10)
        assert s.transcript.scroll_y == place
        await s.answered()
        assert s.transcript.scroll_y == place
        await s.pilot.press("ctrl+end")
        await s.until(lambda: s.transcript.following)


async def test_a_short_chat_stands_at_the_top(stage: Stage, runtime: Any) -> None:
    async with stage(runtime) as s:
        await s.say("hi")
        assert s.transcript.scroll_y == 0
        assert s.screen_text().splitlines()[2].split()[:2] == ["▌", "you"]


async def test_a_tall_terminal_is_filled_when_a_long_chat_is_opened(stage: Stage, runtime: Any) -> None:
    async with stage(runtime, size=(100, 50)) as s:
        fill(s, 24)
        path = [message.id for message in s.app.session.conversation.path()]
        await s.transcript.reopen()
        await s.until(
            lambda: len(s.transcript.mounted) + STEP > MOST or s.transcript.max_scroll_y > 25, "more messages"
        )
        await s.settled()
        assert s.transcript.mounted[-1] == path[-1]
        assert len(s.transcript.mounted) > FIRST
        assert s.transcript.following
        await s.shows("answer 11")


async def test_only_a_window_of_a_long_chat_is_mounted(stage: Stage, runtime: Any) -> None:
    async with stage(runtime) as s:
        fill(s, 24)
        path = [message.id for message in s.app.session.conversation.path()]
        await s.transcript.reopen()
        await s.settled()
        assert s.transcript.mounted == path[-FIRST:]
        seen = set(s.transcript.mounted)
        for _ in range(60):
            await s.pilot.press("pageup")
            await s.settled()
            await s.until(lambda: not s.transcript._moving, "the window to be moved")
            mounted = s.transcript.mounted
            assert len(mounted) <= MOST
            assert mounted == path[path.index(mounted[0]) : path.index(mounted[-1]) + 1]
            seen |= set(mounted)
            if mounted[0] == path[0] and s.transcript.scroll_y == 0:
                break
        assert seen == set(path)
        await s.shows("question 0")
        for _ in range(60):
            await s.pilot.press("pagedown")
            await s.settled()
            await s.until(lambda: not s.transcript._moving, "the window to be moved")
            if s.transcript.mounted[-1] == path[-1] and s.transcript.following:
                break
        await s.shows("answer 11")
        assert len(s.transcript.mounted) <= MOST


async def test_what_is_in_sight_stays_when_earlier_messages_are_mounted(stage: Stage, runtime: Any) -> None:
    async with stage(runtime) as s:
        fill(s, 24)
        await s.transcript.reopen()
        await s.settled()
        first = s.transcript.mounted[0]
        s.transcript.scroll_to(y=3, animate=False)
        await s.settled()
        await s.until(lambda: s.transcript.mounted[0] != first)
        await s.settled()
        view = s.transcript.view(first)
        assert abs(view.region.y - s.transcript.region.y + 3) <= 2
        for _ in range(30):
            if s.transcript.mounted[-1] != s.last.id:
                break
            await s.pilot.press("pageup")
            await s.settled()
        assert s.transcript.mounted[-1] != s.last.id
        await s.say("now")  # asking from far above returns to the end
        assert s.transcript.mounted[-1] == s.last.id
        await s.until(lambda: s.transcript.following)


@pytest.mark.parametrize("size", grid([(200, 60), (60, 24), (59, 24), (10, 4)], {(59, 24), (10, 4)}), ids=str)
async def test_resizing_keeps_everything_usable(stage: Stage, runtime: Any, size: tuple[int, int]) -> None:
    runtime.answers = [LONG[:400]]
    async with stage(runtime, size=(120, 40)) as s:
        await s.say("go")
        await s.pilot.resize_terminal(*size)
        await s.until(lambda: s.composer.region.bottom <= size[1], "the composer to fit")
        assert s.composer.region.width > 0
        slim = size[0] < 60
        await s.until(lambda: s.app.screen.query_one("HeaderBar").display is not slim, "the header to fit")
        assert s.app.screen.query_one("KeyLine").display is not slim
        runtime.answers = ["after the resize"]
        await s.say("more")
        assert s.last.text == "after the resize"
        await s.pilot.resize_terminal(120, 40)
        await s.shows("after the resize")
        await s.until(lambda: s.app.screen.query_one("HeaderBar").display, "the header")

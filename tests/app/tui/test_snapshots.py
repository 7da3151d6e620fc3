"""Snapshots of the terminal UI, at three sizes and in two themes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Markdown, OptionList

from app.conversation import Extras, Passage, Source
from app.tui.messages import QuantizeAsked
from app.tui.screens import chat_dialogs as attach
from app.tui.widgets.message_view import MessageView
from runtime.wire.requests import QuantizeRequest
from tests.app.tui.conftest import make_app
from tests.app.tui.kept import keep_chats
from tests.grid import grid

ANSWER = """Because a channel with a **large activation** multiplies its `weight error`:

1. few channels are large
2. they change from token to token 日本語 🙂

```python
def error(w, x):
    return (w - quantize(w)) @ x
```

| bits | loss |
|---|---|
| 3 | 5.1 |
| 4 | 4.8 |
"""

LOOKS = [((120, 40), "dark"), ((80, 24), "dark"), ((40, 15), "dark"), ((80, 24), "light")]
"""Sizes lay out, themes colour."""


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Chats that were had before, long ago."""
    questions = ("Why is the sky blue?", "A trip to Porto 日本語", "git review of the new cache")
    days = [datetime(2024, 5, day, 10, 42, tzinfo=UTC) for day in (3, 2, 1)]
    return keep_chats(tmp_path / "history.db", [(question, "Because.") for question in questions], begun=days)


class Play:
    """Acts on the application before its picture is taken."""

    def __init__(
        self,
        app: Any,
        *,
        keys: tuple[str, ...] = (),
        prompt: str | None = None,
        shown: Callable[[Any], object] | None = None,
        then: tuple[str, ...] = (),
    ) -> None:
        self.app = app
        self.keys = keys
        self.prompt = prompt
        self.shown = shown
        self.then = then

    async def __call__(self, pilot: Any) -> None:
        session = self.app.session
        await self.until(pilot, lambda: self.app.chat.query("Composer"))
        self.app.chat.composer.cursor_blink = False
        await self.until(pilot, lambda: session.ready and not session.working)
        if self.prompt is not None:
            self.app.chat.composer.load_text(self.prompt)
            await pilot.press("enter")
            await self.until(pilot, lambda: session.conversation.head is not None)
            last = session.conversation.head
            await self.until(pilot, lambda: session.conversation[last].state != "streaming" and not self.app.chat.busy)
            await self.until(pilot, lambda: session.ready and not session.working)
        self.app.clear_notifications()
        recent = session.recent
        recent.hold = lambda _bytes: None
        recent.speeds.clear()
        recent.speeds.extend([31.0, 44.0, 52.0, 57.5, 58.0, 57.0, 58.5, 41.0, 58.0, 58.1])
        recent.memory.clear()
        recent.memory.extend([600_000_000, 700_000_000, 812_000_000, 812_000_000])
        await pilot.press(*self.keys)
        if self.shown is not None:
            await self.until(pilot, lambda: self.shown(self.app))
        await pilot.press(*self.then)
        await self.still(pilot)
        for area in self.app.screen.query("TextArea"):
            area.cursor_blink = False
        for area in self.app.screen.query("Input"):
            area.cursor_blink = False
            area._cursor_visible = True

    async def still(self, pilot: Any) -> None:
        """Wait until the screen has been the same for a quarter of a second; a clock on it may never let it be."""
        pictures: list[str] = []
        for _ in range(40):
            await pilot._wait_for_screen()
            await pilot.pause(0.05)
            screen = self.app.screen
            strips = screen._compositor.render_strips(screen.size)
            pictures = [*pictures[-4:], repr(strips)]
            if len(pictures) == 5 and len(set(pictures)) == 1:
                return

    @staticmethod
    async def until(pilot: Any, predicate: Callable[[], object]) -> None:
        for _ in range(1000):
            if predicate():
                return
            await pilot.pause(0.01)
        raise AssertionError("waited in vain")


@pytest.fixture(params=grid(LOOKS, ()), ids=lambda look: f"{look[0][0]}x{look[0][1]}-{look[1]}")
def looks_right(request: pytest.FixtureRequest, snap_compare: Any, runtime: Any) -> Callable[..., None]:
    """Compares what the application shows after it was acted on as `Play` does."""
    size, theme = request.param

    def compare(app: Any = None, *, kept: Path | None = None, **play: Any) -> None:
        app = app or make_app(runtime, kept=kept)
        app.session.settings = app.session.settings.changed({"theme": theme})
        app.apply_theme(app.session.settings)
        assert snap_compare(app, terminal_size=size, run_before=Play(app, **play))

    return compare


Looks = Callable[..., None]


def offers(app: Any) -> object:
    """Whether the models that can be fetched are in the table."""
    return app.screen.query("ModelTable") and app.screen.query_one("ModelTable").row_count > 2


def curves(app: Any) -> object:
    return app.screen.query("KneeChart")


def test_empty(looks_right: Looks) -> None:
    looks_right()


def test_answer(looks_right: Looks, runtime: Any) -> None:
    runtime.answers = [ANSWER]
    looks_right(prompt="Why do activation outliers matter?\n(in short, please)")


def test_failed_answer(looks_right: Looks, runtime: Any) -> None:
    runtime.fail_with = "prompt and answer do not fit the context of 8192 tokens"
    looks_right(prompt="Go")


def test_models(looks_right: Looks) -> None:
    looks_right(keys=("f2",), shown=offers)


def test_quantize_dialog(looks_right: Looks) -> None:
    looks_right(keys=("f2",), shown=offers, then=("q", "x", "enter"))


def test_settings(looks_right: Looks) -> None:
    looks_right(keys=("f3",))


def test_settings_with_a_custom_budget_while_tuning(looks_right: Looks, runtime: Any) -> None:
    runtime.tune_delay_s = 600
    keys = ("f3", "right", "right", "right", "enter", *"7.5", "enter")
    looks_right(keys=keys, shown=lambda app: app.session.job.message == "timing qkv")


def test_device(looks_right: Looks) -> None:
    looks_right(prompt="Go", keys=("f4",), shown=curves)


def test_device_curves(looks_right: Looks) -> None:
    looks_right(keys=("f4", "end"), shown=curves)


def test_this_chat(looks_right: Looks) -> None:
    looks_right(keys=("f5",))


def test_presets(looks_right: Looks) -> None:
    looks_right(keys=("f8", "down"))


def test_tokens(looks_right: Looks, runtime: Any) -> None:
    runtime.answers = ["One two three four five six seven eight nine ten."]
    looks_right(prompt="Count", keys=("f7",), shown=lambda app: app.screen.query("TokenText"), then=("right", "right"))


def test_chats(looks_right: Looks, kept: Path) -> None:
    def listed(app: Any) -> bool:
        beside = app.size.width >= 100  # the chats are beside the messages then
        return beside or any(table.row_count for table in app.screen.query("ChatTable"))

    looks_right(kept=kept, keys=("ctrl+b",), shown=listed)


def test_tools(looks_right: Looks, served: Any) -> None:
    served("good", "lies")

    def settled(app: Any) -> bool:
        box = app.session.tools.box
        started = box is not None and all(one.state in ("ready", "failed") for one in box.servers)
        return started and any(table.row_count == 8 for table in app.screen.query("ToolTable"))

    looks_right(keys=("ctrl+l",), shown=settled, then=("down",))


def test_a_call_is_asked_for(looks_right: Looks, runtime: Any, served: Any) -> None:
    served("good")
    runtime.answers = ['Let me see.\nCALL echo {"text": "hello"}']

    def asked(app: Any) -> bool:
        said, asks = app.chat.query(Markdown), bool(app.screen.query("#ask-arguments"))
        told = any("waiting for your permission" in view._live for view in app.chat.query(MessageView))
        return asks and told and bool(said) and said.last().source.strip() == "Let me see."

    looks_right(keys=(*"Go", "enter"), shown=asked)


def test_keys(looks_right: Looks) -> None:
    looks_right(keys=("f1",))


def test_setting_up_a_model(looks_right: Looks, runtime: Any) -> None:
    def stopped(app: Any) -> bool:
        if not runtime.named("quantize"):
            runtime.load_delay_s = 600
            app.post_message(QuantizeAsked(QuantizeRequest(source="owner/some-model")))
        elif app.session.working:
            app.run_worker(app.session.stop_work())
        return app.session.job is not None and app.session.job.outcome == "stopped"

    looks_right(shown=stopped)


def test_attaching(looks_right: Looks, runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = ["papers/", "src/", "alice.md", "contract.docx", "minutes.pdf", "notes 日本語.txt"]
    monkeypatch.setattr(attach, "names", lambda _text: listed)
    monkeypatch.setattr(Path, "cwd", lambda: Path("/home/you"))
    app = make_app(runtime)
    app.session.conversation.extras = Extras(sources=[Source(path="/home/you/book.md", name="book.md", tokens=36_000)])

    def shown(app: Any) -> bool:
        names = app.screen.query("#attach-names").results(OptionList)
        return any(one.option_count == len(listed) + 1 for one in names)

    looks_right(app, keys=("ctrl+o",), shown=shown, then=("down", "down"))


def test_passages(looks_right: Looks, runtime: Any) -> None:
    runtime.answers = ["Osgood keeps the lighthouse."]
    app = make_app(runtime)
    conversation = app.session.conversation
    conversation.extras = Extras(model="demo", sources=[Source(path="/gone/book.md", name="book.md", tokens=36_000)])
    text = "The lighthouse keeper was called Osgood.\nHe had a dog."
    found = [Passage(file="book.md", unit="line", first=12, last=13, text=text)]
    found.append(Passage(file="minutes.pdf", unit="page", first=4, last=4, text="The lamp was cleaned."))

    async def find(*_: object) -> list[Passage]:
        return found

    app.session.documents.find = find
    looks_right(app, prompt="Who keeps the lighthouse?", keys=("ctrl+up", "p"))

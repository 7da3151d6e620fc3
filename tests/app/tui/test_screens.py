"""Models, settings, progress and the command palette."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual.app import ComposeResult
from textual.css.stylesheet import Stylesheet
from textual.events import Key
from textual.widget import Widget
from textual.widgets import Button, Input, Select, Static, TextArea
from textual.widgets.option_list import Option

from app import settings
from app.tui.messages import QuantizeAsked
from app.tui.plain import PlainApp, PlainList
from app.tui.screens.chat import ChatScreen
from app.tui.screens.dialogs import CheckpointSuggester, ConfirmDialog, QuantizeDialog, checkpoint_problem
from app.tui.screens.models import ModelsScreen
from app.tui.screens.settings import SettingsScreen
from app.tui.screens.sidebar import Sidebar
from app.tui.themes import LIGHT
from app.tui.widgets.header import HeaderBar
from app.tui.widgets.key_line import KeyLine
from app.tui.widgets.plain_table import PlainTable
from app.tui.widgets.progress_panel import ProgressPanel
from app.tui.widgets.transcript import Transcript
from runtime.wire.requests import LoadRequest, QuantizeRequest
from tests.app.tui.conftest import make_app
from tests.grid import grid

Stage = Callable[..., Any]


async def open_models(s: Any) -> Any:
    await s.pilot.press("f2")
    await s.until(lambda: isinstance(s.app.screen, ModelsScreen) and s.app.screen.query_one("ModelTable").row_count)
    return s.app.screen


async def test_a_model_is_picked_loaded_and_remembered(stage: Stage, runtime: Any) -> None:
    async with stage(runtime) as s:
        await open_models(s)
        await s.shows("bundled")
        table = s.app.screen.query_one("ModelTable")
        await s.pilot.press("end")
        assert table.cursor_row == table.row_count - 1 > 1
        await s.pilot.press("home")
        assert table.cursor_row == 0
        await s.shows("Models on this machine. A adds one")
        await s.pilot.press("down", "down", "enter")
        await s.until(lambda: s.app.session.status.model == "tiny-3bit")
        assert s.app.screen is s.app.chat
        assert settings.load().model == "tiny-3bit"
        await s.shows("tiny-3bit · 3-bit")


async def test_a_single_model_is_loaded_without_asking(stage: Stage, runtime: Any) -> None:
    runtime.entries = runtime.entries[:1]
    async with stage(runtime, model=None) as s:
        assert s.app.session.status.model == "demo"
        assert settings.load().model is None


async def test_a_base_model_says_so(stage: Stage, runtime: Any) -> None:
    runtime.entries.append(replace(runtime.entries[0], name="plain", bundled=False, base=True))
    async with stage(runtime, model="plain") as s:
        await s.shows("plain · 4-bit · base model")
        await open_models(s)
        await s.pilot.press("end", "home", *["down"] * 3)
        await s.shows("· a base model: it continues")


async def test_perplexity_and_warning_are_shown(stage: Stage, runtime: Any) -> None:
    demo, tiny = runtime.entries
    runtime.entries = [
        replace(
            tiny,
            name="an-owner/a-name-longer-than-its-column-4bit",
            perplexity_before=12.31,
            perplexity_after=99.0,
            warning="3 bits fell apart",
        ),
        replace(demo, perplexity_after=5.0, certificate="k_chunk 16: KL 0.151 nats\nwithin 5 %: KL 0.180 nats"),
    ]
    async with stage(runtime) as s:
        await open_models(s)
        await s.shows("99.00 (+704 %)", "see below", "an-owner…umn-4bit", "to get", "A add")
        await s.pilot.press("up")
        await s.shows("its-column-4bit · compensates rounding errors", "(gptq) · 3 bits fell apart")
        await s.pilot.press("down")
        await s.shows("k_chunk 16: KL 0.151 nats ·", "within 5 %: KL 0.180 nats")
        await s.hides("3 bits fell apart")


async def test_a_checkpoint_is_quantized(stage: Stage, runtime: Any, tmp_path: Path) -> None:
    checkpoint, gguf = tmp_path / "mine", tmp_path / "model.gguf"
    checkpoint.mkdir()
    gguf.write_bytes(b"GGUF and more")
    async with stage(runtime, size=(100, 30)) as s:
        await open_models(s)
        await s.open(QuantizeDialog, "q")
        s.app.screen.query_one(Input).value = str(checkpoint)
        await s.pilot.press("enter")
        await s.until(lambda: "config.json" in str(s.app.screen.query_one(".dialog-problem", Static).content))
        (checkpoint / "config.json").write_text("{}")
        await s.pilot.press("enter")
        await s.until(lambda: any(entry.name == "mine" for entry in runtime.entries) and not s.app.session.working)
        asked = QuantizeRequest(source=str(checkpoint), bits=4.0, keep=True, method="auto", smooth_attention=False)
        assert runtime.named("quantize") == [asked]
        await s.until(lambda: "12.80 (+4.1 %)" in s.screen_text(), "the new row")
        await s.open(QuantizeDialog, "q")
        s.app.screen.query_one(Input).value = str(gguf)
        await s.pilot.press("enter")
        await s.until(lambda: len(runtime.named("quantize")) == 2)
        assert runtime.named("quantize")[1] == QuantizeRequest(source=str(gguf), keep=True)
        await s.open(QuantizeDialog, "q")
        s.app.screen.query_one(Input).value = str(gguf)
        await s.pilot.press("tab", "down", "enter", "tab", "tab", "tab", "enter")
        await s.until(lambda: len(runtime.named("quantize")) == 3)
        assert runtime.named("quantize")[2] == QuantizeRequest(source=str(gguf)), "bits that were chosen are kept to"


async def test_bits_and_method_are_chosen_by_keys(stage: Stage, runtime: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    async with stage(runtime, size=(40, 15)) as s:
        await open_models(s)
        await s.open(QuantizeDialog, "q")
        s.app.screen.query_one(Input).value = str(tmp_path)
        await s.pilot.press("tab", "down", "down", "enter", "tab", *["down"] * 6, "enter", "tab", "space", "tab")
        await s.until(lambda: "Quantize" in s.screen_text(), "the button, which the dialog scrolls to")
        await s.pilot.press("enter")
        await s.until(lambda: runtime.named("quantize"))
        assert runtime.named("quantize") == [
            QuantizeRequest(source=str(tmp_path), bits=3.5, method="squeezellm", smooth_attention=True)
        ]
        await s.until(lambda: not s.app.session.working)
        await s.until(lambda: "3.5" in s.screen_text(), "the new row")


async def test_work_is_shown_behind_the_chat_and_can_be_stopped(stage: Stage, runtime: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    async with stage(runtime, size=(100, 30)) as s:
        runtime.load_delay_s = 60
        s.app.post_message(QuantizeAsked(QuantizeRequest(source=str(tmp_path), bits=3.0)))
        await s.until(lambda: s.app.session.working)
        await s.shows("▸ quantize", "0 of 4 blocks")
        await s.say("still there?")
        assert s.last.state == "done"
        await s.pilot.press("escape")
        await s.until(lambda: not s.app.session.working)
        assert runtime.cancelled == ["quantize"]
        await s.shows("stopped")
        await s.pilot.press("escape")
        await s.hides("Quantizing")


async def test_deleting_asks_first_and_spares_the_bundled_model(stage: Stage, runtime: Any) -> None:
    async with stage(runtime) as s:
        await open_models(s)
        await s.pilot.press("d")
        await s.settled()
        assert isinstance(s.app.screen, ModelsScreen)
        await s.pilot.press("down")
        for key, left in (("n", 2), ("y", 1)):
            await s.open(ConfirmDialog, "d")
            await s.open(ModelsScreen, key)
            await s.until(lambda expected=left: len(runtime.entries) == expected)
        assert runtime.named("remove") == ["tiny-3bit"]
        await s.hides("tiny-3bit")
        s.app.screen.query_one("ModelTable").move_cursor(row=0)
        await s.pilot.press("d")
        await s.settled()
        assert isinstance(s.app.screen, ModelsScreen)


async def test_a_setting_is_applied_and_kept_at_once(stage: Stage, runtime: Any, isolated_home: Path) -> None:
    def field(name: str) -> Input:
        found: Input = s.app.screen.query_one(f"#setting-{name} Input", Input)
        return found

    async def leave() -> None:
        await s.pilot.press("escape")
        await s.until(lambda: s.app.screen is s.app.chat)

    async with stage(runtime) as s:
        await s.open(SettingsScreen, "f3")
        field("temperature").value = "1.5"
        s.app.screen.query_one("#setting-system_prompt TextArea", TextArea).load_text("Answer in\nrhymes.")
        await s.pilot.press("enter")
        await leave()
        await s.until(lambda: s.app.session.settings.system_prompt == "Answer in\nrhymes.")
        assert s.app.session.settings.temperature == 1.5
        kept = settings.load()
        assert (kept.temperature, kept.system_prompt) == (1.5, "Answer in\nrhymes.")
        assert len(runtime.named("load")) == 1

        await s.open(SettingsScreen, "f3")
        field("top_p").value = "7"
        await s.pilot.press("tab", "tab")
        await s.settled()
        field("top_p").focus()
        await s.pilot.press("enter")
        await s.shows("it must be a number above 0 to 1")
        await leave()
        assert s.app.session.settings.top_p == settings.load().top_p == settings.Settings().top_p

        (isolated_home / "settings.toml").write_text("= broken")
        await s.open(SettingsScreen, "f3")
        field("top_k").value = "5"
        await s.pilot.press("escape")
        await s.until(lambda: s.app.session.settings.top_k == 5)
        await s.until(lambda: any("not valid TOML" in note.message for note in s.app._notifications))
        assert (isolated_home / "settings.toml").read_text() == "= broken"


async def test_what_needs_a_reload_says_so_and_reloads_once(stage: Stage, runtime: Any) -> None:
    async with stage(runtime, size=(100, 40)) as s:
        await s.open(SettingsScreen, "f3")
        await s.shows("34 kB per token (26 % of fp16) · 128k tokens fit · 277 MB for 8k")
        s.app.screen.query_one("#setting-kv Select", Select).value = "fp16"
        await s.shows("131 kB per token · 40k tokens fit · 1.1 GB for 8k")
        await s.shows("Recommended here: int4; it holds 128k tokens.")
        context = s.app.screen.query_one("#setting-context Input", Input)
        context.value = "200000"
        context.focus()
        await s.pilot.press("enter")
        await s.shows("A context of 200k exceeds this model or memory")
        context.value = "auto"
        s.app.screen.query_one("#setting-kv Select", Select).value = "int8"
        s.app.screen.query_one("#setting-k_chunk Input", Input).value = "64"
        s.app.screen.query_one("#setting-experts_on_device Input", Input).value = "9"
        await s.shows("reloaded when you leave")
        assert len(runtime.named("load")) == 1
        await s.pilot.press("escape")
        await s.until(lambda: len(runtime.named("load")) == 2)
        await s.ready()
        wanted = LoadRequest(model="demo", kv="int8", k_chunk=64, num_parallel=2, experts_on_device=9)
        assert runtime.named("load")[1] == wanted
        await s.shows("k_chunk 64 · KV int8")


async def test_what_is_kept_of_chats_is_shown_and_deleted(stage: Stage, runtime: Any) -> None:
    async with stage(runtime, size=(100, 40)) as s:
        await s.pilot.press("f3")
        await s.shows("34 MB of 2 chats on disk")
        button = s.app.screen.query_one("#saved-delete", Button)
        for key, calls in (("n", []), ("y", [None])):
            button.focus()
            await s.until(lambda: not button.has_class("-active"), "the button to be shown as pressed no more")
            await s.open(ConfirmDialog, "enter")
            await s.open(SettingsScreen, key)
            await s.until(lambda expected=calls: runtime.named("forget") == expected)
        await s.until(lambda: str(s.app.screen.query_one("#saved-amount", Static).content) == "none")
        runtime.forget_error = "cannot delete the saved cache x.kv"
        await s.until(lambda: not button.has_class("-active"))
        await s.open(ConfirmDialog, "enter")
        await s.pilot.press("y")
        await s.until(lambda: any("x.kv" in note.message for note in s.app._notifications))


async def test_the_style_sheet_is_read_once_before_the_first_paint(
    stage: Stage, runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    again: list[Stylesheet] = []
    monkeypatch.setattr(Stylesheet, "reparse", again.append)
    async with stage(runtime, theme="light") as s:
        assert s.app.theme == "calm-light"
        assert s.app.screen.styles.background.hex.lower() == LIGHT.background
        assert not again


async def test_the_theme_changes_at_once(stage: Stage, runtime: Any) -> None:
    async with stage(runtime, size=(100, 40)) as s:
        assert s.app.theme == "calm-dark"
        await s.open(SettingsScreen, "f3")
        for value, theme in (("light", "calm-light"), ("terminal", "ansi-dark")):
            s.app.screen.query_one("#setting-theme Select", Select).value = value
            await s.until(lambda expected=theme: s.app.theme == expected)
            if value == "light":
                await s.until(lambda: s.app.screen.styles.background.hex.lower() == LIGHT.background)


async def test_every_command_is_in_the_palette_and_every_key_has_an_id(stage: Stage, runtime: Any) -> None:
    async with stage(runtime) as s:
        titles = {command.title.partition("  ")[0] for command in s.app.get_system_commands(s.app.screen)}
        assert {"New chat", "Regenerate", "Continue", "Stop", "Copy answer", "Models", "Settings", "Quit"} <= titles
        bindings = [binding for bindings in s.app._bindings.key_to_bindings.values() for binding in bindings]
        assert all(binding.id for binding in bindings)
        await s.pilot.press("ctrl+p")
        await s.pilot.press(*"models")
        await s.shows("Choose, download, quantize or delete a model")
        await s.settled()
        await s.open(ModelsScreen, "enter")
        await s.pilot.press("escape")
        await s.until(lambda: s.app.screen is s.app.chat)
        await s.click("#header-model")
        await s.until(lambda: isinstance(s.app.screen, ModelsScreen), "the models, which the header opens, too")


async def test_folders_and_gguf_files_are_completed(tmp_path: Path) -> None:
    (tmp_path / "alpha").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "model.gguf").write_text("")
    suggest = CheckpointSuggester().get_suggestion
    assert await suggest(f"{tmp_path}/m") == f"{tmp_path}/model.gguf"
    assert await suggest(f"{tmp_path}/al") == f"{tmp_path}/alpha"
    assert await suggest(f"{tmp_path}/fi") is None
    assert await suggest("no slash") is None
    assert await suggest("/no/such/folder/x") is None


def test_what_is_no_checkpoint_is_told(tmp_path: Path) -> None:
    assert checkpoint_problem(" ") == "Enter a folder, a GGUF file, or a checkpoint on the hub as owner/name."
    assert "No folder or file" in str(checkpoint_problem(str(tmp_path / "x")))
    assert "config.json" in str(checkpoint_problem(str(tmp_path)))
    assert checkpoint_problem("a\0b") is not None
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGU")
    assert "not a GGUF file" in str(checkpoint_problem(str(file)))
    assert "model.gguf" in str(checkpoint_problem(str(tmp_path)))
    file.write_bytes(b"GGUF and more")
    assert checkpoint_problem(f" {file} ") is None
    assert checkpoint_problem("smollm2-135m") is None
    (tmp_path / "config.json").write_text("{}")
    assert checkpoint_problem(f" {tmp_path} ") is None


async def test_a_known_model_is_fetched_made_and_loaded(stage: Stage, runtime: Any) -> None:
    async with stage(runtime, size=(100, 30)) as s:
        await open_models(s)
        await s.shows("SmolLM2 135M")
        await s.pilot.press(*["down"] * 4)
        await s.shows("98 MB to download")
        await s.open(ConfirmDialog, "enter")
        await s.pilot.press("y")
        await s.until(lambda: s.app.session.status.model == "smollm2-135m")
        assert runtime.named("quantize") == [QuantizeRequest(source="smollm2-135m", name="smollm2-135m")]
        assert s.app.screen is s.app.chat
        assert settings.load().model == "smollm2-135m"
        await open_models(s)
        await s.shows("SmolLM2 360M")
        assert "SmolLM2 135M" not in s.screen_text()


@pytest.mark.parametrize("key", grid(["", "f2", "f3", "f4"], {"", "f3"}))
async def test_a_screen_that_is_being_removed_is_not_updated(
    stage: Stage, runtime: Any, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    removed: list[HeaderBar] = []

    def update(bar: HeaderBar) -> None:
        removed.append(bar)
        bar.app.show_session()  # type: ignore[attr-defined]

    async with stage(runtime) as s:
        if key:
            await s.pilot.press(key)
        monkeypatch.setattr(HeaderBar, "on_unmount", update, raising=False)
    assert len(removed) == (2 if key else 1)


@pytest.mark.parametrize("kind", [PlainTable, PlainList])
async def test_a_list_that_is_filled_again_stays_where_it_is(kind: type[PlainTable | PlainList]) -> None:
    class Listed(PlainApp):
        def compose(self) -> ComposeResult:
            yield PlainTable(cursor_type="row") if kind is PlainTable else PlainList()

    def fill(names: list[str]) -> None:
        if isinstance(listed, PlainTable):
            listed.fill({name: [name] for name in names}, [""])
        else:
            listed.fill([Option(name, id=name) for name in names])

    many = [f"row {at}" for at in range(60)]
    app = Listed()
    async with app.run_test(size=(40, 12)) as pilot:
        listed = app.query_one(kind)
        fill(many)
        await pilot.press(*["down"] * 40, *["up"] * 3)
        under, y = listed.under, listed.scroll_offset.y
        for names, moved in ((many, 0), ([*many, "last"], 0), (["first", *many], 1), (many[5:], -5)):
            fill(names)
            await pilot.pause()
            assert (listed.under, listed.scroll_offset.y) == (under, y + moved), names[0]
        fill([name for name in many if name != under])
        assert listed.under not in (None, under), "a row that is gone leaves the cursor near its place"
        listed.scroll_to(y=0, animate=False)  # as by a mouse's wheel: the cursor is out of sight
        fill([name for name in many if name != under])
        await pilot.pause()
        assert listed.scroll_offset.y == 0
        fill([])
        assert listed.under is None


def slow_to_compose(monkeypatch: pytest.MonkeyPatch, widget: type[Widget], meanwhile: Callable[[], object]) -> None:
    """Something happens while a widget has not mounted its parts."""
    compose = widget.mount_composed_widgets

    async def late(self: Any, widgets: list[Widget]) -> None:
        meanwhile()
        await asyncio.sleep(0.05)
        await compose(self, widgets)

    monkeypatch.setattr(widget, "mount_composed_widgets", late)


@pytest.mark.parametrize(
    "part", [ChatScreen, HeaderBar, Sidebar, Transcript, ProgressPanel], ids=lambda one: one.__name__
)
async def test_a_start_that_is_cut_short_falls_nowhere(
    runtime: Any, part: type[Widget], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(runtime)
    slow_to_compose(monkeypatch, part, app.exit)
    await app.run_async(headless=True, size=(80, 24))
    assert app.return_code == 0
    assert app._exception is None


@pytest.mark.parametrize(
    "part", grid([HeaderBar, ProgressPanel, KeyLine], {ProgressPanel}), ids=lambda one: one.__name__
)
async def test_a_screen_is_left_alone_until_it_has_its_parts(
    stage: Stage, runtime: Any, part: type[Widget], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with stage(runtime, kept=tmp_path / "history.db") as s:
        slow_to_compose(monkeypatch, part, s.app.show_session)
        for key in ("f2", "f3", "f4", "ctrl+b", "ctrl+l"):
            s.app.post_message(Key(key, None))
            await s.until(lambda: len(s.app.screen_stack) == 2, f"{key} to open")
            s.app.show_session()
            s.app.show_tools()
            await s.until(lambda: s.app.screen.is_mounted, f"the screen of {key}")
            s.app.pop_screen()
            s.app.post_message(Key(key, None))
            await s.until(lambda: len(s.app.screen_stack) == 2, f"{key} to open again")
            s.app.pop_screen()  # before it has its parts
            await asyncio.sleep(0.1)
            await s.settled()
            assert s.app.return_code is None, key


async def test_a_transcript_without_a_column_waits_for_it(stage: Stage, runtime: Any) -> None:
    async with stage(runtime) as s:
        await s.say("a")
        other = Transcript(lambda: s.app.session.conversation, lambda: False)
        await other.reopen()
        await s.app.screen.query_one("#chat-body").mount(other)
        assert other.mounted == s.transcript.mounted

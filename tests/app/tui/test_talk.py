"""Chats with branches, beyond the context, with their own model and settings; and the composer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual.events import Key, Paste
from textual.widgets import Button, Input, TextArea

from app.tui.messages import ChatEnded, Submitted
from app.tui.screens.chat_dialogs import ChatSettingsDialog, OverflowDialog
from app.tui.screens.dialogs import ConfirmDialog, on_hub
from app.tui.screens.help import HelpScreen, LogScreen, key_name

Stage = Callable[..., Any]


def path_of(s: Any) -> list[str]:
    return [message.text for message in s.app.session.conversation.path()]


def burst(s: Any, *keys: str) -> None:
    """Keys that come at once, as from a paste that the terminal does not mark."""
    events = [Key(key, key if len(key) == 1 else None) for key in keys]
    for event in events:
        event.time = events[0].time
        s.app.post_message(event)


class TestBranches:
    async def test_an_edited_prompt_stands_beside_the_first(self, stage: Stage, runtime: Any) -> None:
        runtime.answers = ["one", "two", "three"]
        async with stage(runtime) as s:
            await s.say("a")
            s.composer.load_text("half a thought")
            await s.pilot.press("ctrl+e")
            assert s.composer.text == "a"
            s.composer.load_text("b")
            await s.pilot.press("enter")
            await s.until(lambda: path_of(s) == ["b", "two"])
            await s.answered()
            await s.shows("2/2")
            assert runtime.named("chat")[1][0] == [{"role": "user", "content": "b"}]
            assert s.composer.text == "half a thought"
            prompt = s.app.session.conversation.path()[0]
            s.transcript.view(prompt.id).focus()
            await s.pilot.press("left")
            await s.until(lambda: path_of(s) == ["a", "one"])
            await s.shows("1/2")
            await s.pilot.press("right")
            await s.until(lambda: path_of(s) == ["b", "two"])

    async def test_an_edit_is_given_up_with_escape(self, stage: Stage, runtime: Any) -> None:
        async with stage(runtime) as s:
            await s.say("a")
            s.composer.load_text("draft")
            await s.pilot.press("ctrl+e", "escape")
            assert s.composer.text == "draft"
            await s.say("c")
            assert path_of(s)[::2] == ["a", "c"]

    async def test_an_answer_beside_the_first_and_the_branch_in_sight_are_kept(
        self, stage: Stage, runtime: Any, tmp_path: Path
    ) -> None:
        runtime.answers = ["first", "second"]
        async with stage(runtime, kept=tmp_path / "history.db") as s:
            await s.say("go")
            await s.pilot.press("ctrl+r")
            await s.until(lambda: s.last.text == "second")
            await s.answered()
            await s.pilot.press("ctrl+up")
            await s.settled()
            await s.pilot.press("left")
            await s.until(lambda: s.last.text == "first")
            await s.shows("first")
            (chat,) = await s.app.session.history.chats()
            assert chat.head == s.last.id

    async def test_messages_are_copied_by_key(self, stage: Stage, runtime: Any) -> None:
        runtime.answers = ["Look:\n\n```python\nx = 1\n```\n\n```\ny\n```"]
        async with stage(runtime) as s:
            await s.say("go")
            await s.pilot.press("ctrl+up")
            await s.settled()
            for key, copied in (("b", "x = 1"), ("b", "y"), ("b", "x = 1"), ("c", runtime.answers[0])):
                await s.pilot.press(key)
                await s.until(lambda copied=copied: s.app.clipboard.strip() == copied, copied)
            await s.pilot.press("up", "c")
            await s.until(lambda: s.app.clipboard == "go")
            await s.pilot.press("down", "down")
            await s.until(lambda: s.app.focused is s.composer)

    async def test_a_block_is_copied_by_mouse(self, stage: Stage, runtime: Any) -> None:
        runtime.answers = ["```python\nx = 1\n```"]
        async with stage(runtime) as s:
            await s.say("go")
            await s.click(".code-copy")
            await s.until(lambda: s.app.clipboard.strip() == "x = 1")

    async def test_details_are_shown_on_demand(self, stage: Stage, runtime: Any) -> None:
        async with stage(runtime, size=(100, 30)) as s:
            await s.say("go")
            await s.hides("k_chunk")
            await s.pilot.press("ctrl+up")
            await s.settled()
            await s.pilot.press("d")
            await s.shows("error compensation: 41 to 48 of 1,024 channels (k_chunk), 4.2 % slower")
            await s.pilot.press("d")
            await s.hides("k_chunk")


class TestFocus:
    """Whatever takes the focused widget away, there is somewhere to type."""

    @pytest.mark.parametrize("keys", ["r", "e enter", "ctrl+r", "left r", "up r", "up e enter"])
    async def test_after_an_action_on_a_message(self, stage: Stage, runtime: Any, keys: str) -> None:
        async with stage(runtime) as s:
            await s.say("a", "b")
            await s.pilot.press("ctrl+r")
            await s.answered()
            await s.pilot.press("ctrl+up")
            await s.until(lambda: s.app.focused is not s.composer)
            await s.pilot.press(*keys.split())
            await s.answered()
            await s.until(lambda: s.app.focused is s.composer, "the composer to have the focus")
            await s.pilot.press("x")
            await s.until(lambda: s.composer.text == "x")

    async def test_after_the_chat_was_deleted(self, stage: Stage, runtime: Any) -> None:
        async with stage(runtime) as s:
            await s.say("a")
            await s.pilot.press("ctrl+up")
            s.app.session.end_chat()
            s.app.post_message(ChatEnded())
            await s.until(lambda: s.app.focused is s.composer)

    @pytest.mark.parametrize("key", ["", "f2", "f3", "f4", "f5", "ctrl+o", "ctrl+b"])
    async def test_after_nothing_had_it(self, stage: Stage, runtime: Any, key: str, tmp_path: Path) -> None:
        async with stage(runtime, kept=tmp_path / "history.db") as s:
            if key:
                await s.pilot.press(key)
                await s.until(lambda: len(s.app.screen_stack) == 2 and s.app.screen.is_mounted)
                await s.settled()
            s.app.screen.set_focus(None)
            await s.pilot.press("x")
            await s.until(lambda: s.app.focused is not None)

    async def test_after_its_widget_was_disabled_or_hidden(self, stage: Stage, runtime: Any, tmp_path: Path) -> None:
        async with stage(runtime, size=(120, 30), kept=tmp_path / "history.db", sidebar="on") as s:
            await s.pilot.press("ctrl+b")
            await s.until(lambda: isinstance(s.app.focused, Input))
            s.app.focused.disabled = True
            await s.until(lambda: s.app.focused is s.composer)
            s.app.screen.query_one("#sidebar-chats").focus()
            await s.until(lambda: s.app.focused is not s.composer)
            await s.pilot.resize_terminal(80, 24)
            await s.until(lambda: s.app.focused is s.composer)


class TestFullChat:
    async def test_the_oldest_messages_are_left_out_and_it_says_so(self, stage: Stage, runtime: Any) -> None:
        runtime.context, runtime.answers = 200, ["word " * 40]
        runtime.timings = replace(runtime.timings, prompt_tokens=60, completion_tokens=60)
        async with stage(runtime) as s:
            await s.say("first " * 8)
            s.composer.load_text("second " * 8)
            await s.until(lambda: "next drops the oldest 2 messages" in s.composer.border_subtitle)
            await s.pilot.press("enter")
            await s.until(lambda: len(s.app.session.conversation) == 4)
            await s.answered()
            assert [message["content"] for message in runtime.named("chat")[1][0]] == [("second " * 8).strip("\n")]
            await s.shows("the model no longer sees the messages above")
            assert s.last.state == "done"
            assert s.last.statistics.left_out == 2

    async def test_what_the_runtime_finds_too_long_is_asked_again_with_less(self, stage: Stage, runtime: Any) -> None:
        runtime.answers = ["one", "two", "three"]
        async with stage(runtime) as s:
            await s.say("a", "b")
            runtime.too_long = 1
            await s.say("c")
            assert s.last.state == "done"
            asked = [[message["content"] for message in messages] for messages, _ in runtime.named("chat")[2:]]
            assert asked == [["a", "one", "b", "two", "c"], ["b", "two", "c"]]

    async def test_a_prompt_that_alone_is_too_long_fails_with_the_reason(self, stage: Stage, runtime: Any) -> None:
        async with stage(runtime) as s:
            runtime.too_long = 9
            await s.say("c")
            assert s.last.state == "failed"
            assert "too long" in s.last.error

    @pytest.mark.parametrize(
        ("key", "sent"), [("d", ["second"]), ("s", ["earlier", "second"]), ("n", ["second"]), ("escape", None)]
    )
    async def test_it_asks_where_that_is_wanted(
        self, stage: Stage, runtime: Any, key: str, sent: list[str] | None
    ) -> None:
        runtime.context, runtime.answers = 200, ["word " * 40, "a summary" if key == "s" else "fine", "fine"]
        runtime.timings = replace(runtime.timings, prompt_tokens=60, completion_tokens=60)
        async with stage(runtime, overflow="ask") as s:
            await s.say("first " * 8)
            s.composer.load_text("second " * 8)
            await s.open(OverflowDialog, "enter")
            await s.pilot.press(key)
            if sent is None:
                await s.until(lambda: s.composer.text.startswith("second"))
                assert len(runtime.named("chat")) == 1
                return
            count = 3 if key == "s" else 2
            await s.until(lambda: len(runtime.named("chat")) == count)
            await s.answered()
            messages = runtime.named("chat")[-1][0]
            if key == "s":
                assert messages[0] == {"role": "system", "content": "Earlier in this conversation: a summary"}
                await s.shows("summary: a summary")
            assert messages[-1]["content"].startswith("second")
            assert len(s.app.session.conversation) == (2 if key == "n" else 4)

    async def test_an_answer_that_was_cut_says_so_and_is_continued(self, stage: Stage, runtime: Any) -> None:
        runtime.answers, runtime.finish_reason = ["one two"], "length"
        async with stage(runtime) as s:
            await s.say("go")
            await s.shows("cut off: no more tokens")
            await s.shows("continue ^G")


class TestModels:
    async def test_a_chat_is_had_with_its_model_whatever_another_window_loads(self, stage: Stage, runtime: Any) -> None:
        async with stage(runtime) as s:
            await s.say("a")
            runtime.status = replace(runtime.status, model="tiny-3bit")  # another window loaded it
            await s.app.session.refresh()
            await s.shows("tiny-3bit")
            await s.say("b")
            assert [request.model for request in runtime.named("load")] == ["demo", "demo"]
            assert [options.model for _, options in runtime.named("chat")] == ["demo", "demo"]

    async def test_the_label_says_who_really_answered(self, stage: Stage, runtime: Any) -> None:
        runtime.answers_as = "somebody-else"
        async with stage(runtime) as s:
            await s.say("a")
            assert s.last.model == "somebody-else"
            await s.shows("somebody-else")

    async def test_a_picked_model_answers_from_then_on(self, stage: Stage, runtime: Any) -> None:
        async with stage(runtime) as s:
            await s.say("a")
            await s.pilot.press("f2")
            await s.shows("tiny-3bit")
            await s.pilot.press("down", "enter")
            await s.until(lambda: s.app.session.status.model == "tiny-3bit")
            await s.ready()
            await s.say("b")
            assert runtime.named("chat")[-1][1].model == "tiny-3bit"
            assert s.last.model == "tiny-3bit"

    async def test_sampling_and_system_prompt_of_one_chat(self, stage: Stage, runtime: Any) -> None:
        async with stage(runtime, temperature=0.7) as s:
            await s.open(ChatSettingsDialog, "f5")
            s.app.screen.query_one(TextArea).load_text("Be a pirate.")
            s.app.screen.query_one("#own-temperature", Input).value = "9"
            s.app.screen.query_one("#yes", Button).press()
            await s.shows("temperature must be a number from 0 to 2")
            s.app.screen.query_one("#own-temperature", Input).value = "0.2"
            s.app.screen.query_one("#yes", Button).press()
            await s.until(lambda: not isinstance(s.app.screen, ChatSettingsDialog))
            await s.say("a")
            messages, options = runtime.named("chat")[0]
            assert messages[0] == {"role": "system", "content": "Be a pirate."}
            assert options.temperature == 0.2
            await s.pilot.press("ctrl+n", "y")
            await s.until(lambda: len(s.app.session.conversation) == 0)
            await s.say("b")
            messages, options = runtime.named("chat")[1]
            assert (messages[0]["role"], options.temperature) == ("user", 0.7)


class TestWriting:
    async def test_lines_of_an_unmarked_paste_stay_together(self, stage: Stage, runtime: Any) -> None:
        async with stage(runtime) as s:
            burst(s, "a", "enter", "b", "enter", "enter", "c")
            await s.until(lambda: s.composer.text == "a\nb\n\nc")
            assert len(s.app.session.conversation) == 0

    @pytest.mark.parametrize(
        ("keys", "left"),
        [
            ("o l d ctrl+u n e w", "new"),
            ("a b ctrl+a c d", "cdab"),
            ("a b ctrl+w c", "c"),
            ("a b left left c end d", "cabd"),
            ("a b home delete c", "cb"),
            ("a tab shift+tab b", "ab"),
            ("a b ctrl+underscore c", "c"),
            ("a f1 escape b", "ab"),
            ("a f2 escape b", "ab"),
            ("a ctrl+up b", "ab"),
        ],
    )
    async def test_keys_of_one_burst_act_in_their_order(self, stage: Stage, runtime: Any, keys: str, left: str) -> None:
        async with stage(runtime) as s:
            burst(s, *keys.split())
            await s.until(lambda: s.composer.text == left, left)
            await s.settled()
            assert s.composer.text == left

    async def test_enter_within_a_burst_of_other_keys_sends(self, stage: Stage, runtime: Any) -> None:
        async with stage(runtime) as s:
            burst(s, "x", "ctrl+u", "a", "ctrl+a", "b", "enter", "c")
            await s.until(lambda: s.composer.text == "c")
            await s.answered()
            assert path_of(s)[0] == "ba"

    async def test_a_dialog_gets_what_is_typed_after_the_key_that_opens_it(self, stage: Stage, runtime: Any) -> None:
        async with stage(runtime) as s:
            burst(s, "ctrl+o", "a", "b")
            await s.until(lambda: s.app.screen.query("Input") and s.app.screen.query_one(Input).value.endswith("ab"))
            assert s.composer.text == ""

    async def test_no_question_is_lost_while_answers_end(self, stage: Stage, runtime: Any) -> None:
        runtime.answers = ["one two three"]
        async with stage(runtime) as s:
            asked = [f"<{letter}>" for letter in "abcdefghijkl"]
            for number, question in enumerate(asked):
                burst(s, *question)
                await asyncio.sleep(0.002 * (number % 4) + 0.011)
                burst(s, "enter")
                if number % 3 == 0:
                    burst(s, "ctrl+r")
                await asyncio.sleep(0.05)
            await s.answered()
            chat = s.app.session.conversation
            messages = [chat[one] for ids in chat.branches().values() for one in ids]
            said = " ".join([*(message.text for message in messages), s.composer.text])
            assert [question for question in asked if question not in said] == []
            assert all(message.state != "streaming" for message in messages)

    async def test_what_is_typed_while_an_edit_is_sent_is_kept(self, stage: Stage, runtime: Any) -> None:
        async with stage(runtime) as s:
            await s.say("a")
            s.composer.load_text("draft")
            await s.pilot.press("ctrl+e")
            s.composer.post_message(Submitted("b"))
            s.composer.load_text("next")
            await s.until(lambda: path_of(s)[0] == "b")
            await s.answered()
            assert s.composer.text == "draft\nnext"

    @pytest.mark.parametrize("line_break", ["\r", "\r\n", "\n"], ids=["CR", "CRLF", "LF"])
    async def test_line_breaks_of_a_paste(self, stage: Stage, runtime: Any, line_break: str) -> None:
        small, large = ("\n".join(f"line {number}" for number in range(count)) for count in (3, 400))
        async with stage(runtime) as s:
            s.app.post_message(Paste(small.replace("\n", line_break)))
            await s.until(lambda: s.composer.value == small)
            s.composer.put("")
            s.app.post_message(Paste(f"{large}\nmixed\r\nend\r".replace("\n", line_break, 399)))
            await s.until(lambda: s.composer.text == "⟦402 lines⟧")
            assert s.composer.value == f"{large}\nmixed\nend\n"
            await s.pilot.press("f5")
            await s.until(lambda: isinstance(s.app.focused, TextArea) and s.app.focused is not s.composer)
            s.app.post_message(Paste(small.replace("\n", line_break)))
            await s.until(lambda: s.app.focused.text == small)

    async def test_a_field_of_one_line_takes_all_of_a_paste(self, stage: Stage, runtime: Any) -> None:
        async with stage(runtime) as s:
            await s.pilot.press("ctrl+o")
            await s.until(lambda: isinstance(s.app.focused, Input))
            s.app.focused.value = ""
            s.app.post_message(Paste("one\rtwo\r\nthree\n"))
            await s.until(lambda: s.app.focused.value == "one two three")

    async def test_a_paste_beside_the_composer_goes_into_it(self, stage: Stage, runtime: Any) -> None:
        async with stage(runtime) as s:
            await s.say("a")
            await s.pilot.press("ctrl+up")
            s.app.post_message(Paste("one\rtwo"))
            await s.until(lambda: s.composer.text == "one\ntwo")
            assert s.app.focused is s.composer

    async def test_what_is_typed_right_after_enter_is_kept(self, stage: Stage, runtime: Any) -> None:
        async with stage(runtime) as s:
            first, enter, last = Key("a", "a"), Key("enter", None), Key("b", "b")
            enter.time, last.time = first.time + 0.1, first.time + 0.2
            for event in (first, enter, last):
                s.app.post_message(event)
            await s.until(lambda: len(s.app.session.conversation) == 2)
            await s.answered()
            assert path_of(s)[0] == "a"
            assert s.composer.text == "b"

    async def test_arrows_recall_what_was_said(self, stage: Stage, runtime: Any, tmp_path: Path) -> None:
        async with stage(runtime, kept=tmp_path / "history.db") as s:
            await s.say("one", "two")
            s.composer.load_text("three")
            for key, text in (("up", "two"), ("up", "one"), ("up", "one"), ("down", "two"), ("down", "three")):
                await s.pilot.press(key)
                assert s.composer.text == text
        async with stage(runtime, kept=tmp_path / "history.db") as s:
            await s.until(lambda: s.composer.past == ["one", "two"])

    async def test_a_draft_is_kept_with_its_chat(self, stage: Stage, runtime: Any, tmp_path: Path) -> None:
        async with stage(runtime, kept=tmp_path / "history.db") as s:
            await s.say("one")
            s.composer.load_text("not sent yet")
            await s.pilot.press("ctrl+n")
            await s.until(lambda: len(s.app.session.conversation) == 0)
            assert s.composer.text == ""
            (chat,) = await s.app.session.history.chats()
            await s.app.chat.open_chat(chat)
            assert s.composer.text == "not sent yet"

    async def test_a_draft_survives_quitting(self, stage: Stage, runtime: Any, tmp_path: Path) -> None:
        async with stage(runtime, kept=tmp_path / "history.db") as s:
            s.composer.load_text("why is the sky")
        async with stage(runtime, kept=tmp_path / "history.db") as s:
            (chat,) = await s.app.session.history.chats()
            assert (chat.title, chat.extras.draft) == ("why is the sky", "why is the sky")

    async def test_a_large_paste_is_folded_and_sent_whole(self, stage: Stage, runtime: Any) -> None:
        text = "\n".join(f"line {n}" for n in range(2000))
        async with stage(runtime) as s:
            s.app.screen.post_message(Paste(text))
            await s.until(lambda: s.composer.text == "⟦2,000 lines⟧")
            await s.pilot.press("enter")
            await s.until(lambda: len(s.app.session.conversation) == 2)
            await s.answered()
            assert path_of(s)[0] == text
            await s.shows("2,000 lines · unfold F")
            await s.hides("line 1999")

    async def test_new_asks_where_chats_are_not_kept(self, stage: Stage, runtime: Any) -> None:
        async with stage(runtime) as s:
            await s.say("precious")
            await s.open(ConfirmDialog, "ctrl+n")
            await s.pilot.press("n")
            await s.until(lambda: not isinstance(s.app.screen, ConfirmDialog))
            assert len(s.app.session.conversation) == 2
            await s.open(ConfirmDialog, "ctrl+q")
            await s.pilot.press("escape")
            await s.until(lambda: not isinstance(s.app.screen, ConfirmDialog))
            await s.pilot.press("ctrl+n", "y")
            await s.until(lambda: len(s.app.session.conversation) == 0)


class TestReading:
    async def test_reasoning_is_folded_and_not_said_again(self, stage: Stage, runtime: Any) -> None:
        runtime.answers = ["<think>\nhm, let me see\n</think>\n\nParis.", "Lyon."]
        async with stage(runtime) as s:
            await s.say("capital?")
            await s.shows("thought · 4 words")
            await s.shows("Paris.")
            await s.hides("hm, let me see")
            await s.say("and then?")
            assert runtime.named("chat")[1][0][1] == {"role": "assistant", "content": "Paris."}
            s.transcript.query("CollapsibleTitle").first().action_toggle_collapsible()
            await s.shows("hm, let me see")

    async def test_a_thought_that_was_never_answered_is_unfolded(self, stage: Stage, runtime: Any) -> None:
        runtime.answers = ["<think>\nhm, let me see"]
        async with stage(runtime) as s:
            await s.say("capital?")
            await s.shows("thought · 4 words")
            await s.shows("hm, let me see")

    async def test_long_lines_of_code_are_wrapped(self, stage: Stage, runtime: Any) -> None:
        runtime.answers = ["```python\nvalue = " + " + ".join(f"part{n}" for n in range(20)) + "\n```"]
        async with stage(runtime, size=(60, 24)) as s:
            await s.say("go")
            await s.shows("part19")
            await s.shows("python")

    async def test_f1_lists_the_keys(self, stage: Stage, runtime: Any) -> None:
        async with stage(runtime, size=(100, 60)) as s:
            await s.open(HelpScreen, "f1")
            for words in ("^N", "Start a new chat", "While writing", "On a message", "Copy its code blocks"):
                await s.shows(words)
            await s.pilot.press("escape")
            await s.until(lambda: not isinstance(s.app.screen, HelpScreen))

    async def test_the_palette_shows_the_keys(self, stage: Stage, runtime: Any) -> None:
        async with stage(runtime) as s:
            titles = {command.title for command in s.app.get_system_commands(s.app.screen)}
            assert {"New chat  ^N", "Models  F2", "Keys  F1", "Copy answer  ^Y", "Restart the runtime"} <= titles

    async def test_the_log_is_shown(self, stage: Stage, runtime: Any) -> None:
        from app import paths

        paths.log_file().parent.mkdir(parents=True, exist_ok=True)
        paths.log_file().write_text("ends: it was sent SIGTERM\n")
        async with stage(runtime) as s:
            await s.open(LogScreen, "f6")
            await s.shows("ends: it was sent SIGTERM")

    async def test_what_is_off_does_not_look_on(self, stage: Stage, runtime: Any) -> None:
        async with stage(runtime, size=(120, 40)) as s:
            await s.pilot.press("f3")
            await s.shows("○ off")
            assert s.screen_text().count("●") == 1
            await s.pilot.press("escape", "f2", "q")
            await s.shows("[ ] smooth keys")


@pytest.mark.parametrize(
    ("name", "found"),
    [("Qwen/Qwen3-0.6B", True), ("./a/b", False), ("a/b.gguf", False), ("a", False), ("a/b/c", False), ("/a/b", False)],
)
def test_names_on_the_hub(name: str, found: bool) -> None:
    assert on_hub(name) is found


@pytest.mark.parametrize(
    ("key", "name"),
    [("ctrl+n", "^N"), ("f1", "F1"), ("escape", "Esc"), ("ctrl+up", "Ctrl+↑"), ("d,enter", "D, Enter"), ("c", "C")],
)
def test_names_of_keys(key: str, name: str) -> None:
    assert key_name(key) == name

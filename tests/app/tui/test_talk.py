"""Chats with branches, beyond the context, with their own model and settings; and the composer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual.events import Key, Paste
from textual.widgets import Button, Input, TextArea

from app import paths
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
            await s.pilot.press("ctrl+e", "escape")  # given up
            assert s.composer.text == "half a thought"
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
            await s.pilot.press("ctrl+e", "escape")
            await s.say("c")
            assert path_of(s)[::2] == ["b", "c"]

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

    async def test_blocks_are_copied_and_links_opened(
        self, stage: Stage, runtime: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runtime.answers = [
            "Look [here](https://a.org), [not](file:///x):\n\n- http://b.org/c\n\n```python\nx = 1\n```\n\n```\ny\n```"
        ]
        async with stage(runtime) as s:
            await s.say("go")
            await s.pilot.press("ctrl+y")
            await s.until(lambda: s.app.clipboard == runtime.answers[0])
            await s.click(".code-copy")
            await s.until(lambda: s.app.clipboard.strip() == "x = 1")
            await s.pilot.press("ctrl+up")
            await s.settled()
            for key, copied in (("b", "x = 1"), ("b", "y"), ("b", "x = 1"), ("c", runtime.answers[0])):
                await s.pilot.press(key)
                await s.until(lambda copied=copied: s.app.clipboard.strip() == copied, copied)
            opened: list[str] = []
            monkeypatch.setattr(s.app, "open_url", opened.append)
            await s.pilot.press("o", "o")
            await s.until(lambda: opened == ["https://a.org", "http://b.org/c"])
            await s.pilot.press("up", "c")
            await s.until(lambda: s.app.clipboard == "go")
            await s.pilot.press("down", "down")
            await s.until(lambda: s.app.focused is s.composer)

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

    async def test_after_an_action_on_a_message(self, stage: Stage, runtime: Any) -> None:
        async with stage(runtime) as s:
            await s.say("a", "b")
            await s.pilot.press("ctrl+r")
            await s.answered()
            for keys in ("r", "e enter", "ctrl+r", "left r", "up r", "up e enter"):
                await s.pilot.press("ctrl+up")
                await s.until(lambda: s.app.focused is not s.composer, f"a message to have the focus before {keys}")
                await s.pilot.press(*keys.split())
                await s.answered()
                await s.until(lambda: s.app.focused is s.composer, f"the composer to have the focus after {keys}")
                await s.pilot.press("x")
                await s.until(lambda: s.composer.text == "x", f"what is typed after {keys}")
                s.composer.load_text("")
            await s.pilot.press("ctrl+up")
            s.app.session.end_chat()
            s.app.post_message(ChatEnded())
            await s.until(lambda: s.app.focused is s.composer, "the composer to have the focus after the chat")

    async def test_after_nothing_had_it(self, stage: Stage, runtime: Any, tmp_path: Path) -> None:
        async with stage(runtime, kept=tmp_path / "history.db") as s:
            for key in ("", "f2", "f3", "f4", "f5", "ctrl+o", "ctrl+b"):
                if key:
                    await s.pilot.press(key)
                    await s.until(lambda: len(s.app.screen_stack) == 2 and s.app.screen.is_mounted, f"{key} to open")
                    await s.settled()
                s.app.screen.set_focus(None)
                await s.pilot.press("x")
                await s.until(lambda: s.app.focused is not None, f"a focus after {key}")
                while s.app.screen is not s.app.chat:
                    s.app.pop_screen()
                    await s.settled()

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
            runtime.too_long = 9  # the prompt alone
            await s.say("d")
            assert s.last.state == "failed"
            assert "too long" in s.last.error
            runtime.too_long, runtime.finish_reason = 0, "length"
            await s.say("e")
            await s.shows("cut off: no more tokens", "continue ^G")
            runtime.finish_reason = "loop"
            await s.say("f")
            await s.shows("stopped: it only repeated itself", "continue ^G")
            assert all(options.end_loops and options.reasoning_in_content for _, options in runtime.named("chat"))

    async def test_it_asks_where_that_is_wanted(self, stage: Stage, runtime: Any) -> None:
        runtime.context = 200
        runtime.timings = replace(runtime.timings, prompt_tokens=60, completion_tokens=60)
        async with stage(runtime, overflow="ask") as s:

            async def asked(key: str, *answers: str) -> list[Any]:
                """What is sent when a message does not fit and a key says what to do."""
                runtime.calls.clear()
                runtime.answers = ["word " * 40, *answers]
                await s.say("first " * 8)
                s.composer.load_text("second " * 8)
                await s.open(OverflowDialog, "enter")
                await s.pilot.press(key)
                await s.until(lambda: len(runtime.named("chat")) == 1 + len(answers), f"what {key} sends")
                await s.answered()
                return list(runtime.named("chat")[-1][0])

            async def begin_anew() -> None:
                await s.pilot.press("ctrl+n", "y")
                await s.until(lambda: len(s.app.session.conversation) == 0)

            await asked("escape")
            await s.until(lambda: s.composer.text.startswith("second"))
            assert len(runtime.named("chat")) == 1, "nothing was sent"
            s.composer.load_text("")
            await begin_anew()
            for key in ("d", "n"):
                (message,) = await asked(key, "fine")
                assert message["content"].startswith("second"), key
                assert len(s.app.session.conversation) == (4 if key == "d" else 2), key
                await begin_anew()
            summary, message = await asked("s", "a summary", "fine")
            assert summary == {"role": "system", "content": "Earlier in this conversation: a summary"}
            assert message["content"].startswith("second")
            assert len(s.app.session.conversation) == 4
            await s.shows("summary: a summary")


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
            runtime.answers_as = "somebody-else"
            await s.say("c")
            assert s.last.model == "somebody-else", "the label says who really answered"
            await s.shows("somebody-else")

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
    async def test_keys_of_one_burst_act_in_their_order(self, stage: Stage, runtime: Any) -> None:
        async with stage(runtime) as s:
            for keys, left in (
                ("a enter b enter enter c", "a\nb\n\nc"),  # lines of a paste that is not marked
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
            ):
                s.composer.load_text("")
                burst(s, *keys.split())
                await s.until(lambda left=left: s.composer.text == left, f"{keys} to leave {left}")
                await s.settled()
                assert s.composer.text == left
            assert len(s.app.session.conversation) == 0
            s.composer.load_text("")
            burst(s, "x", "ctrl+u", "a", "ctrl+a", "b", "enter", "c")
            await s.until(lambda: s.composer.text == "c", "enter within a burst of other keys to send")
            await s.answered()
            assert path_of(s)[0] == "ba"
            s.composer.load_text("")
            burst(s, "ctrl+o", "a", "b")  # a dialog gets what is typed after the key that opens it
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
            await s.until(lambda: not s.app._acting, "the last key to act")
            await s.until(lambda: not s.app.session.conversation.extras.queued, "the queue to be sent")
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

    async def test_line_breaks_of_a_paste(self, stage: Stage, runtime: Any) -> None:
        small, large = ("\n".join(f"line {number}" for number in range(count)) for count in (3, 400))
        async with stage(runtime) as s:
            for line_break in ("\r", "\r\n", "\n"):
                s.composer.put("")
                s.app.post_message(Paste(small.replace("\n", line_break)))
                await s.until(lambda: s.composer.value == small, repr(line_break))
                s.composer.put("")
                s.app.post_message(Paste(f"{large}\nmixed\r\nend\r".replace("\n", line_break, 399)))
                await s.until(lambda: s.composer.text == "⟦402 lines⟧", repr(line_break))
                assert s.composer.value == f"{large}\nmixed\nend\n"
                await s.pilot.press("f5")
                await s.until(lambda: isinstance(s.app.focused, TextArea) and s.app.focused is not s.composer)
                s.app.post_message(Paste(small.replace("\n", line_break)))
                await s.until(lambda: s.app.focused.text == small, repr(line_break))
                await s.pilot.press("escape")
                await s.until(lambda: s.app.screen is s.app.chat)
            await s.pilot.press("ctrl+o")
            await s.until(lambda: isinstance(s.app.focused, Input), "a field of one line")
            s.app.focused.value = ""
            s.app.post_message(Paste("one\rtwo\r\nthree\n"))
            await s.until(lambda: s.app.focused.value == "one two three")

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
            await s.pilot.press("ctrl+up")
            s.app.post_message(Paste("one\rtwo"))
            await s.until(lambda: s.composer.text == "one\ntwo", "a paste beside the composer to go into it")
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

    async def test_a_draft_is_edited_elsewhere_and_cleared(
        self, stage: Stage, runtime: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        editor = tmp_path / "editor"
        editor.write_text("""#!/bin/sh\ntest "$1" = -w && printf ' and more\\n' >>"$2"\n""")
        editor.chmod(0o700)
        monkeypatch.delenv("VISUAL", raising=False)
        async with stage(runtime) as s:
            monkeypatch.setattr(s.app, "suspend", contextlib.nullcontext)
            await s.say("hello")  # there is a prompt that Ctrl+E alone would edit
            s.app.post_message(Paste("line\n" * 30))
            await s.until(lambda: s.composer.text == "⟦30 lines⟧")
            for command, said in (
                ("", "no editor is chosen: set VISUAL or EDITOR"),
                (f"{tmp_path}/gone", "No such file or directory"),
                (f"{editor}", "ended with status 1; the draft is as it was"),
            ):
                monkeypatch.setenv("EDITOR", command)
                await s.pilot.press("ctrl+x", "ctrl+e")
                await s.until(lambda said=said: any(said in note.message for note in s.app._notifications), said)
                assert s.composer.text == "⟦30 lines⟧"
            monkeypatch.setenv("EDITOR", f"{editor} -w")
            await s.pilot.press("ctrl+x", "ctrl+e")
            await s.until(lambda: s.composer.text == "⟦30 lines⟧ and more")
            assert s.composer.value == "line\n" * 30 + " and more"
            await s.pilot.press("ctrl+c")
            await s.until(lambda: s.composer.text == "")
            await s.pilot.press("ctrl+underscore")
            await s.until(lambda: s.composer.text == "⟦30 lines⟧ and more")
            assert s.app.is_running

    async def test_what_was_said_and_begun_is_kept(self, stage: Stage, runtime: Any, tmp_path: Path) -> None:
        async with stage(runtime, kept=tmp_path / "history.db") as s:
            await s.say("one", "two")
            s.composer.load_text("three")
            for key, text in (("up", "two"), ("up", "one"), ("up", "one"), ("down", "two"), ("down", "three")):
                await s.pilot.press(key)
                assert s.composer.text == text
            await s.pilot.press("ctrl+n")
            await s.until(lambda: len(s.app.session.conversation) == 0)
            assert s.composer.text == ""
            (chat,) = await s.app.session.history.chats()
            await s.app.chat.open_chat(chat)
            assert s.composer.text == "three", "a draft is kept with its chat"
            await s.pilot.press("ctrl+n")
            await s.until(lambda: len(s.app.session.conversation) == 0)
            for draft, kept in (("never mind", 2), ("", 1)):
                s.composer.load_text(draft)
                s.app.chat.save_draft()
                assert len(await s.app.session.history.chats()) == kept, "a draft that was deleted is no chat"
            s.composer.load_text("why is the sky")
        async with stage(runtime, kept=tmp_path / "history.db") as s:
            await s.until(lambda: s.composer.past == ["one", "two"])
            begun, _ = await s.app.session.history.chats()
            assert (begun.title, begun.extras.draft) == ("why is the sky", "why is the sky")

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


class TestCommands:
    async def test_tab_completes_and_enter_runs_it(self, stage: Stage, runtime: Any, tmp_path: Path) -> None:
        notes = tmp_path / "notes.md"
        notes.write_text("the lamp burns oil\n")
        async with stage(runtime, size=(100, 30), notices=True) as s:
            await s.pilot.press(*"/mo")
            await s.shows("/model [NAME]")
            await s.pilot.press("tab")
            assert s.composer.text == "/model "
            await s.shows("/model demo", "/model tiny-3bit")
            await s.pilot.press("down", "down", "enter")
            await s.until(lambda: s.composer.text == "/model tiny-3bit")
            await s.pilot.press("enter")
            await s.until(lambda: s.app.session.status.model == "tiny-3bit")
            await s.ready()
            assert s.composer.text == ""
            await s.pilot.press(*f"/attach {tmp_path}/no")
            await s.shows(f"/attach {notes}")
            await s.pilot.press("tab", "enter")
            await s.until(lambda: s.composer.text == "⟦notes.md: 2 lines, ≈ 5 tokens⟧")
            s.composer.load_text("")
            for line in ("/system Be a pirate.", "/set temperature 0.2", "/set stop END", "/budget off"):
                await self.enter(s, line)
                await s.until(lambda: s.composer.text == "")
            await s.until(lambda: s.app.session.settings.budget == 0)
            await s.say("ahoy")
            messages, options = runtime.named("chat")[0]
            assert messages[0] == {"role": "system", "content": "Be a pirate."}
            assert (options.temperature, options.stop) == (0.2, ("END",))
            await self.enter(s, "/stats")
            await s.shows("412 tokens")
            await s.open(HelpScreen, *"/help", "enter")
            await s.shows("/save FILE")

    async def enter(self, s: Any, line: str) -> None:
        """Type a command and run it."""
        s.composer.load_text(line)
        await s.settled()
        await s.pilot.press("enter")
        await s.settled()

    async def test_what_is_no_command_keeps_the_draft_or_is_sent(self, stage: Stage, runtime: Any) -> None:
        async with stage(runtime) as s:
            for line, said in (
                ("/modle demo", "no command /modle; did you mean /model?"),
                ("/model demi", "did you mean demo?"),
                ("/attach", "use /attach PATH"),
                ("/set temperature 9", "must be a number from 0 to 2"),
                ("/load /nowhere", "can't be read"),
            ):
                await self.enter(s, line)
                await s.until(lambda said=said: any(said in note.message for note in s.app._notifications), said)
                assert s.composer.text == line
            paths.prompts_dir().mkdir()
            (paths.prompts_dir() / "brief.md").write_text("Be brief: $ARGUMENTS")
            await self.enter(s, "/brief why?")
            await s.answered()
            assert path_of(s)[-2] == "Be brief: why?"
            await s.app.chat.new_chat()
            await self.enter(s, "// what does this comment say?")
            await s.answered()
            await s.say("/etc/hosts is what?", "/usr")
            assert path_of(s)[::2] == ["// what does this comment say?", "/etc/hosts is what?", "/usr"]

    async def test_a_chat_is_saved_to_a_file_and_loaded(self, stage: Stage, runtime: Any, tmp_path: Path) -> None:
        file = tmp_path / "chat.md"
        async with stage(runtime, kept=tmp_path / "history.db", notices=True) as s:
            await s.say("one")
            for said in ("Written to", "exists already"):
                await self.enter(s, f"/save {file}")
                await s.shows(said)
            s.composer.load_text("")
            await self.enter(s, "/new")
            await s.until(lambda: len(s.app.session.conversation) == 0)
            await self.enter(s, f"/load {file}")
            await s.until(lambda: path_of(s) == ["one", "Hello from the script."])
            await s.say("two")
            assert len(runtime.named("chat")[-1][0]) == 3
            assert len(await s.app.session.history.chats()) == 2

    async def test_the_list_of_suggestions_hides_and_comes_back(self, stage: Stage, runtime: Any) -> None:
        async with stage(runtime, size=(60, 20)) as s:
            await s.pilot.press("/")
            await s.shows("/model [NAME]")
            await s.pilot.press("escape")
            await s.hides("/model [NAME]")
            await s.pilot.press("s", "t")
            await s.shows("/stats")
            await s.hides("/save")
            await s.click("#suggestions")
            assert s.composer.text == "/stats"
            assert s.app.focused is s.composer


class TestQueue:
    async def begin(self, s: Any, runtime: Any, *typed: str) -> None:
        """Ask something whose answer hangs, and send more meanwhile."""
        runtime.hold_after = 1
        runtime.released.clear()
        await s.ask("first")
        await s.until(lambda: s.last.text)
        for number, text in enumerate(typed, 1):
            s.composer.load_text(text)
            await s.pilot.press("enter")
            await s.until(lambda number=number: len(s.app.session.conversation.extras.queued) == number, text)
        assert s.composer.text == ""

    async def test_what_is_sent_during_an_answer_follows_it_in_order(self, stage: Stage, runtime: Any) -> None:
        runtime.answers = ["one two", "three", "four"]
        async with stage(runtime) as s:
            await self.begin(s, runtime, "second", "thrid", "fourth")
            await s.shows("3 queued, sent when the answer ends", "second", "thrid", "fourth")
            await s.click("#queue", offset=(4, 2))
            await s.until(lambda: s.composer.text == "thrid")
            s.composer.load_text("")
            await s.pilot.press("up")
            await s.until(lambda: s.composer.text == "fourth")
            s.composer.load_text("third")
            await s.pilot.press("enter")
            await s.shows("2 queued")
            runtime.released.set()
            await s.until(lambda: len(s.app.session.conversation) == 6)
            await s.answered()
            assert path_of(s) == ["first", "one two", "second", "three", "third", "four"]
            await s.shows("third", "four")
            await s.hides("queued")

    async def test_a_stop_or_a_crash_keeps_it_and_enter_goes_on(self, stage: Stage, runtime: Any) -> None:
        runtime.answers = ["one two", "three", "four five", "six"]
        async with stage(runtime) as s:
            await self.begin(s, runtime, "second", "third")
            await s.pilot.press("escape")
            await s.answered()
            await s.shows("2 queued, not sent: ⏎ sends the first")
            assert path_of(s) == ["first", "one"]
            runtime.crash_after = 0
            await s.pilot.press("enter")
            await s.until(lambda: s.last.state == "failed" and not s.app.chat.busy)
            assert s.app.session.conversation.extras.queued == ["third"]
            await s.ready()
            await s.pilot.press("enter")
            await s.until(lambda: len(s.app.session.conversation) == 6)
            await s.answered()
            assert path_of(s)[2::2] == ["second", "third"]

    async def test_it_stays_with_its_chat(self, stage: Stage, runtime: Any, tmp_path: Path) -> None:
        runtime.answers = ["one two", "three four"]
        async with stage(runtime, kept=tmp_path / "history.db") as s:
            await self.begin(s, runtime, "second")
            first = s.app.session.conversation
            await s.pilot.press("ctrl+n")
            await s.until(lambda: len(s.app.session.conversation) == 0)
            await s.hides("queued")
            runtime.released.set()
            await s.until(lambda: len(first) == 4 and s.app.session.answers.of(first.id) is None)
            assert [message.text for message in first.path()] == ["first", "one two", "second", "three four"]
            await self.begin(s, runtime, "later")
        async with stage(runtime, kept=tmp_path / "history.db") as s:
            chat, _ = await s.app.session.history.chats()
            await s.app.chat.open_chat(chat)
            await s.shows("1 queued, not sent", "later")


class TestReading:
    async def test_reasoning_is_folded_and_not_said_again(self, stage: Stage, runtime: Any) -> None:
        runtime.answers = ["<think>\nhm, let me see\n</think>\n\nParis.", "<think>\nthis leads nowhere"]
        runtime.answers.append("```python\nvalue = " + " + ".join(f"part{n}" for n in range(20)) + "\n```")
        async with stage(runtime, size=(60, 24)) as s:
            await s.say("capital?")
            await s.shows("thought · 4 words", "Paris.")
            await s.hides("hm, let me see")
            s.transcript.query("CollapsibleTitle").first().action_toggle_collapsible()
            await s.shows("hm, let me see")
            await s.say("and then?")
            assert runtime.named("chat")[1][0][1] == {"role": "assistant", "content": "Paris."}
            await s.shows("thought · 3 words")
            await s.shows("this leads nowhere")  # unfolded, as it was never answered
            await s.say("code?")
            await s.shows("python")
            await s.shows("part19")  # long lines of code are wrapped

    async def test_the_palette_finds_what_people_call_things(self, stage: Stage, runtime: Any, tmp_path: Path) -> None:
        async with stage(runtime, size=(100, 40), kept=tmp_path / "history.db") as s:
            await s.pilot.press("ctrl+p")
            for word, titles in (
                ("download", "Models  F2"), ("gguf", "Models  F2"), ("budget", "Settings  F3"),
                ("theme", "Settings  F3"), ("temperature", "This chat  F5"), ("system", "Presets  F8"),
                ("sidebar", "Chats  ^B"), ("rename", "Chats  ^B"), ("delete", "Chats  ^B"), ("exp", "Export"),
            ):  # fmt: skip
                await s.until(lambda: isinstance(s.app.focused, Input), "the palette")
                s.app.focused.value = word
                await s.shows(titles)
                await s.hides("New chat")
            await s.pilot.press("enter")
            await s.until(lambda: s.composer.text == "/save ")

    async def test_keys_and_log_are_shown(self, stage: Stage, runtime: Any) -> None:
        paths.log_file().parent.mkdir(parents=True, exist_ok=True)
        paths.log_file().write_text("ends: it was sent SIGTERM\n")
        async with stage(runtime, size=(100, 60)) as s:
            titles = {command.title for command in s.app.get_system_commands(s.app.screen)}
            assert {"New chat  ^N", "Models  F2", "Keys  F1", "Copy answer  ^Y", "Restart the runtime"} <= titles
            await s.open(HelpScreen, "f1")
            for words in ("^N", "Start a new chat", "While writing", "On a message", "Copy its code blocks"):
                await s.shows(words)
            await s.pilot.press("escape")
            await s.until(lambda: not isinstance(s.app.screen, HelpScreen))
            await s.open(LogScreen, "f6")
            await s.shows("ends: it was sent SIGTERM")


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

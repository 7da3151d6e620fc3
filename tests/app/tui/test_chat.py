"""Chatting: sending, streaming, stopping, failing, crashing, and continuing afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from textual.events import Paste
from textual.widgets import Markdown

from app.errors import ConnectionLostError
from app.tui.widgets.message_view import MessageView

Stage = Callable[..., Any]


def markdown_of(view: MessageView) -> str:
    return view.query_one(Markdown).source


async def test_a_prompt_is_answered_with_statistics(stage: Stage, runtime: Any) -> None:
    runtime.answers = ["# Title\n\nSome *text* and <b>html</b>."]
    async with stage(runtime, size=(120, 40), system_prompt="Be brief.", temperature=0.0) as s:
        await s.say("Hello?")
        assert s.last.text == runtime.answers[0]
        assert s.last.state == "done"
        assert markdown_of(s.transcript.view(s.last.id)) == runtime.answers[0]
        await s.shows("412 tokens · 58.1 tok/s · first token after 0.21 s · context 1.3k of 8k")
        await s.shows("<b>html</b>", "demo · 4-bit · budget 5 %", "cpu · 812 MB")
        messages, options = runtime.named("chat")[0]
        assert messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]
        assert options.temperature == 0.0
        await s.say("And?")
        messages, _ = runtime.named("chat")[1]
        assert [message["content"] for message in messages] == ["Be brief.", "Hello?", runtime.answers[0], "And?"]


async def test_the_makers_sampling_is_taken_and_shown(
    stage: Stage, runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.tui.app.CHECK_INTERVAL_S", 0.1)
    async with stage(runtime, size=(100, 40), top_p=0.8) as s:
        runtime.status = replace(runtime.status, sampling={"temperature": 0.2, "top_p": 0.9})
        await s.until(lambda: s.app.session.status.sampling)
        await s.say("Hello?")
        _, options = runtime.named("chat")[0]
        assert (options.temperature, options.top_p, options.top_k, options.repetition_penalty) == (0.2, 0.8, 40, 1.05)
        await s.pilot.press("f5")
        await s.shows("0.2 (the model's)")


async def test_what_is_written_arrives_unchanged(stage: Stage, runtime: Any) -> None:
    text = "日本語のテキスト 🙂 é\n\tindented\n\nрусский · العربية"
    runtime.answers = ["fine", "漢字 🙂 **粗体** done"]
    async with stage(runtime, size=(80, 40)) as s:
        await s.pilot.press("a", "ctrl+j", "b", "shift+enter", "c", "alt+enter", "d")
        assert s.composer.text == "a\nb\nc\nd"
        await s.pilot.press("enter")
        await s.answered()
        assert s.app.session.conversation.path()[0].text == "a\nb\nc\nd"
        assert s.composer.text == ""
        await s.pilot.press("space", "enter")
        assert len(s.app.session.conversation) == 2, "blanks are not sent"
        s.composer.load_text("")
        s.app.screen.post_message(Paste(text))
        await s.until(lambda: s.composer.text == text, "the pasted text")
        await s.pilot.press("enter")
        await s.until(lambda: len(s.app.session.conversation) == 4)
        await s.answered()
        assert s.app.session.conversation.path()[2].text == text
        assert s.last.text == "漢字 🙂 **粗体** done"
        await s.shows("日本語のテキスト 🙂", "漢字 🙂 粗体 done")


async def test_control_characters_never_reach_the_terminal(stage: Stage, runtime: Any) -> None:
    runtime.answers = ["evil \x1b]52;c;eA==\x07 `\x1b[2J` end"]
    async with stage(runtime) as s:
        await s.say("x\x1b[31m")
        assert s.last.text == runtime.answers[0]
        await s.hides("\x1b", "\x07")
        await s.shows("evil ␛]52")


async def test_escape_stops_and_keeps_what_came_which_can_be_continued(stage: Stage, runtime: Any) -> None:
    runtime.answers = ["one two three four five", " and the rest"]
    runtime.hold_after = 2
    async with stage(runtime) as s:
        await s.ask("go")
        await s.until(lambda: "two" in s.last.text)
        await s.pilot.press("escape")
        await s.answered()
        stopped = s.last
        assert (stopped.state, stopped.text) == ("stopped", "one two")
        assert runtime.cancelled == ["chat"]
        assert markdown_of(s.transcript.view(stopped.id)) == "one two"
        await s.shows("stopped · ≈", "continue ^G · retry ^R")
        await s.pilot.press("ctrl+g")
        await s.until(lambda: s.last.state == "done")
        await s.answered()
        assert (s.last.id, s.last.text) == (stopped.id, "one two and the rest")
        messages, options = runtime.named("chat")[1]
        assert messages[-1] == {"role": "assistant", "content": "one two"}
        assert options.continue_final
        assert markdown_of(s.transcript.view(stopped.id)) == s.last.text
        assert stopped.statistics.tokens == 2
        assert s.last.statistics.tokens == 2 + 412, "those of the whole text"


async def test_an_answer_that_is_drawn_before_it_is_put_away_can_be_asked_for_again(
    stage: Stage, runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.answers = ["one two three", "another"]
    runtime.hold_after = 1
    async with stage(runtime) as s:
        ended = s.app.session.answers._ended

        async def later() -> None:
            await s.until(lambda: "stopped ·" in s.screen_text())
            await ended()

        monkeypatch.setattr(s.app.session.answers, "_ended", later)
        await s.ask("go")
        await s.until(lambda: "one" in s.last.text)
        await s.pilot.press("escape")
        await s.shows("stopped ·")
        runtime.hold_after = None
        await s.pilot.press("ctrl+r")
        await s.shows("another", "2/2")


async def test_a_chat_switches_reasoning(stage: Stage, runtime: Any) -> None:
    async with stage(runtime) as s:
        session = s.app.session
        for general, own, sent in (
            ("auto", None, None), ("off", None, False), ("off", "on", True), ("on", "auto", None),
        ):  # fmt: skip
            session.settings = session.settings.changed({"thinking": general})
            session.note(session.conversation, settings={} if own is None else {"thinking": own})
            await s.say("go")
            variables = runtime.named("chat")[-1][1].chat_template_kwargs
            assert (variables and variables["enable_thinking"]) is sent, (general, own)


async def test_regenerate_makes_a_sibling(stage: Stage, runtime: Any) -> None:
    runtime.answers = ["first", "second"]
    async with stage(runtime) as s:
        await s.say("go")
        first = s.last
        await s.pilot.press("ctrl+r")
        await s.until(lambda: s.last.text == "second")
        await s.answered()
        assert s.app.session.conversation.siblings(s.last.id) == [first, s.last]
        await s.shows("second")
        await s.hides("first\n")
        assert len(s.transcript.mounted) == 2


async def test_a_failed_answer_says_why_and_offers_retry(stage: Stage, runtime: Any) -> None:
    runtime.answers = ["one two three"]
    runtime.fail_with = "no"
    async with stage(runtime) as s:
        await s.say("a")  # fails before its first word
        await s.shows("retry ^R")
        await s.hides("continue")
        runtime.fail_with = "prompt and answer do not fit the context of 8192 tokens"
        runtime.fail_after = 2
        await s.say("b")
        messages, _ = runtime.named("chat")[1]
        assert messages == [{"role": "user", "content": "a\n\nb"}]
        assert s.last.state == "failed"
        assert s.last.text == "one two"
        await s.shows("do not fit the context of 8192")
        assert runtime.starts == 1
        await s.pilot.press("ctrl+r")
        await s.until(lambda: s.last.state == "done")
        assert s.last.text == "one two three"


async def test_a_crash_costs_a_message_never_the_conversation(stage: Stage, runtime: Any) -> None:
    runtime.answers = ["fine", "one two three four", "again"]
    async with stage(runtime, size=(100, 40), kv="int8") as s:
        await s.say("a")
        runtime.crash_after = 2
        await s.say("b")
        assert (s.last.state, s.last.text) == ("failed", "one two")
        await s.ready()
        assert runtime.starts == 2
        assert [call.model for call in runtime.named("load")] == ["demo", "demo"]
        assert runtime.named("load")[1].kv == "int8"
        assert [message.text for message in s.app.session.conversation.path()] == ["a", "fine", "b", "one two"]
        await s.shows("the runtime was ended by SIGKILL; restarting it", "continue ^G · retry ^R")
        await s.pilot.press("ctrl+r")
        await s.until(lambda: s.last.state == "done")
        assert s.last.text == "again"


async def test_after_a_crash_it_recovers_at_once_and_a_prompt_waits_for_that(stage: Stage, runtime: Any) -> None:
    runtime.answers = ["one two three", "later"]
    async with stage(runtime) as s:
        runtime.die()  # while it is idle
        await s.until(lambda: runtime.starts == 2)
        await s.ready()
        runtime.crash_after = 1
        runtime.load_delay_s = 0.1
        await s.ask("a")
        await s.until(lambda: s.last.state == "failed" and not s.app.chat.busy)
        await s.ask("b")
        await s.until(lambda: s.last.state == "done")
        assert s.last.text == "later"


async def test_a_runtime_whose_process_lives_is_busy_and_not_gone(
    stage: Stage, runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.tui.connection.CHECK_TIMEOUT_S", 0.01)
    monkeypatch.setattr("app.tui.connection._ENDING_S", 0.01)
    async with stage(runtime) as s:
        client = s.app.session.client()

        async def silent() -> None:
            await asyncio.Event().wait()

        async def unreachable() -> None:
            raise ConnectionLostError("the runtime does not respond")

        for status, answer in ((silent, ""), (unreachable, ""), (unreachable, "the answer was cut off")):
            client.status = status
            for _ in range(2):
                await s.app.session.refresh()
            if answer:
                runtime.fail_with = answer
                await s.say("hello")
                assert s.last.error == answer
            del client.status
            await s.app.session.refresh()
            assert (runtime.starts, s.app.session.client()) == (1, client), status
            assert (s.app.session.ready, runtime.closed) == (True, 0), status


async def test_it_gives_up_when_loading_kills_the_runtime_again(stage: Stage, runtime: Any) -> None:
    runtime.load_error = "out of memory"
    async with stage(runtime, ready=False) as s:
        await s.until(lambda: s.app.session.job is not None and s.app.session.job.outcome == "failed")
        await s.shows("Loading demo failed: out of memory")
        await s.say("hello")
        assert s.last.error == "out of memory"
        assert runtime.starts == 1


async def test_a_runtime_that_does_not_start_is_told(stage: Stage, runtime: Any) -> None:
    runtime.start_error = "the port is taken"
    async with stage(runtime, ready=False) as s:
        await s.until(lambda: s.app.session.problem is not None)
        await s.shows("the port is taken")
        await s.say("anyone there?")
        assert s.last.error == "the port is taken"
        runtime.start_error = None
        await s.pilot.press("ctrl+r")
        await s.until(lambda: s.last.state == "done", "an answer of a runtime that starts at last")


async def test_a_runtime_that_dies_while_loading_is_started_again_by_the_next_prompt(
    stage: Stage, runtime: Any
) -> None:
    runtime.dies_while_loading = True
    async with stage(runtime, ready=False) as s:
        await s.until(lambda: s.app.session.problem)
        await s.shows("Loading demo failed: the runtime was ended by SIGKILL")
        assert runtime.starts == 1
        await s.ask("hello")
        await s.until(lambda: s.last.state == "done")
        assert runtime.starts == 2


async def test_a_chat_that_nobody_can_open_any_more_is_forgotten(stage: Stage, runtime: Any) -> None:
    async with stage(runtime) as s:
        await s.pilot.press("ctrl+n", "y")
        await s.settled()
        assert runtime.named("forget") == [], "nothing was said"
        for text in ("one", "two"):
            await s.say(text)
        await s.pilot.press("ctrl+n", "y")
        await s.until(lambda: runtime.named("forget"))
        runtime.forget_error = "the disk is gone"
        await s.say("three")
        await s.pilot.press("ctrl+n", "y")
        await s.until(lambda: len(runtime.named("forget")) == 2)
        await s.until(lambda: any("the disk is gone" in note.message for note in s.app._notifications))
        await s.say("four")
    chats = [options.chat for _, options in runtime.named("chat")]
    assert chats[0] == chats[1]
    assert len(set(chats)) == 3
    assert runtime.named("forget") == [chats[0], chats[2], chats[2], chats[3]], "the refused one again, then the last"


async def test_a_chat_that_ended_without_a_runtime_is_forgotten_by_the_next(stage: Stage, runtime: Any) -> None:
    async with stage(runtime) as s:
        await s.say("one")
        runtime.start_error = "no room"
        runtime.die()
        await s.app.session.refresh()
        await s.until(lambda: s.app.session.problem == "no room")
        await s.pilot.press("ctrl+n", "y")
        await s.until(lambda: len(s.app.session.conversation) == 0)
        assert runtime.named("forget") == []
        runtime.start_error = None
        await s.app.session.recover()
        await s.until(lambda: runtime.named("forget") == [runtime.named("chat")[0][1].chat])


async def test_new_chat_stops_and_clears(stage: Stage, runtime: Any) -> None:
    runtime.context = 1400
    async with stage(runtime, size=(120, 40)) as s:
        await s.say("go")
        assert s.composer.has_class("-nearly-full")
        told = "1.3k of 1.4k · with the next message the model no longer sees the oldest 2 messages"
        assert told in s.composer.border_subtitle
        await s.pilot.press("ctrl+n", "y")
        await s.until(lambda: not s.composer.has_class("-nearly-full"))
        runtime.hold_after = 2
        await s.ask("go")
        await s.until(lambda: s.last.text)
        await s.pilot.press("ctrl+n", "y")
        await s.until(lambda: len(s.app.session.conversation) == 0 and s.transcript.mounted == [])
        await s.settled()
        assert runtime.cancelled == ["chat"]
        assert s.transcript.mounted == []
        await s.shows("Ask anything.")


async def test_without_a_model_it_says_so_and_keeps_the_prompt(stage: Stage, runtime: Any) -> None:
    runtime.entries.append(replace(runtime.entries[1], name="other"))  # which of the two is not for the program to say
    async with stage(runtime, model=None, ready=False) as s:
        await s.until(lambda: s.app.session.status is not None)
        s.composer.load_text("hello")
        await s.pilot.press("enter")
        await s.settled()
        assert s.composer.text == "hello"
        assert len(s.app.session.conversation) == 0
        await s.shows("no model loaded")


async def test_quitting_closes_the_runtime(stage: Stage, runtime: Any) -> None:
    runtime.hold_after = 2
    async with stage(runtime) as s:
        await s.ask("go")
        await s.until(lambda: s.last.text)
        await s.pilot.press("ctrl+q")
    assert runtime.closed == 1
    assert runtime.cancelled == ["chat"]


async def test_ctrl_c_stops_then_quits_when_pressed_twice(stage: Stage, runtime: Any) -> None:
    runtime.hold_after = 2
    async with stage(runtime) as s:
        await s.ask("go")
        await s.until(lambda: s.last.text)
        await s.pilot.press("ctrl+c")
        await s.answered()
        assert s.last.state == "stopped"
        assert s.app.is_running
        await s.pilot.press("ctrl+c", "ctrl+c")
    assert runtime.closed == 1

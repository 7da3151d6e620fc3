"""The token inspector: opened by key and mouse, navigated, explained, at all sizes; and its error messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from app.tui.inspected import candidate_rows, heat, share, shown, summary, verdicts, views
from app.tui.widgets.token_text import TokenStrip, TokenText, lay_out
from runtime.wire.requests import Candidate, InspectedToken
from tests.grid import grid

Stage = Callable[..., Any]

ANSWER = "One two three four five six seven eight."


async def opened(s: Any) -> TokenText:
    await s.ready()
    await s.say("count")
    await s.pilot.press("f7")
    await s.shows("8 tokens")
    await s.settled()
    text: TokenText = s.app.screen.query_one(TokenText)
    return text


@pytest.mark.parametrize("size", grid([(60, 18), (80, 24), (120, 40), (40, 15)], {(80, 24), (40, 15)}), ids=str)
async def test_it_tells_of_one_token_at_every_size(stage: Stage, runtime: Any, size: tuple[int, int]) -> None:
    runtime.answers = [ANSWER]
    async with stage(runtime, size=size) as s:
        text = await opened(s)
        await s.shows("1 of 8")
        await s.pilot.press("right", "right")
        await s.shows("3 of 8", "Compensation changes the")
        if size[0] >= 60:
            await s.shows("without it", "with compensation", "▸ “ three”")
        await s.pilot.press("end")
        await s.shows("8 of 8")
        assert text.cursor == 7
        await s.pilot.press("escape")
        await s.shows("count")


async def test_changes_are_found_and_other_looks_chosen(stage: Stage, runtime: Any) -> None:
    runtime.answers = [ANSWER]
    async with stage(runtime) as s:
        text = await opened(s)
        await s.pilot.press("n")
        assert text.cursor == 2
        await s.pilot.press("n", "n")
        assert text.cursor == 2, "round the end"
        await s.pilot.press("p")
        assert text.cursor == 5
        await s.shows("how sure the model was")
        await s.pilot.press("m")
        await s.shows("what compensation changes")
        await s.pilot.press("m")
        await s.shows("what a draft predicts")
        await s.pilot.press("home", "n")
        assert text.cursor == 3, "now the refused drafts are marked"
        await s.shows("instead.")


async def test_it_opens_from_the_message_and_the_mouse_picks_a_token(stage: Stage, runtime: Any) -> None:
    runtime.answers = [ANSWER]
    async with stage(runtime, system_prompt="Be short.") as s:
        await s.say("count")
        await s.shows("details · tokens")
        await s.pilot.press("ctrl+up", "t")
        await s.shows("8 tokens")
        await s.settled()
        text = s.app.screen.query_one(TokenText)
        await s.click(TokenText, offset=(9, 0))
        await s.until(lambda: text.cursor == 2, "the token under the mouse")
        await s.click(TokenStrip, offset=(6, 0))
        await s.until(lambda: text.cursor == 6, "the token of the strip")
        [asked] = runtime.named("inspect")
        assert (asked.model, asked.answer) == ("demo", ANSWER)
        assert [(one.role, one.content) for one in asked.messages] == [("system", "Be short."), ("user", "count")]


async def test_what_cannot_be_looked_at_is_said(stage: Stage, runtime: Any) -> None:
    async with stage(runtime) as s:
        await s.pilot.press("f7")
        assert s.app.screen is s.app.chat
        await s.say("hello")
        runtime.inspect_error = "the prompt has 9999 tokens and the context holds 10"
        await s.pilot.press("f7")
        await s.shows("can't be shown: the prompt has 9999")
        await s.pilot.press("escape")
        s.app.session.conversation.revise(s.last.id, model="tiny-3bit")
        await s.pilot.press("f7")
        await s.shows("tiny-3bit wrote this answer, but demo is loaded")


def told(**changes: Any) -> InspectedToken:
    best = Candidate(text=" a", logit=2.0, probability=0.6, base_logit=1.0, base_probability=0.2)
    other = Candidate(text=" b", logit=1.0, probability=0.04, base_logit=2.0, base_probability=0.7)
    return replace(InspectedToken(text=" a", candidates=[best, other], chosen=0, base_best=0), **changes)


def test_words_and_figures() -> None:
    assert heat(told(), "certainty") == 1
    assert heat(told(chosen=1), "certainty") == 4
    assert heat(told(), "compensation") == 3
    assert verdicts(told()) == ["Compensation does not change the choice."]
    assert "Compensation changes the choice" in verdicts(told(base_best=1))[0]
    assert verdicts(told(base_best=None)) == []
    assert "Not the most likely token now; that is “ a” (60.0 %)." in verdicts(told(chosen=1))
    assert verdicts(told(draft=1))[-1] == "A draft predicts “ b” instead."
    assert verdicts(told(draft=0))[-1] == "A draft predicts it too."
    assert (share(None), share(0.0001), share(0.5)) == ("–", "< 0.1 %", "50.0 %")
    assert shown("\n\x1b") == "“⏎␛”"
    rows = candidate_rows(told(), 60, 5)
    assert all(len(row) <= 60 for row in rows)
    assert len(candidate_rows(told(base_best=None), 30, 2)) == 2


def test_text_is_wrapped_with_its_tokens() -> None:
    lines = lay_out(["one", " two", "three", " 日本語", "\n", "x"], 8)
    assert ["".join(run.text for run in line) for line in lines] == ["one ", "twothree", "日本語⏎", "x"]
    assert [run.token for run in lines[1]] == [1, 2]
    assert [[run.text for run in line] for line in lay_out(["abcdef"], 4)] == [["abcd"], ["ef"]]
    assert lay_out(["", "🙂"], 10)[0][0].token == 1


def test_summary_and_ways_of_looking(runtime: Any) -> None:
    from runtime.wire.requests import Inspection

    plain = Inspection(tokens=[told(base_best=None)], model="demo", compensated=False)
    assert summary(plain)[:2] == ["1 token", "compensation is off"]
    assert views(plain) == ["certainty"]
    full = Inspection(tokens=[told(base_best=1), told(draft=1)], model="demo", compensated=True)
    assert summary(full)[1:3] == ["compensation changes 1 choice", "0 of 1 drafts match"]
    assert views(full) == ["certainty", "compensation", "drafts"]

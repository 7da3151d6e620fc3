"""Human-readable numbers and status lines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.amounts import duration
from app.chat.tally import Tally
from app.conversation import Statistics
from app.tui import figures
from app.tui.jobs import Meter
from app.tui.widgets.composer import context_line
from app.tui.widgets.progress_panel import bar
from models.progress import Progress
from runtime.compensation import Compensation


def test_used_tokens_have_the_unit_of_their_context() -> None:
    """A context that is nearly full was `8.2k of 8k`."""
    assert [figures.token_count(used, 8192) for used in (412, 1300, 8190)] == ["412", "1.3k", "8k"]
    assert figures.token_count(9500, 10_000) == "9.5k"


def test_a_speed_is_that_of_the_tokens_after_the_first() -> None:
    tally = Tally(started=1.0)
    assert (tally.first_after_s, tally.per_s) == (None, None)
    tally.count(3.0)
    assert (tally.first_after_s, tally.per_s) == (2.0, None)
    for now in (3.5, 4.0):
        tally.count(now)
    assert (tally.pieces, tally.first_after_s, tally.per_s) == (3, 2.0, 2.0)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1k"),
        (1300, "1.3k"),
        (8000, "8k"),
        (8190, "8.2k"),
        (8192, "8k"),
        (131072, "128k"),
    ],
)
def test_tokens(count: int, text: str) -> None:
    assert figures.token_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0 s"), (8.4, "8 s"), (99, "99 s"), (180, "3 min"), (7500, "2 h 05 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("k_chunk", "text"),
    [(None, ""), (0, ""), ({"qkv": 0}, ""), ({}, ""), (16, "k_chunk 16"), ({"qkv": 8, "down": 32}, "k_chunk 8–32")],
)
def test_k_chunk(k_chunk: dict[str, int] | int | None, text: str) -> None:
    assert figures.k_chunk_text(k_chunk) == text


def test_the_statistics_line_drops_its_end_first() -> None:
    statistics = Statistics(
        tokens=412, tokens_per_s=58.1, first_after_s=0.21, context_used=1300, context=8192, bits=3.0,
        k_chunk={"qkv": 16, "o": 16}, memory_bytes=812_000_000,
    )  # fmt: skip
    parts = figures.statistics_parts(statistics)
    line = "412 tokens · 58.1 tok/s · first token after 0.21 s · context 1.3k of 8k"
    assert figures.fitting(parts, 200) == line
    assert figures.fitting(parts, 30) == "412 tokens · 58.1 tok/s"
    assert figures.fitting(parts, 3) == ""
    assert figures.statistics_parts(Statistics(tokens=1)) == ["1 token"]
    assert figures.statistics_parts(Statistics(tokens=2, estimated=True)) == ["≈ 2 tokens"]
    assert figures.fitting(["日本語", "x"], 6) == "日本語"


@pytest.mark.parametrize(
    ("used", "width", "text"),
    [
        (1300, 100, "context ▰▱▱▱▱▱▱▱ 1.3k of 8k"),
    ],
)
def test_the_context_meter(used: int, width: int, text: str) -> None:
    assert context_line(used, 8000, width) == text


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (120, "context ▰▰▰▰▰▰▱▱ 6.4k of 8k · with the next message the model no longer sees the oldest 4 messages"),
        (70, "▰▰▰▰▰▰▱▱ 6.4k of 8k · next drops the oldest 4 messages"),
        (40, "▰▰▰▰▰▰▱▱ 6.4k of 8k · drops 4 next"),
    ],
)
def test_the_context_meter_names_what_will_be_left_out(width: int, text: str) -> None:
    assert context_line(6400, 8000, width, 4) == text


def report(phase: str, done: float, total: float | None, unit: str = "blocks", message: str = "") -> Progress:
    return Progress(phase=phase, done=done, total=total, unit=unit, message=message)


def test_a_job_tells_speed_and_time_left() -> None:
    now = 0.0
    meter = Meter("Quantizing x", lambda: now)
    assert meter.take(report("quantize", 0, 28)).pace == "0 of 28 blocks"
    now = 0.5
    assert meter.take(report("quantize", 1, 28)).speed is None
    now = 4.0
    job = meter.take(report("quantize", 8, 28, message="block 8"))
    assert job.pace == "8 of 28 blocks · 2 blocks/s · about 10 s left"
    assert job.fraction == 8 / 28
    assert job.line == "Quantizing x · quantize · block 8"
    job = meter.take(report("verify", 0, None, "bytes"))
    assert (job.speed, job.left, job.fraction, job.pace) == (None, "", None, "0 B")
    assert meter.end("failed", "the disk is full").line == "Quantizing x failed: the disk is full"


def test_the_speed_forgets_what_is_long_past() -> None:
    now = 0.0
    meter = Meter("x", lambda: now)
    for second in range(100):
        now = float(second)
        job = meter.take(report("a", second * 1.0 if second < 50 else 50 + (second - 50) * 10.0, 1000, "bytes"))
    assert job.speed == pytest.approx(10.0)
    assert job.pace == "540 B of 1 kB · 10 B/s · about 84 s left"


def test_the_bar() -> None:
    assert bar(None) == ""
    assert bar(0.5, 4) == "━━── "
    assert bar(1.0, 4) == "━━━━ "


def test_an_answer_is_told_in_words_with_details_on_demand() -> None:
    statistics = Statistics(
        tokens=412, tokens_per_s=58.1, first_after_s=0.21, context_used=1300, context=8192, bits=3.0,
        k_chunk={"qkv": 41, "o": 48}, slowdown_percent=4.21, prompt_slowdown_percent=8.06, memory_bytes=812_000_000,
    )  # fmt: skip
    line = figures.statistics_line(statistics, 200)
    assert line == "412 tokens · 58.1 tok/s · first token after 0.21 s · context 1.3k of 8k"
    assert figures.statistics_line(statistics, 36, ["stopped"]) == "stopped · 412 tokens · 58.1 tok/s"
    assert figures.details(replace(statistics, left_out=4)) == [
        "not read: the first 4 messages, which no longer fit in the context",
        "error compensation: 41 to 48 of 1,024 channels (k_chunk), 4.2 % slower",
        "compensated prompt: first word 8.1 % later",
        "3-bit weights, 812 MB of memory",
    ]
    assert "no slower" in figures.details(replace(statistics, slowdown_percent=-0.6))[0]
    assert figures.details(replace(statistics, prompt_slowdown_percent=-2.0))[1].endswith("no later")
    assert figures.details(Statistics(tokens=1, k_chunk={"qkv": 0})) == ["error compensation: off"]
    assert figures.statistics_line(replace(statistics, cut=True), 60).startswith("cut off: no more tokens fit")


@pytest.mark.parametrize(
    ("budget", "text"), [(None, ""), (0.0, "budget off"), (2.5, "budget 2.5 %"), (5.0, "budget 5 %")]
)
def test_budgets(budget: float | None, text: str) -> None:
    assert figures.budget_text(budget) == text


@pytest.mark.parametrize(("value", "text"), [(4.21, "4.2 %"), (5.0, "5 %"), (-0.01, "0 %"), (-1.26, "-1.3 %")])
def test_percentages(value: float, text: str) -> None:
    assert figures.percent(value) == text


def test_tuning_is_told_in_words() -> None:
    meter = Meter("Loading demo", lambda: 0.0)
    assert meter.take(report("tune", 3, 60, "timings", "timing qkv")).line == "Loading demo · tuning · timing qkv"
    meter = Meter(figures.tuning_title(Compensation()), lambda: 0.0, "waiting for the answer to end")
    assert meter.job.line == "Tuning for a budget of 5 % · waiting for the answer to end"
    assert meter.take(report("tune", 3, 60, "timings", "timing qkv")).line == "Tuning for a budget of 5 % · timing qkv"
    assert figures.tuning_title(Compensation(budget_percent=0)) == "Switching compensation off"
    assert figures.tuning_title(Compensation(k_chunk=9)) == "Applying k_chunk 9"


def test_what_speculation_did() -> None:
    plain = Statistics(tokens=5)
    assert figures.speculation_parts(plain) == []
    drafted = replace(plain, gamma=3, acceptance_rate=0.874, tokens_per_verify=3.42)
    words = ["87 % of drafts accepted", "3.4 tokens per verify"]
    assert figures.speculation_parts(drafted) == words
    assert figures.speculation_parts(replace(drafted, gamma=0)) == [*words, "turned off: no speedup"]
    never = replace(plain, gamma=0, acceptance_rate=0.0, tokens_per_verify=0.0)
    assert figures.speculation_parts(never) == ["turned off: no speedup"]
    assert all(word in figures.details(drafted)[0] for word in words)
    by_head = replace(drafted, drafted_by="head")
    assert figures.speculation_parts(by_head)[0] == "87 % of the head's drafts accepted"

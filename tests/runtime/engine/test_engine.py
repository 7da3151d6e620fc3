"""The engine on scripted decoders, and on a random model with the reference backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.spec import ModelSpec
from runtime.backends.decoder import DecoderOptions, Step
from runtime.backends.reference.decoder import ReferenceDecoder
from runtime.engine.engine import BORROWED_TOKENS, Engine
from runtime.engine.generation import Piece
from runtime.engine.saved import About, SavedCaches, forget, read_header
from runtime.errors import BackendError, ContextOverflowError, InvalidActivationError, RequestError
from runtime.kv.control import KVCache
from runtime.kv.groups import page_groups
from runtime.kv.kinds import KINDS, KVKind
from runtime.text.constraint import Grammar
from runtime.text.sampling import Draw, Drawn, SamplingOptions
from runtime.text.tokenizer import Tokenizer
from tests.runtime.conftest import make_model, make_spec
from tests.runtime.engine.nowhere import Nowhere

V = 300
EOS = 2


class Script:
    """A decoder whose greedy continuation is a given list of tokens after a prompt of a given length."""

    backend = "reference"
    kv_bytes = weight_bytes = 0
    recall = None

    def __init__(self, spec: ModelSpec, answer: list[int], prompt: int, **options: Any) -> None:
        self.spec = spec
        self.options = DecoderOptions(**{"context": 64, "max_rows": 8, **options})
        sizes = {"context": self.options.context, "slots": self.options.slots, "max_rows": self.options.max_rows}
        kind = KINDS[self.options.kv]
        self.cache = KVCache(kind, spec, dict.fromkeys(page_groups(kind, spec, **sizes), Nowhere()), **sizes)
        self.answer, self.prompt = answer, prompt
        self.steps: list[Step] = []
        self.closed = self.sessions = 0
        self.fail_at: int | None = None

    @contextmanager
    def session(self) -> Iterator[None]:
        self.sessions += 1
        try:
            yield
        finally:
            self.sessions -= 1

    def forward(self, step: Step) -> np.ndarray:
        self.cache.begin(step.slots, step.positions, flush=step.flush)
        if self.fail_at is not None and len(self.steps) >= self.fail_at:
            raise InvalidActivationError("broken")
        self.steps.append(step)
        logits = np.zeros((step.logit_rows.size, V), np.float32)
        for row, position in enumerate(step.positions[step.logit_rows].tolist()):
            index = position + 1 - self.prompt
            logits[row, self.answer[index] if 0 <= index < len(self.answer) else EOS] = 10
        return logits

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def spec() -> ModelSpec:
    return make_spec(vocab_size=V)


def greedy(**changes: Any) -> SamplingOptions:
    return SamplingOptions(**{"temperature": 0.0, **changes})


def make(spec: ModelSpec, tokenizer: Tokenizer, answer: str, prompt: int = 5, **options: Any) -> tuple[Engine, Script]:
    script = Script(spec, tokenizer.encode(answer), prompt, **options)
    return Engine(script, tokenizer, name="script", eos_token_ids=(EOS,), reason="a test"), script


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def test_an_answer_from_prompt_to_end_of_sequence(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    engine, script = make(spec, tokenizer, "hello 🐙 there")
    pieces = list(engine.generate([50] * 5, greedy()))
    assert text_of(pieces) == "hello 🐙 there"
    assert all("\N{REPLACEMENT CHARACTER}" not in piece.text for piece in pieces)
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
    usage = pieces[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.cached_tokens) == (5, 0)
    assert usage.completion_tokens == len(script.answer) + 1
    assert usage.ttft_s > 0
    assert usage.decode_tokens_per_s > 0
    assert usage.prefill_tokens_per_s > 0
    assert engine.reason == "a test"


@pytest.mark.parametrize("end_loops", [False, True])
def test_an_answer_in_a_loop_ends_where_that_is_wanted(spec: ModelSpec, tokenizer: Tokenizer, end_loops: bool) -> None:
    engine, script = make(replace(spec, max_context=2048), tokenizer, "over and " * 60, context=1024)
    *_, last = engine.generate([50] * 5, greedy(end_loops=end_loops))
    assert last.finish_reason == ("loop" if end_loops else "stop")
    assert last.usage is not None
    assert (last.usage.completion_tokens < len(script.answer) // 2) == end_loops


def test_a_bias_of_a_token_that_the_model_lacks_is_refused(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    engine, _ = make(spec, tokenizer, "hello")
    banned = tokenizer.encode("l")[0]
    assert "l" not in text_of(list(engine.generate([50] * 5, greedy(logit_bias=((banned, -100.0), (V - 1, 1.0))))))
    with pytest.raises(RequestError, match=f"logit_bias names token {V}, but the model's tokens are 0 to {V - 1}"):
        list(engine.generate([50] * 5, greedy(logit_bias=((V, 1.0),))))


@pytest.mark.parametrize(
    ("changes", "ended"),
    [
        ({"thought_tokens": 3}, True),
        ({"thought_tokens": 3, "grammar": Grammar.unchecked("start: /(.|\\n)*/")}, False),
        ({}, False),
    ],
)
def test_a_thought_is_ended_at_its_budget(
    spec: ModelSpec, tokenizer: Tokenizer, changes: dict[str, Any], ended: bool
) -> None:
    """Unless the answer has a form, which leaves no room for reasoning."""
    engine, _ = make(replace(spec, max_context=256), tokenizer, "<think>hm, and so on and on", context=128)
    text = text_of(list(engine.generate([50] * 5, greedy(**changes))))
    assert ("hm,\n</think>\n\n" in text) == ended


def test_an_answer_may_repeat_the_words_of_its_prompt(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    """The repetition penalty is for what the answer says again, not for what it was asked about."""
    asked = tokenizer.encode("abc")
    engine, _ = make(spec, tokenizer, "abc", prompt=len(asked))
    sampling = SamplingOptions(temperature=0.5, top_p=1.0, repetition_penalty=10.0, seed=1)
    assert text_of(list(engine.generate(asked, sampling))) == "abc"
    engine, _ = make(spec, tokenizer, "abcabcabcabc", prompt=len(asked))
    assert text_of(list(engine.generate(asked, sampling))) != "abcabcabcabc"


def test_prefill_is_chunked_and_told_from_decoding(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    engine, script = make(spec, tokenizer, "abc", prompt=20)
    list(engine.generate(list(range(50, 70)), greedy()))
    assert [step.tokens.size for step in script.steps] == [8, 8, 4, 1, 1, 1]
    assert [step.prefill for step in script.steps] == [True] * 3 + [False] * 3
    assert all(step.compensate for step in script.steps)
    assert [step.logit_rows.tolist() for step in script.steps] == [[], [], [3], [0], [0], [0]]
    assert np.concatenate([step.positions for step in script.steps]).tolist() == list(range(23))
    assert np.concatenate([step.tokens for step in script.steps]).tolist() == [*range(50, 70), *script.answer]


@pytest.mark.parametrize("prompt", [7, 8, 9, 16])
def test_the_last_step_of_a_prompt_gives_logits_however_full_it_is(
    spec: ModelSpec, tokenizer: Tokenizer, prompt: int
) -> None:
    engine, script = make(spec, tokenizer, "ab", prompt=prompt)
    assert text_of(list(engine.generate([50] * prompt, greedy()))) == "ab"
    rows = [step.logit_rows.size for step in script.steps]
    assert rows == [0] * ((prompt - 1) // 8) + [1, 1, 1]


@pytest.mark.parametrize(
    ("stop", "text"),
    [(("there",), "hello "), (("lo t", "zzz"), "hel"), (("zzz",), "hello there"), (("e", "h"), "")],
)
def test_stop_strings_end_the_answer(spec: ModelSpec, tokenizer: Tokenizer, stop: tuple[str, ...], text: str) -> None:
    engine, _ = make(spec, tokenizer, "hello there")
    pieces = list(engine.generate([50] * 5, greedy(stop=stop)))
    assert text_of(pieces) == text
    assert pieces[-1].finish_reason == "stop"


def test_text_held_back_comes_out_at_the_end(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    engine, _ = make(spec, tokenizer, "hello EN")
    assert text_of(list(engine.generate([50] * 5, greedy(stop=("END",))))) == "hello EN"
    engine, _ = make(spec, tokenizer, "ab🐙")
    pieces = list(engine.generate([50] * 5, greedy(max_tokens=3)))
    assert text_of(pieces) == "ab\N{REPLACEMENT CHARACTER}"
    assert text_of(pieces[:-1]) == "ab"


def test_length_is_the_smaller_of_max_tokens_and_room(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    engine, _ = make(spec, tokenizer, "x" * 200)
    for wanted, expected in ((3, 3), (None, 59), (1000, 59)):
        pieces = list(engine.generate([50] * 5, greedy(max_tokens=wanted)))
        assert pieces[-1].finish_reason == "length"
        assert pieces[-1].usage is not None
        assert pieces[-1].usage.completion_tokens == expected


def test_trim_leaves_out_leading_white_space_only(
    spec: ModelSpec, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none of a base model's, whose answers continue a text."""
    engine, _ = make(spec, tokenizer, " \n hello  there ")
    assert text_of(list(engine.generate([50] * 5, greedy(), trim=True))) == " \n hello  there "
    monkeypatch.setattr(Tokenizer, "has_chat_template", True)
    assert text_of(list(engine.generate([50] * 5, greedy(), trim=True))) == "hello  there "
    assert text_of(list(engine.generate([50] * 5, greedy()))) == " \n hello  there "
    engine, _ = make(spec, tokenizer, "  \n")
    assert text_of(list(engine.generate([50] * 5, greedy(stop=("\nx",)), trim=True))) == ""


def test_a_prompt_that_does_not_fit_is_refused_before_any_work(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    engine, script = make(spec, tokenizer, "x")
    with pytest.raises(ContextOverflowError, match="64 tokens and the context holds 64"):
        engine.generate([50] * 64, greedy())
    with pytest.raises(RequestError, match="empty"):
        engine.generate([], greedy())
    for token in (-1, V):
        with pytest.raises(RequestError, match="vocabulary"):
            engine.generate([token], greedy())
    assert not script.steps
    assert len(list(engine.generate([50] * 63, greedy()))) >= 1


def test_the_common_prefix_is_not_computed_again(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    engine, script = make(spec, tokenizer, "abcd")
    first = list(range(50, 55))
    list(engine.generate(first, greedy()))
    script.steps.clear()
    script.prompt = 12
    pieces = list(engine.generate([*first, *script.answer, 99, 98, 97], greedy()))
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.cached_tokens == 9
    assert script.steps[0].tokens.tolist() == [99, 98, 97]
    assert script.steps[0].positions.tolist() == [9, 10, 11]
    script.steps.clear()
    pieces = list(engine.generate([*first[:2], 77], greedy(max_tokens=1)))
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.cached_tokens == 2
    pieces = list(engine.generate([*first[:2], 77], greedy(max_tokens=1)))
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.cached_tokens == 2
    engine.forget()
    pieces = list(engine.generate([*first[:2], 77], greedy(max_tokens=1)))
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.cached_tokens == 0


@pytest.mark.parametrize("after", [0, 1, 3])
def test_cancellation_between_steps(spec: ModelSpec, tokenizer: Tokenizer, after: int) -> None:
    engine, script = make(spec, tokenizer, "abcdefgh", prompt=20)
    pieces = list(engine.generate([50] * 20, greedy(), lambda: len(script.steps) >= after))
    assert pieces[-1].finish_reason == "cancelled"
    assert len(script.steps) == after
    assert pieces[-1].usage is not None
    again = list(engine.generate([50] * 20, greedy()))
    assert text_of(again) == "abcdefgh"
    assert again[-1].usage is not None
    assert again[-1].usage.cached_tokens == min(8 * after, 19)


def test_closing_the_iterator_gives_the_turn_back(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    engine, script = make(spec, tokenizer, "abcdefgh")
    pieces = engine.generate([50] * 5, greedy())
    assert next(pieces).text == "a"
    assert script.sessions == 1
    pieces.close()  # type: ignore[attr-defined]
    assert script.sessions == 0
    assert text_of(list(engine.generate([50] * 5, greedy()))) == "abcdefgh"


def test_a_failing_step_gives_the_turn_back(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    engine, script = make(spec, tokenizer, "abcdefgh")
    script.fail_at = 3
    with pytest.raises(InvalidActivationError):
        list(engine.generate([50] * 5, greedy()))
    script.fail_at = None
    assert script.sessions == 0
    assert text_of(list(engine.generate([50] * 5, greedy()))) == "abcdefgh"


def test_one_generation_in_one_slot_and_waiting_can_be_cancelled(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    engine, script = make(spec, tokenizer, "abcdefgh")
    first = engine.generate([50] * 5, greedy())
    next(first)
    impatient = engine.generate([51] * 5, greedy(), lambda: True)
    assert [piece.finish_reason for piece in impatient] == ["cancelled"]
    steps = len(script.steps)
    assert text_of(list(engine.generate([51] * 5, greedy()))) == "abcdefgh"
    assert text_of(list(first)) == "bcdefgh"
    tokens = [step.tokens[0] for step in script.steps[steps:]]
    assert tokens.index(51) == tokens.index(script.answer[-1]) + 1  # all of the first answer before any of the second


def test_close_ends_the_running_generation_and_refuses_the_next(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    engine, script = make(spec, tokenizer, "abcdefgh")
    running = engine.generate([50] * 5, greedy())
    next(running)
    engine.close()
    assert [piece.finish_reason for piece in running] == ["cancelled"]
    engine.close()
    assert script.closed == 2
    with pytest.raises(BackendError, match="unloaded"):
        engine.generate([50], greedy())


def test_log_probabilities_come_with_their_tokens(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    engine, script = make(spec, tokenizer, "ab")
    pieces = list(engine.generate([50] * 5, greedy(logprobs=2)))[:-1]
    for piece, token in zip(pieces, script.answer, strict=True):
        assert piece.token == token
        assert piece.logprob is not None
        assert piece.logprob.token == token == piece.logprob.top[0].token
        assert piece.logprob.text == piece.text
        assert piece.logprob.logprob == pytest.approx(10 - np.log(np.exp(10) + V - 1), abs=1e-4)
        assert len(piece.logprob.top) == 2


class DrawingScript(Script):
    """One that draws its tokens itself."""

    def draw(self, step: Step, draws: Sequence[Draw]) -> list[Drawn]:
        tokens = self.forward(step).argmax(1).tolist()
        return [
            Drawn(token, -0.5, [(token, -0.5), (0, -2.0)][: one.options.logprobs])
            for token, one in zip(tokens, draws, strict=True)
        ]


def test_log_probabilities_of_tokens_that_the_decoder_draws(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    """All but the first, which comes from the prompt's logits."""
    script = DrawingScript(spec, tokenizer.encode("abc"), 5)
    engine = Engine(script, tokenizer, name="script", eos_token_ids=(EOS,), reason="a test")
    pieces = list(engine.generate([50] * 5, greedy(logprobs=2)))[:-1]
    assert [piece.token for piece in pieces] == script.answer
    for piece in pieces[1:]:
        assert piece.logprob is not None
        assert (piece.logprob.token, piece.logprob.logprob) == (piece.token, -0.5)
        assert [(each.token, each.logprob) for each in piece.logprob.top] == [(piece.token, -0.5), (0, -2.0)]


def test_prompts(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    engine, _ = make(spec, tokenizer, "x")
    assert engine.text_prompt("") == [spec.bos_token_id]
    assert tokenizer.decode(engine.text_prompt("hi")) == "hi"
    chat = engine.chat_prompt([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(chat) == "hi"


@pytest.mark.parametrize("kv", ["fp16", "int8"])
def test_a_random_model_answers_the_same_however_the_prompt_is_chunked(
    spec: ModelSpec, tokenizer: Tokenizer, kv: str
) -> None:
    model = make_model(spec)
    prompt = [int(token) for token in np.random.default_rng(0).integers(3, V, 30)]

    def answers(max_rows: int, seed: int) -> tuple[list[int | None], list[int | None]]:
        options = DecoderOptions(context=96, max_rows=max_rows, kv=kv, k_chunk=64)
        engine = Engine(ReferenceDecoder(model, options), tokenizer, name="tiny", eos_token_ids=())
        sampling = SamplingOptions(temperature=0.9, seed=seed, max_tokens=12, repetition_penalty=1.1)
        first = [piece.token for piece in engine.generate(prompt, sampling)][:-1]
        tokens = [token for token in first if token is not None]
        second = [piece.token for piece in engine.generate([*prompt, *tokens, 7, 8], sampling)][:-1]
        return first, second

    assert answers(4, 1) == answers(4, 1)
    assert answers(4, 1) == answers(7, 1) == answers(128, 1)
    assert answers(4, 1) != answers(4, 2)


CHATS = (list(range(100, 140)), list(range(200, 230)))


def open_tiny(
    model: Any,
    tokenizer: Tokenizer,
    kv: KVKind = "fp16",
    *,
    slots: int = 3,
    context: int = 160,
    folder: Path | None = None,
) -> Engine:
    """A random model with a pool of pages for one context, and maybe a folder of saved chats."""
    options = DecoderOptions(
        context=context, kv=kv, k_chunk=64, slots=slots, pages=KINDS[kv].max_pages(context), max_rows=64
    )
    decoder = ReferenceDecoder(model, options)
    engine = Engine(decoder, tokenizer, name="tiny", eos_token_ids=())
    if folder is not None:
        about = About.of(decoder.cache, model.spec, model="id", recipe={"bits": 4})
        engine.save_to(SavedCaches(folder, about, smallest=20, gain=5))
    return engine


def ask(engine: Engine, prompt: list[int], seed: int = 1, max_tokens: int = 6) -> tuple[list[int], int]:
    """The answer's tokens, and how many of the prompt's were cached."""
    pieces = list(engine.generate(prompt, SamplingOptions(temperature=0.9, seed=seed, max_tokens=max_tokens)))
    assert pieces[-1].usage is not None
    return [piece.token for piece in pieces[:-1] if piece.token is not None], pieces[-1].usage.cached_tokens


def test_switching_regenerating_and_branching_compute_only_what_is_new(tokenizer: Tokenizer) -> None:
    engine = open_tiny(make_model(make_spec(vocab_size=V, max_context=256)), tokenizer)
    one, two = CHATS
    first, _ = ask(engine, one)
    second, _ = ask(engine, two)
    assert ask(engine, one) == (first, len(one) - 1)  # regenerated with the same seed: the same answer
    other, cached = ask(engine, one, seed=2)
    assert (other != first, cached) == (True, len(one) - 1)
    assert ask(engine, [*two, *second, 5])[1] == len(two) + len(second) - 1
    assert ask(engine, [*one, *other, 5])[1] == len(one) + len(other) - 1
    assert ask(engine, [*one[:30], 9, 9])[1] == 30


@pytest.mark.parametrize("kv", ["fp16", "int4", "kivi2"])
def test_a_reopened_chat_goes_on_as_if_it_had_stayed(tokenizer: Tokenizer, kv: KVKind, tmp_path: Path) -> None:
    model = make_model(make_spec(vocab_size=V, max_context=512, num_layers=1))
    long = [50 + i % 200 for i in range(180)]

    def open_again(folder: Path | None) -> Engine:
        return open_tiny(model, tokenizer, kv, context=256, folder=folder)

    stays, goes = open_again(None), open_again(tmp_path)
    for engine in (stays, goes):
        ask(engine, [3, 4, 5])  # too short to be kept
        first, _ = ask(engine, long)
    goes.close()
    assert len(list(tmp_path.iterdir())) == 1
    reopened = open_again(tmp_path)
    again = [*long, *first, 7, 8]
    assert ask(reopened, again) == ask(stays, again)
    reopened.forget()
    assert ask(reopened, again)[1] == len(long) + len(first) - 1, "what is on disk is still there"
    reopened.close()
    fresh = open_again(None)
    assert ask(fresh, again)[1] == 0
    assert len(list(tmp_path.iterdir())) == 1, "the longer chat took the place of the shorter"


def test_a_deleted_chat_leaves_nothing_behind(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = make_model(make_spec(vocab_size=V, max_context=256))
    engine = open_tiny(model, tokenizer, folder=tmp_path)
    for name, chat in zip(("one", "two"), CHATS, strict=True):
        list(engine.generate(chat, greedy(max_tokens=2), chat=name))
    engine.forget("one")
    engine.close()
    (file,) = tmp_path.iterdir()
    header = read_header(file)
    assert (header.chat, header.tokens[: len(CHATS[1])]) == ("two", tuple(CHATS[1]))
    engine = open_tiny(model, tokenizer, folder=tmp_path)
    again = [*header.tokens, 5]
    assert ask(engine, again)[1] == len(header.tokens)
    engine.forget("two")  # though nobody said whose this prompt was: it goes on in what was the chat's
    forget(tmp_path, chat="two")
    assert ask(engine, again)[1] == 0
    engine.forget()
    assert [ask(engine, chat)[1] for chat in CHATS] == [0, 0]


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_what_is_measured_costs_no_conversation(tokenizer: Tokenizer, tmp_path: Path, slots: int) -> None:
    model = make_model(make_spec(vocab_size=V, max_context=256))
    engine = open_tiny(model, tokenizer, slots=slots, context=256, folder=tmp_path)
    answers = [ask(engine, chat)[0] for chat in CHATS]
    longer = [[*chat, *answer, 5] for chat, answer in zip(CHATS, answers, strict=True)]
    cached = [len(chat) - 2 for chat in longer]
    with engine.borrow() as decoder:
        for position in range(BORROWED_TOKENS):
            row = np.array([position], np.int32)
            decoder.forward(Step(tokens=row, slots=0 * row, positions=row, logit_rows=0 * row, compensate=True))
    assert engine.decoder.cache.length(0) == 0, "what was measured holds no pages"
    assert len(list(tmp_path.iterdir())) == {1: 2, 2: 1, 4: 0}[slots], "those without a place are on disk"
    found = [ask(engine, chat)[1] for chat in longer]
    assert found == cached


def test_the_decoder_is_lent_when_all_answers_have_ended(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    engine, _ = make(spec, tokenizer, "hello there")
    answer = engine.generate([50] * 5, greedy())
    next(answer)
    with engine.borrow():
        assert engine.running == 0
    assert list(answer)[-1].finish_reason == "stop"


def test_a_measurement_that_fails_gives_the_decoder_back(tokenizer: Tokenizer) -> None:
    engine = open_tiny(make_model(make_spec(vocab_size=V, max_context=256)), tokenizer)
    with pytest.raises(ZeroDivisionError), engine.borrow():
        raise ZeroDivisionError
    assert ask(engine, CHATS[0])[1] == 0


def test_a_spoilt_file_costs_only_a_prefill(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = make_model(make_spec(vocab_size=V, max_context=256))
    engine = open_tiny(model, tokenizer, folder=tmp_path)
    expected, _ = ask(engine, CHATS[0])
    engine.close()
    (file,) = tmp_path.iterdir()
    *content, last = file.read_bytes()
    file.write_bytes(bytes([*content, last ^ 1]))
    engine = open_tiny(model, tokenizer, folder=tmp_path)
    assert ask(engine, CHATS[0]) == (expected, 0)

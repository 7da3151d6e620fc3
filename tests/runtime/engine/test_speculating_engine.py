"""An engine with speculation gives the results of one without: texts, ends, log-probabilities, conversations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from assets import demo_checkpoint_path, demo_path
from models.exact import ExactSource
from models.store import StoredModel
from runtime.backends.decoder import DecoderOptions
from runtime.drafting import Speculate
from runtime.engine import copying
from runtime.engine.costs import MIN_CONTEXT, measure_costs, start
from runtime.engine.engine import Engine
from runtime.engine.gamma import FixedGamma
from runtime.engine.generation import Piece
from runtime.engine.measure import continued, measure_speculation
from runtime.engine.saved import About, SavedCaches
from runtime.errors import RequestError
from runtime.load.plan import open_engine
from runtime.text.constraint import Grammar
from runtime.text.sampling import SamplingOptions

TEXT = "The old lighthouse stood on a rock in the sea, and every evening the keeper"


@contextmanager
def opened(*, gamma: int | None = None, **options: Any) -> Iterator[Engine]:
    """The bundled model, much compensated, its drafts a little."""
    usual: dict[str, Any] = {"kv": "hierarchical", "context": 400, "k_chunk": 512, "slots": 2, "max_rows": 64}
    usual["draft_k_chunk"] = 64
    engine = open_engine(StoredModel.open_folder(demo_path(), "demo"), DecoderOptions(**{**usual, **options}), "cpu")
    try:
        engine.speculate(gamma)
        yield engine
    finally:
        engine.close()


def greedy(**changes: Any) -> SamplingOptions:
    return SamplingOptions(**{"temperature": 0.0, "max_tokens": 60, **changes})


def said(engine: Engine, text: str, options: SamplingOptions, chat: str | None = None) -> list[Piece]:
    return list(engine.generate(engine.text_prompt(text), options, chat=chat))


def held(engine: Engine) -> list[int]:
    """The tokens of the one conversation that an engine has."""
    return max((engine._conversations.tokens(slot) for slot in range(2)), key=len)


def gist(pieces: list[Piece]) -> list[Any]:
    """What must be the same."""
    assert pieces[-1].usage is not None
    return [
        *((piece.text, piece.token, piece.logprob, piece.finish_reason) for piece in pieces),
        pieces[-1].usage.completion_tokens,
    ]


@pytest.fixture(scope="module")
def plain_pieces() -> list[Piece]:
    with opened() as engine:
        return said(engine, TEXT, greedy())


def endings(plain: list[Piece]) -> dict[str, SamplingOptions]:
    """Ends of every kind, in the middle of rounds."""
    text = "".join(piece.text for piece in plain)
    return {
        "end": greedy(),
        "one": greedy(max_tokens=1),
        "length": greedy(max_tokens=12),
        "stop": greedy(stop=(text[70:76],)),
        "logprobs": greedy(max_tokens=20, logprobs=2),
        "context": greedy(max_tokens=None),
        "repetition": greedy(repetition_penalty=0.7),  # what was said becomes likelier: the model says it again
    }


@pytest.mark.parametrize("gamma", [2, 7])
@pytest.mark.parametrize("end", ["end", "one", "length", "stop", "logprobs", "context", "repetition"])
def test_answers_and_their_ends_are_the_same(plain_pieces: list[Piece], gamma: int, end: str) -> None:
    options = endings(plain_pieces)[end]
    with opened(context=128) as alone, opened(gamma=gamma, context=128) as engine:
        alone.speculate(None, copied=False)
        if end == "context":  # nothing else ends it
            alone._eos = engine._eos = frozenset()
        wanted, found = said(alone, TEXT, options), said(engine, TEXT, options)
        assert gist(found) == gist(wanted)
        assert found[-1].finish_reason == ("stop" if end in ("end", "stop", "repetition") else "length")
        tokens, plain = ([piece.token for piece in pieces[:-1]] for pieces in (found, plain_pieces))
        assert (tokens == plain[: len(tokens)]) == (end not in ("context", "repetition"))
        assert found[-1].usage is not None
        assert wanted[-1].usage is not None
        assert wanted[-1].usage.speculation is None
        did = found[-1].usage.speculation
        assert did is not None
        assert did.gamma == gamma
        assert (did.rounds > 0) == (end != "one")
        assert held(engine) == held(alone) != []


def test_an_end_of_sequence_in_a_round_ends_the_answer(plain_pieces: list[Piece]) -> None:
    """Whichever token ends it, nothing of the round behind it is said or kept."""
    for place in (3, 4, 5, 9):
        ends = [piece.token for piece in plain_pieces[:-1]]
        with opened(gamma=4) as engine:
            engine._eos = frozenset([ends[place]])
            pieces = said(engine, TEXT, greedy())
            first = ends.index(ends[place])
            assert [piece.token for piece in pieces[:-1]] == ends[:first]
            assert pieces[-1].finish_reason == "stop"
            assert len(held(engine)) == len(engine.text_prompt(TEXT)) + first


def test_conversations_go_on_from_what_speculation_left() -> None:
    """Two chats in turns, one branched, over pages; and what is reused is as much."""

    def talk(gamma: int | None) -> list[Any]:
        with opened(gamma=gamma, context=900) as engine:
            found: list[Any] = []
            texts = {"a": TEXT, "b": "It was a cold morning in the village."}
            for turn in range(3):
                for chat in texts:
                    pieces = said(engine, texts[chat], greedy(max_tokens=90, stop=("\n\n",)), chat)
                    usage = pieces[-1].usage
                    assert usage is not None
                    texts[chat] += "".join(piece.text for piece in pieces) + f" Then {turn}"
                    found.append((gist(pieces), usage.cached_tokens))
            branch = said(engine, texts["a"][: len(texts["a"]) // 2], greedy(max_tokens=20))
            found.append(gist(branch))
            return found

    assert talk(5) == talk(None)


def test_another_budget_in_the_middle_of_a_chat() -> None:
    """Compensation that changes between answers changes the target, alone and with drafts alike."""

    def talk(gamma: int | None) -> list[Any]:
        found, text = [], TEXT
        with opened(gamma=gamma) as engine:
            for k_chunk in (512, 0, 1024, 64):
                with engine.borrow(MIN_CONTEXT) as decoder:
                    decoder.set_k_chunk(k_chunk)
                pieces = said(engine, text, greedy(max_tokens=40), "chat")
                text += "".join(piece.text for piece in pieces)
                found.append(gist(pieces))
        return found

    assert talk(4) == talk(None)


def test_a_cancelled_round_leaves_a_conversation_that_goes_on(plain_pieces: list[Piece]) -> None:
    with opened(gamma=4) as engine:
        for after in range(1, 9):
            asked = iter([*[False] * after, *[True] * 100])
            pieces = list(engine.generate(engine.text_prompt(TEXT), greedy(), partial(next, asked)))
            assert pieces[-1].finish_reason == "cancelled"
            assert gist(said(engine, TEXT, greedy())) == gist(plain_pieces)


def test_saved_caches_come_back(tmp_path: Path) -> None:
    """What a speculating engine wrote to disk is what another goes on from."""
    model = StoredModel.open_folder(demo_path(), "demo")

    def saved(engine: Engine) -> SavedCaches:
        cache = engine.decoder.cache
        about = About.of(cache, model.spec, model="demo", recipe=model.recipe.to_json(), prompts=0)
        return SavedCaches(tmp_path, about, smallest=256)

    text = TEXT * 35
    with opened(gamma=4, context=900) as engine:
        engine.save_to(saved(engine))
        pieces = said(engine, text, greedy(max_tokens=30), "chat")
        count = len(held(engine))
    assert list(tmp_path.rglob("*")), "long enough to be worth a file"
    longer = text + "".join(piece.text for piece in pieces)
    answers = []
    for gamma in (4, None):
        with opened(gamma=gamma, context=900) as engine:
            engine.save_to(saved(engine))
            answers.append(said(engine, longer + " and", greedy(max_tokens=30), "chat"))
            usage = answers[-1][-1].usage
            assert usage is not None
            assert count - 8 <= usage.cached_tokens <= count
    assert gist(answers[0]) == gist(answers[1])


def test_seeded_answers_do_not_hang_on_the_clock() -> None:
    """With adaptation, the same seed gives the same tokens though other rounds were learned from in between."""
    with opened() as engine:
        start(engine, Speculate())
        engine._drafting._first = 3
        options = SamplingOptions(temperature=1, top_p=0.9, seed=3, max_tokens=60)
        first = said(engine, TEXT, options)
        said(engine, TEXT[:20], SamplingOptions(temperature=1.5, max_tokens=60))
        engine.forget()
        assert [piece.token for piece in said(engine, TEXT, options)] == [piece.token for piece in first]


COPIED = {
    "greedy": greedy(max_tokens=120, repetition_penalty=0.6),  # what was said becomes likelier: it is said again
    "logprobs": greedy(max_tokens=60, repetition_penalty=0.6, logprobs=2),
    "stop": greedy(repetition_penalty=0.6, max_tokens=200, stop=(" the",)),
    "seeded": SamplingOptions(temperature=0.3, top_p=0.95, repetition_penalty=0.6, seed=5, max_tokens=100),
    "grammar": greedy(
        max_tokens=80, grammar=Grammar.of_schema({"type": "array", "items": {"type": "string"}, "minItems": 40})
    ),
}


@pytest.mark.parametrize("way", COPIED)
def test_answers_with_copied_drafts_are_the_same(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Alone and two at a time, with the 4-bit cache; an engine that was told nothing copies."""
    monkeypatch.setattr(copying, "_SHORT", 0.0)
    prompts = (TEXT, f"[{TEXT}] [{TEXT}] [")
    answers, did = [], []
    for copied in (True, False):
        with opened(kv="int4", context=700, k_chunk=64) as engine:
            if not copied:
                engine.speculate(None, copied=False)
            own = [said(engine, text, COPIED[way]) for text in prompts]
            engine.forget()
            together: list[list[Any]] = [[], []]
            for text, items in zip(prompts, together, strict=True):
                engine.submit(engine.text_prompt(text), COPIED[way], items.append)
            while engine.step():
                pass
            answers.append([gist(pieces) for pieces in (*own, *together)])
            did.append([pieces[-1].usage.speculation for pieces in (*own, *together)])
    assert answers[0] == answers[1]
    assert did[1] == [None] * 4
    assert any(found is not None and found.rounds for found in did[0])
    assert answers[0][:2] == answers[0][2:]


def test_a_seed_of_which_the_model_drafts_copies_nothing() -> None:
    """Its drafts take random numbers of their own, so who drafts must not hang on the clock."""
    with opened() as engine:
        start(engine, Speculate())
        engine._drafting._first = 2
        pieces = said(engine, TEXT, SamplingOptions(temperature=0.7, repetition_penalty=0.7, seed=5, max_tokens=80))
        usage = pieces[-1].usage
        assert usage is not None
        assert usage.speculation is not None
        assert usage.speculation.drafted <= 2 * usage.speculation.rounds


def test_a_cache_without_a_draft_copies_alone() -> None:
    with opened(kv="int4") as engine:
        start(engine, Speculate(gamma=3))
        assert not engine.speculates
        assert engine._drafting._times is not None
        start(engine, False)
        assert engine._drafting._times is None


def test_costs_and_a_measured_speedup() -> None:
    with opened(context=400) as engine, engine.borrow() as decoder:
        costs = measure_costs(decoder)
        assert len(costs.verify) == 7
        assert costs.draft < costs.verify[-1]
        found = measure_speculation(decoder, engine.text_prompt(TEXT), 40, gamma=3)
        assert list(found.speculated.tokens) == list(found.plain.tokens)
        assert found.speculated.speculation.rounds > 5
        assert found.speedup > 0
        with pytest.raises(RequestError, match="context of 400"):
            continued(decoder, [5] * 390, 20, greedy(), FixedGamma(0))


def test_a_context_too_short_for_timing_is_refused_in_words() -> None:
    with opened(context=MIN_CONTEXT - 1) as engine, pytest.raises(RequestError, match="longer context"):
        start(engine, Speculate())


def test_speculation_begins_and_ends_when_asked() -> None:
    with opened() as engine:
        assert not engine.speculates
        start(engine, Speculate(gamma=2))
        assert engine.speculates
        start(engine, None)
        assert not engine.speculates
        with pytest.raises(RequestError, match="from 1 to 15"):
            engine.speculate(16)


def test_exact_answers_are_drafted_unless_that_is_turned_off() -> None:
    """The bundled model by the weights that it was made of, with the default cache of such answers."""
    source = ExactSource(demo_checkpoint_path(), StoredModel.open_folder(demo_path()))
    with opened(kv="fp16", k_chunk=0, draft_k_chunk=0, exact=source) as engine:
        start(engine, False)
        assert not engine.speculates
        plain = said(engine, TEXT, greedy())
        start(engine, None)
        assert engine.speculates
        start(engine, Speculate(gamma=3))
        engine.forget()
        drafted = said(engine, TEXT, greedy())
    assert gist(drafted) == gist(plain)
    usage = drafted[-1].usage
    assert usage is not None
    assert usage.speculation is not None
    assert usage.speculation.rounds > 2
    assert usage.speculation.acceptance_rate > 0.3

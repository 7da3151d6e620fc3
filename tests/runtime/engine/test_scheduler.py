"""Many requests at once: each gets what it would get alone, none starves, and no page is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from models.spec import ModelSpec
from runtime.backends.cpu.decoder import CpuDecoder
from runtime.backends.decoder import DecoderOptions, Step
from runtime.backends.reference.decoder import ReferenceDecoder
from runtime.engine.engine import Engine
from runtime.engine.generation import Piece
from runtime.engine.scheduler import CHUNK, REMAINDER
from runtime.errors import InvalidActivationError, OutOfMemoryError
from runtime.kv.kinds import KINDS, KVKind
from runtime.text.sampling import SamplingOptions
from runtime.text.tokenizer import Tokenizer
from tests.grid import grid
from tests.runtime.conftest import make_model, make_spec

V = 300
GREEDY = SamplingOptions(temperature=0, max_tokens=12)


@pytest.fixture
def spec() -> ModelSpec:
    found: ModelSpec = make_spec(vocab_size=V, max_context=1024)
    return found


def opened(
    tokenizer: Tokenizer,
    model: Any,
    backend: type = ReferenceDecoder,
    *,
    contexts: int = 4,
    kv: KVKind = "fp16",
    **options: Any,
) -> Engine:
    usual: dict[str, Any] = {"context": 320, "slots": 4, "max_rows": 128, "k_chunk": 64, "kv": kv, **options}
    usual["pages"] = contexts * KINDS[kv].max_pages(usual["context"])
    return Engine(backend(model, DecoderOptions(**usual)), tokenizer, name="tiny", eos_token_ids=())


class Asked:
    """A request and what came of it."""

    def __init__(
        self,
        engine: Engine,
        prompt: list[int],
        options: SamplingOptions = GREEDY,
        cancelled: Callable[[], bool] = lambda: False,
        chat: str | None = None,
    ) -> None:
        self.items: list[Piece | Exception] = []
        engine.submit(prompt, options, self.items.append, cancelled, chat=chat)

    @property
    def tokens(self) -> list[int | None]:
        return [item.token for item in self.items if isinstance(item, Piece) and item.finish_reason is None]

    @property
    def end(self) -> str | Exception | None:
        last = self.items[-1] if self.items else None
        return last.finish_reason if isinstance(last, Piece) else last

    @property
    def cached(self) -> int:
        last = self.items[-1]
        assert isinstance(last, Piece)
        assert last.usage is not None
        return last.usage.cached_tokens


def finish(engine: Engine) -> None:
    while engine.step():
        pass
    assert (engine.running, engine.waiting) == (0, 0)


def prompt_of(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, V, length)]


def watched(engine: Engine) -> list[Step]:
    """The steps that an engine's decoder runs from now on."""
    steps: list[Step] = []
    forward = engine.decoder.forward

    def noted(step: Step) -> Any:
        steps.append(step)
        return forward(step)

    engine.decoder.forward = noted  # type: ignore[method-assign]
    return steps


LENGTHS = (5, 17, 70, 90, 141, 200, 33)


@pytest.mark.parametrize("gamma", [None, 3])
@pytest.mark.parametrize("backend", [ReferenceDecoder, CpuDecoder])
@pytest.mark.parametrize("prompt_k_chunk", grid([0, 64], {64}))
def test_answers_are_those_of_requests_served_alone(
    spec: ModelSpec, tokenizer: Tokenizer, backend: type, gamma: int | None, prompt_k_chunk: int
) -> None:
    """On the CPU bit for bit, log-probabilities too: chunks, concurrent and a longer neighbour change nothing."""
    model = make_model(spec)
    sampling = [
        GREEDY,
        SamplingOptions(temperature=0, max_tokens=30, logprobs=2),
        SamplingOptions(temperature=0.9, seed=4, max_tokens=20, repetition_penalty=1.1),
    ]

    def made() -> Engine:
        engine = opened(tokenizer, model, backend, prompt_k_chunk=prompt_k_chunk)
        engine.speculate(gamma)
        return engine

    together = made()
    asked = [Asked(together, prompt_of(i, n), sampling[i % 3]) for i, n in enumerate(LENGTHS)]
    finish(together)
    for i, n in enumerate(LENGTHS):
        engine = made()
        alone = Asked(engine, prompt_of(i, n), sampling[i % 3])
        finish(engine)
        assert asked[i].tokens == alone.tokens
        if backend is CpuDecoder:
            assert [getattr(item, "logprob", None) for item in asked[i].items] == [
                getattr(item, "logprob", None) for item in alone.items
            ]


def test_a_long_prompt_and_running_answers_share_the_steps(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    engine = opened(tokenizer, make_model(spec), context=1000)
    steps = watched(engine)
    short = Asked(engine, prompt_of(1, 10), SamplingOptions(temperature=0, max_tokens=40))
    engine.step()
    long = Asked(engine, prompt_of(2, 900))
    before = len(short.tokens)
    while not long.items:
        engine.step()
    chunks = [step.tokens.size for step in steps[1:] if step.prefill]
    assert sum(chunks) == 900
    assert max(chunks) <= CHUNK + REMAINDER
    assert len(short.tokens) - before == len(chunks), "a token with every chunk"
    finish(engine)
    steps.clear()
    Asked(engine, prompt_of(3, 300))
    finish(engine)
    assert [step.tokens.size for step in steps if step.prefill] == [128, 128, 44], "alone, in full steps"
    steps.clear()
    Asked(engine, prompt_of(4, 300))
    while engine.step(beside=True):
        pass
    assert [step.tokens.size for step in steps if step.prefill] == [64, 64, 64, 64, 44], "another model answers, too"


def test_tokens_of_several_requests_make_one_step(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    engine = opened(tokenizer, make_model(spec))
    steps = watched(engine)
    for i in range(4):
        Asked(engine, prompt_of(i, 10))
    finish(engine)
    assert max(step.tokens.size for step in steps if not step.prefill) == 4
    assert sum(not step.prefill for step in steps) < 20


def test_drafts_and_verifications_of_several_requests_make_common_steps(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    engine = opened(tokenizer, make_model(spec))
    engine.speculate(3)
    steps = watched(engine)
    for i in range(2):
        Asked(engine, prompt_of(i, 10), SamplingOptions(temperature=0, max_tokens=40))
    finish(engine)
    assert max(step.tokens.size for step in steps if step.draft) == 2
    assert max(step.tokens.size for step in steps if not step.draft and not step.prefill) == 8


def test_what_goes_wrong_in_one_request_hurts_no_other(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    """A NaN in one row fails the step; the rows run again by themselves."""
    model = make_model(spec)
    engine = opened(tokenizer, model)
    forward = engine.decoder.forward

    def broken(step: Step) -> Any:
        logits = forward(step)
        if not step.prefill and (step.positions[step.slots == bad.slot] >= 24).any():
            raise InvalidActivationError("NaN")
        return logits

    class bad:  # noqa: N801
        slot = 1

    engine.decoder.forward = broken  # type: ignore[method-assign]
    asked = [Asked(engine, prompt_of(i, 20)) for i in range(3)]
    finish(engine)
    ends = [one.end for one in asked]
    assert [isinstance(end, InvalidActivationError) for end in ends].count(True) == 1
    for i, one in enumerate(asked):
        if one.end == "length":
            engine = opened(tokenizer, model)
            alone = Asked(engine, prompt_of(i, 20))
            finish(engine)
            assert one.tokens == alone.tokens


def test_requests_share_the_beginning_that_is_being_answered(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    engine = opened(tokenizer, make_model(spec))
    system = prompt_of(9, 150)
    asked = [Asked(engine, [*system, *prompt_of(i, 8)]) for i in range(3)]
    while engine.running < 3:
        engine.step()
    pages = KINDS["fp16"].stored_pages(158)
    assert engine.decoder.cache.table.used < 3 * pages  # type: ignore[attr-defined]
    finish(engine)
    assert [one.cached for one in asked] == [0, 150, 150]


def test_who_does_not_fit_waits_and_who_never_will_is_refused(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    engine = opened(tokenizer, make_model(spec), contexts=1)
    most = SamplingOptions(temperature=0, max_tokens=None)
    asked = [Asked(engine, prompt_of(i, 250), most) for i in range(3)]
    for _ in range(5):
        engine.step()
    assert (engine.running, engine.waiting) == (1, 2)
    finish(engine)
    assert [one.end for one in asked] == ["length"] * 3
    engine = Engine(
        ReferenceDecoder(make_model(spec), DecoderOptions(context=320, slots=2, pages=2)),
        tokenizer, name="tiny", eos_token_ids=(),
    )  # fmt: skip
    never, small = Asked(engine, prompt_of(1, 250)), Asked(engine, prompt_of(2, 20))
    finish(engine)
    assert isinstance(never.end, OutOfMemoryError)
    assert small.end == "length"


def test_a_chat_that_is_forgotten_while_it_is_answered_leaves_nothing(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    engine = opened(tokenizer, make_model(spec))
    engine.parallel = 2
    prompts = [prompt_of(i, 40) for i in range(3)]
    asked = [Asked(engine, prompt, chat="gone" if i else "stays") for i, prompt in enumerate(prompts)]
    while engine.running < 2:
        engine.step()
    engine.forget("gone")  # one is answered, one waits
    finish(engine)
    assert [one.end for one in asked] == ["length"] * 3
    again = [Asked(engine, [*prompt, 7]) for prompt in prompts]
    finish(engine)
    assert [one.cached for one in again] == [40, 0, 0]


def test_answers_may_be_iterated_side_by_side(spec: ModelSpec, tokenizer: Tokenizer) -> None:
    engine = opened(tokenizer, make_model(spec))
    answers = [engine.generate(prompt_of(i, 30), GREEDY) for i in range(6)]
    found: list[list[int | None]] = [[next(answer).token] for answer in answers]
    for own, answer in zip(reversed(found), reversed(answers), strict=True):
        own += [piece.token for piece in answer]
    for i in range(6):
        assert found[i] == [piece.token for piece in engine.generate(prompt_of(i, 30), GREEDY)]


@pytest.mark.parametrize("kv", ["fp16", "int4"])
@pytest.mark.parametrize("contexts", [1, 2])
def test_five_hundred_requests_leave_no_page(tokenizer: Tokenizer, kv: KVKind, contexts: int) -> None:
    """Random arrivals, lengths, shared beginnings, cancellations: everyone gets an end, and all pages come back."""
    model = make_model(make_spec(vocab_size=V, max_context=1024, num_layers=1))
    engine = opened(tokenizer, model, CpuDecoder, contexts=contexts, kv=kv)
    rng = np.random.default_rng(7)
    beginnings = [prompt_of(i, 120) for i in range(3)]
    asked: list[Asked] = []
    gone: set[int] = set()
    while len(asked) < 500:
        for _ in range(int(rng.integers(0, 4))):
            own = prompt_of(int(rng.integers(1000)), int(rng.integers(1, 80)))
            prompt = (
                [*beginnings[int(rng.integers(3))][: int(rng.integers(1, 120))], *own] if rng.random() < 0.7 else own
            )
            limit = None if rng.random() < 0.02 else int(rng.integers(1, 8))
            options = SamplingOptions(temperature=float(rng.integers(2)), seed=len(asked), max_tokens=limit)
            number = len(asked)
            asked.append(Asked(engine, prompt, options, lambda number=number: number in gone))
        if rng.random() < 0.3 and asked:
            gone.add(int(rng.integers(max(0, len(asked) - 20), len(asked))))
        engine.step()
        cache = engine.decoder.cache
        assert cache.table.used <= cache.table.capacity  # type: ignore[attr-defined]
    finish(engine)
    ends = [one.end for one in asked]
    assert set(ends) <= {"length", "cancelled"}
    assert all(end == "length" for number, end in enumerate(ends) if number not in gone)
    assert sum(
        isinstance(item, Piece) and item.finish_reason is not None for one in asked for item in one.items
    ) == len(asked), "one end each"
    assert engine._conversations.busy == 0
    engine.forget()
    assert cache.table.used == 0  # type: ignore[attr-defined]

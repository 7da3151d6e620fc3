"""Windows and perplexity against the definition written as loops."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.progress import Progress
from runtime.backends.decoder import DecoderOptions, Step
from runtime.backends.reference.decoder import ReferenceDecoder
from runtime.engine.engine import Engine
from runtime.errors import Cancelled, RequestError
from runtime.measure.evaluate import full_precision_perplexity, negative_log_likelihood, perplexity, safe_exp, windows
from runtime.text.sampling import SamplingOptions
from runtime.text.tokenizer import Detokenizer, Tokenizer
from tests.grid import grid
from tests.runtime.conftest import make_model

TOKENS = [int(token) for token in np.random.default_rng(0).integers(3, 96, 57)]


@given(count=st.integers(2, 300), window=st.integers(2, 40), stride=st.integers(1, 40))
def test_every_token_is_scored_at_most_once_and_only_window_heads_are_left_out(
    count: int, window: int, stride: int
) -> None:
    stride = min(stride, window)
    scored: list[int] = []
    for part in windows(count, window, stride):
        assert part.start % stride == 0
        assert part.end == min(part.start + window, count)
        assert part.start < part.first < part.end
        scored += range(part.first, part.end)
    assert scored == sorted(set(scored))
    left_out = set(range(count)) - set(scored)
    assert left_out == ({0} if stride < window else set(range(0, count, window)))


@given(count=st.integers(2, 300), window=st.integers(2, 40), stride=st.integers(1, 40))
def test_of_a_chat_the_second_half_of_each_window_is_scored(count: int, window: int, stride: int) -> None:
    stride = min(stride, window)
    scored: list[int] = []
    for part in windows(count, window, stride, as_chat=True):
        assert part.end == min(part.start + window, count)
        assert part.prompt == part.start + (part.end - part.start) // 2
        assert part.start < part.prompt <= part.first < part.end
        scored += range(part.first, part.end)
    assert scored == sorted(set(scored))
    if stride <= window // 2:  # then the answers leave no gap behind the first prompt
        assert scored == list(range(min(window, count) // 2, count))


@pytest.mark.parametrize(("count", "window", "stride"), [(10, 1, 1), (10, 4, 0), (10, 4, 5), (1, 4, 2), (0, 4, 2)])
def test_bad_windows_are_refused(count: int, window: int, stride: int) -> None:
    with pytest.raises(RequestError):
        windows(count, window, stride)


def by_definition(model: Any, window: int, stride: int, **options: Any) -> tuple[float, int]:
    nll, count, scored = 0.0, 0, 0
    for start in range(0, len(TOKENS), stride):
        part = TOKENS[start : start + window]
        decoder = ReferenceDecoder(model, DecoderOptions(context=64, **options))
        M = len(part)
        rows = np.arange(M, dtype=np.int32)
        logits = decoder.forward(
            Step(tokens=np.array(part, np.int32), slots=np.zeros(M, np.int32), positions=rows, logit_rows=rows)
        ).astype(np.float64)
        for i in range(1, M):
            if start + i >= scored:
                row = logits[i - 1]
                nll += math.log(np.exp(row - row.max()).sum()) + row.max() - row[part[i]]
                count += 1
        scored = start + M
        if scored == len(TOKENS):
            break
    return nll, count


@pytest.mark.parametrize(("window", "stride"), [(64, 64), (16, 8), (16, 16), (5, 1), (7, 5)])
@pytest.mark.parametrize("max_rows", grid([3, 128], {3}))
def test_perplexity_is_the_definition(window: int, stride: int, max_rows: int) -> None:
    model = make_model(bits=3)
    expected, count = by_definition(model, window, stride, k_chunk=64)
    decoder = ReferenceDecoder(model, DecoderOptions(context=64, max_rows=max_rows, k_chunk=64))
    reports: list[Progress] = []
    result = perplexity(decoder, TOKENS, window, stride, reports.append)
    assert result.tokens == count
    assert result.nll_sum == pytest.approx(expected, rel=1e-4)
    assert result.perplexity == pytest.approx(math.exp(expected / count), rel=1e-4)
    assert len(result.window_nll) == len(list(windows(len(TOKENS), window, stride)))
    assert math.fsum(result.window_nll) == pytest.approx(result.nll_sum)
    assert result.recall is None
    assert reports[-1].done == reports[-1].total == len(TOKENS)


def chat_by_definition(model: Any, window: int, stride: int, max_rows: int) -> tuple[float, int]:
    """A prompt without compensation, then single tokens with it."""
    nll, count, scored = 0.0, 0, 0
    for start in range(0, len(TOKENS), stride):
        part = np.array(TOKENS[start : start + window], np.int32)
        half = len(part) // 2
        decoder = ReferenceDecoder(model, DecoderOptions(context=64, max_rows=max_rows, k_chunk=64))
        prompt = [range(at, min(at + max_rows, half)) for at in range(0, half, max_rows)]
        for piece in [*prompt, *(range(at, at + 1) for at in range(half, len(part) - 1))]:
            rows = np.array(piece, np.int32)
            step = Step(
                tokens=part[rows],
                slots=np.zeros_like(rows),
                positions=rows,
                logit_rows=np.array([len(rows) - 1], np.int32),
                compensate=piece[0] >= half,
            )
            row, target = decoder.forward(step)[0].astype(np.float64), piece[-1] + 1
            if target >= half and start + target >= scored:
                nll += math.log(np.exp(row - row.max()).sum()) + row.max() - row[part[target]]
                count += 1
        scored = start + len(part)
        if scored == len(TOKENS):
            break
    return nll, count


@pytest.mark.parametrize(("window", "stride"), [(64, 64), (16, 8), (16, 5), (5, 1), (2, 1)])
@pytest.mark.parametrize("max_rows", grid([3, 128], {3}))
def test_as_a_chat_too(window: int, stride: int, max_rows: int) -> None:
    model = make_model(bits=3)
    expected, count = chat_by_definition(model, window, stride, max_rows)
    decoder = ReferenceDecoder(model, DecoderOptions(context=64, max_rows=max_rows, k_chunk=64))
    result = perplexity(decoder, TOKENS, window, stride, as_chat=True)
    assert result.tokens == count
    assert result.nll_sum == pytest.approx(expected, rel=1e-4)


def test_as_a_chat_steps_are_those_of_the_engine() -> None:
    """A prompt is prefilled, and an answer decoded, by the very steps that the engine asks the decoder for."""
    model = make_model(bits=3)

    class Recorder(ReferenceDecoder):
        steps: list[Step]

        def forward(self, step: Step) -> Any:
            self.steps.append(step)
            return super().forward(step)

    class Nameless:
        def decode(self, tokens: list[int]) -> str:
            return ""

        def piece(self, token: int) -> str:
            return str(token)

        def detokenizer(self, context: list[int]) -> Detokenizer:
            return Detokenizer(cast("Tokenizer", self), context)

    def recorder() -> Recorder:
        decoder = Recorder(model, DecoderOptions(context=64, max_rows=7, k_chunk=64))
        decoder.steps = []
        return decoder

    talking, scored = recorder(), recorder()
    engine = Engine(talking, cast("Tokenizer", Nameless()), name="tiny", eos_token_ids=())
    pieces = list(engine.generate(TOKENS[:20], SamplingOptions(temperature=0.0, max_tokens=20)))
    answer = [piece.token for piece in pieces if piece.token is not None]
    perplexity(scored, TOKENS[:20] + answer, 40, 40, as_chat=True)
    assert len(scored.steps) == len(talking.steps) == 3 + 19
    for ours, theirs in zip(scored.steps, talking.steps, strict=True):
        for field in fields(Step):
            assert np.array_equal(getattr(ours, field.name), getattr(theirs, field.name)), field.name


def test_recall_is_reported_where_it_is_measured() -> None:
    options = DecoderOptions(context=64, k_chunk=64, measure_recall=True)
    result = perplexity(ReferenceDecoder(make_model(), options), TOKENS, 32, 16)
    assert result.recall is not None
    assert 0 < result.recall < 1


@dataclass
class Full:
    """A small model as a checkpoint."""

    model: Any

    @property
    def spec(self) -> Any:
        return self.model.spec

    def vector(self, name: str) -> Any:
        return torch.from_numpy(self.model.vectors[name])

    def linear(self, name: str) -> Any:
        return torch.from_numpy(self.model.full[name]), None

    def embedding(self) -> Any:
        return torch.from_numpy(self.model.table.astype(np.float32))


@pytest.mark.parametrize("full", [False, True])
def test_windows_begin_as_their_text_does(full: bool) -> None:
    model = make_model(bits=3)
    begin = model.spec.bos_token_id

    def losses(tokens: list[int]) -> tuple[float, ...]:
        if full:
            return full_precision_perplexity(Full(model), tokens, 16, 16).window_nll
        return perplexity(ReferenceDecoder(model, DecoderOptions(context=64)), tokens, 16, 16).window_nll

    begun, other = losses([begin, *TOKENS[1:]]), losses(TOKENS)
    assert begun[1:] == pytest.approx([losses([begin, *TOKENS[at + 1 : at + 16]])[0] for at in (16, 32, 48)])
    assert other[1:] == pytest.approx([losses(TOKENS[at : at + 16])[0] for at in (16, 32, 48)])
    assert begun[1] != pytest.approx(other[1], rel=1e-3)


def test_full_precision_is_what_full_compensation_approaches() -> None:
    model = make_model(bits=3)
    full = full_precision_perplexity(Full(model), TOKENS, 32, 16)
    losses = []
    for k_chunk in (0, 1024):
        decoder = ReferenceDecoder(model, DecoderOptions(context=64, k_chunk=k_chunk, select="exact"))
        losses.append(abs(perplexity(decoder, TOKENS, 32, 16).nll_sum - full.nll_sum))
    assert full.tokens == len(TOKENS) - 1
    chat = full_precision_perplexity(Full(model), TOKENS, 32, 16, as_chat=True)
    assert chat.tokens == len(TOKENS) - 16
    assert chat.nll_sum < full.nll_sum
    assert losses[1] < 0.01 * full.nll_sum
    assert losses[1] < 0.2 * losses[0]


def test_what_cannot_be_evaluated_is_refused() -> None:
    decoder = ReferenceDecoder(make_model(), DecoderOptions(context=16))
    with pytest.raises(RequestError, match="more than the context"):
        perplexity(decoder, TOKENS, 32, 16)
    with pytest.raises(RequestError, match="vocabulary"):
        perplexity(decoder, [3, 96], 16, 8)
    with pytest.raises(RequestError, match="1 tokens"):
        perplexity(decoder, [3], 16, 8)
    with pytest.raises(Cancelled):
        perplexity(decoder, TOKENS, 16, 8, cancelled=lambda: True)


def test_numbers_stay_finite_or_say_infinity() -> None:
    logits = np.array([[1e30, 0.0], [0.0, 0.0]], np.float32)
    assert negative_log_likelihood(logits, np.array([0, 1])) == pytest.approx(math.log(2))
    assert safe_exp(1e6) == math.inf
    assert safe_exp(1.0) == math.e

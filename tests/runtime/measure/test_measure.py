from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest

from models.progress import Progress
from models.spec import ModelSpec, RopeSpec
from runtime.backends.decoder import DecoderOptions, Float32Array, Step
from runtime.backends.reference.decoder import ReferenceDecoder
from runtime.errors import Cancelled, ContextOverflowError, RequestError
from runtime.kv.kinds import KINDS, KVKind, bytes_per_token
from runtime.measure.speed import Speed, default_lengths, measure, measure_at, peak_memory_bytes
from tests.runtime.conftest import make_model
from tests.runtime.engine.talking import hybrid


class ScriptedDecoder:
    """Answers token (position + 1) % V and keeps what it was asked."""

    backend = "scripted"
    weight_bytes = 1000
    recall = None

    def __init__(
        self,
        *,
        context: int = 64,
        windows: tuple[int | None, ...] = (None, None),
        kv: KVKind = "fp16",
    ) -> None:
        self.spec = ModelSpec(
            family="llama",
            hidden_size=8,
            intermediate_size=8,
            num_layers=len(windows),
            num_heads=1,
            num_kv_heads=1,
            head_dim=8,
            vocab_size=97,
            max_context=context,
            norm_eps=1e-5,
            rope=RopeSpec(rotary_dim=8),
            windows=windows,
        )
        self.options = DecoderOptions(context=context, max_rows=8, kv=kv)
        self.kv_bytes = 0
        self.steps: list[Step] = []

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def forward(self, step: Step) -> Float32Array:
        self.steps.append(step)
        logits = np.zeros((len(step.logit_rows), 97), np.float32)
        for i, row in enumerate(step.logit_rows):
            logits[i, (step.positions[row] + 1) % 97] = 1
        return logits

    def set_k_chunk(self, k_chunk: Mapping[str, int] | int, n_tb: Mapping[str, int] | None = None) -> None:
        pass

    def close(self) -> None:
        pass


def test_the_steps_of_a_measurement() -> None:
    decoder = ScriptedDecoder()
    measure(decoder, prompt_tokens=20, decode_tokens=5)
    measured = decoder.steps[4:]  # one chunk and three tokens warm up
    assert [list(step.positions) for step in measured] == [
        list(range(8)),
        list(range(8, 16)),
        list(range(16, 20)),
        *([position] for position in range(20, 25)),
    ]
    assert [step.prefill for step in measured] == [True] * 3 + [False] * 5
    assert all(step.compensate for step in measured)
    assert [list(step.logit_rows) for step in measured] == [[], [], [3], *([[0]] * 5)]
    assert [int(step.tokens[0]) for step in measured[3:]] == [20, 21, 22, 23, 24]  # greedy: each feeds the next


def test_bytes_per_token_are_weights_and_half_way_cache() -> None:
    speed = measure(ScriptedDecoder(), prompt_tokens=20, decode_tokens=10)
    assert speed.kv_bytes_per_token == 64  # keys and values of 2 layers, 8 numbers of 2 bytes each
    assert speed.bytes_per_token == 1000 + 64 * 26


def test_a_sliding_window_bounds_the_cache_that_is_read() -> None:
    speed = measure(ScriptedDecoder(windows=(None, 4)), prompt_tokens=20, decode_tokens=10)
    assert speed.bytes_per_token == 1000 + 64 * (26 + 4) // 2


def test_recent_tokens_are_read_in_half_precision() -> None:
    for prompt, recent in ((20, 21), (400, 192)):  # 128 that stay, and half a page
        decoder = ScriptedDecoder(context=512, kv="hierarchical")
        speed = measure(decoder, prompt_tokens=prompt, decode_tokens=1)
        per_token = bytes_per_token(KINDS["hierarchical"], decoder.spec)
        assert speed.kv_bytes_per_token == round(per_token) < 64
        assert speed.bytes_per_token == round(1000 + 64 * recent + per_token * (prompt + 1 - recent))


def test_the_same_seed_measures_the_same_prompt() -> None:
    prompts = []
    for seed in (1, 1, 2):
        decoder = ScriptedDecoder()
        measure(decoder, prompt_tokens=8, decode_tokens=1, seed=seed)
        prompts.append(list(decoder.steps[0].tokens))
    assert prompts[0] == prompts[1] != prompts[2]


def test_speeds_come_from_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Iterator[float] = iter([0.0, 2.0, *(value for i in range(5) for value in (10.0 * i, 10.0 * i + i + 1))])
    decoder = ScriptedDecoder()
    warm = [0.0] * 6
    monkeypatch.setattr(time, "perf_counter", lambda: warm.pop() if warm else next(clock))
    speed = measure(decoder, prompt_tokens=20, decode_tokens=5)
    assert (speed.ttft_s, speed.prefill_tokens_per_s) == (2.0, 10.0)
    assert speed.decode_tokens_per_s == 1 / 3  # the median of 1, 2, 3, 4, 5 seconds


def test_percent_of_limit() -> None:
    speed = Speed(
        prompt_tokens=1,
        decode_tokens=1,
        ttft_s=1,
        prefill_tokens_per_s=1,
        decode_tokens_per_s=50,
        bytes_per_token=400_000_000,
        kv_bytes_per_token=1,
    )
    assert speed.percent_of_limit(40) == 50


@pytest.mark.parametrize(("prompt", "decode"), [(0, 1), (1, 0), (-3, 5)])
def test_lengths_must_be_positive(prompt: int, decode: int) -> None:
    with pytest.raises(RequestError):
        measure(ScriptedDecoder(), prompt_tokens=prompt, decode_tokens=decode)


def test_what_does_not_fit_the_context_is_refused() -> None:
    decoder = ScriptedDecoder(context=64)
    measure(decoder, prompt_tokens=60, decode_tokens=4)
    with pytest.raises(ContextOverflowError, match="64"):
        measure(decoder, prompt_tokens=60, decode_tokens=5)


@pytest.mark.parametrize("context", [2, 3, 100, 256, 384, 100_000])
def test_default_lengths_fit(context: int) -> None:
    prompt, decode = default_lengths(context)
    assert prompt + decode <= context
    assert min(prompt, decode) >= 1
    assert default_lengths(100_000) == (256, 128)


def test_it_can_be_stopped_and_reports() -> None:
    reports: list[Progress] = []
    decoder = ScriptedDecoder()
    with pytest.raises(Cancelled):
        measure(
            decoder,
            prompt_tokens=20,
            decode_tokens=5,
            progress=reports.append,
            cancelled=lambda: len(decoder.steps) >= 6,
        )
    assert len(decoder.steps) == 6
    assert reports[-1].total == 25
    assert reports[-1].done == 16


def test_peak_memory_is_plausible() -> None:
    assert 10 << 20 < peak_memory_bytes() < 1 << 42


@pytest.mark.parametrize("tokens", [20, 92])
def test_models_with_states_are_measured_at_a_length(tokens: int) -> None:
    """A state cannot go back to where its first step began; 92 tokens leave no room for warm ones."""
    decoder = ReferenceDecoder(make_model(hybrid()), DecoderOptions(context=96, max_rows=32))
    found = measure_at(decoder, tokens=tokens, decode_tokens=4)
    assert (found.tokens, found.decode_tokens) == (tokens, 4)
    assert decoder.cache.length(0) == min(96, tokens + 3 + 4)

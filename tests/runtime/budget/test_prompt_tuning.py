"""The budget of prompts: the chosen level, the stored result, and the decoder's state afterwards."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.progress import Progress
from runtime.backends import Device
from runtime.backends.cpu.backend import BACKEND
from runtime.backends.decoder import DecoderOptions, Step
from runtime.budget import prompt_tuning
from runtime.budget.prompt_tuning import PromptTimer, is_known, tune_prompts
from runtime.budget.spending import spend_on_prompts
from runtime.budget.tuning import NoTuningError
from runtime.errors import Cancelled, OutOfMemoryError, RequestError
from runtime.wire.device import PromptTuning
from tests.runtime.conftest import make_spec
from tuner.profiles import ProfileStore

LEVELS = (1024, 256, 64)


class Clock:
    """Time that passes only when a decoder works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Prefiller:
    """A decoder whose prompts take a millisecond a row, and a share of that for each compensated channel."""

    backend = "cpu"
    recall = None

    def __init__(self, spec: Any, clock: Clock, *, context: int = 600, refused: int = 2000) -> None:
        self.spec, self.options = spec, DecoderOptions(context=context, k_chunk=3)
        self.steps: list[Step] = []
        self._clock, self._refused = clock, refused

    def forward(self, step: Step) -> np.ndarray[Any, Any]:
        self.steps.append(step)
        level = self.options.prompt_k_chunk if step.compensate and step.prefill else 0
        assert isinstance(level, int)
        self._clock.now += 1e-3 * step.tokens.size * (1 + level / 4096)
        return np.zeros((step.logit_rows.size, self.spec.vocab_size), np.float32)

    def set_prompt_k_chunk(self, prompt_k_chunk: int) -> None:
        if prompt_k_chunk >= self._refused:
            raise OutOfMemoryError("no room")
        self.options = replace(self.options, prompt_k_chunk=prompt_k_chunk)

    def session(self) -> Any:
        return nullcontext()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(prompt_tuning.time, "perf_counter", found)
    monkeypatch.setattr(type(BACKEND), "prompt_levels", LEVELS)
    monkeypatch.setattr(type(BACKEND), "device", lambda *_: Device(name="test", capability="none", driver=None))
    return found


@pytest.fixture
def stored(tmp_path: Path) -> Any:
    """A stored model as far as a profile's key asks."""
    from assets import demo_path
    from models.store import StoredModel

    return StoredModel.open_folder(demo_path(), "demo")


def test_a_prompt_is_timed_as_the_engine_runs_it(clock: Clock) -> None:
    decoder: Any = Prefiller(make_spec(), clock)
    timer = PromptTimer(decoder)
    assert timer.slowdown(1024) == pytest.approx(25)
    assert timer.tokens == 512
    assert decoder.options.prompt_k_chunk == 0
    last = decoder.steps[-1]
    assert last.prefill
    assert (last.positions[0], last.positions[-1], last.logit_rows.tolist()) == (384, 511, [127])


def test_a_slow_model_has_a_shorter_prompt(clock: Clock) -> None:
    decoder: Any = Prefiller(make_spec(), clock)
    decoder.forward, quick = lambda step: (quick(step), setattr(clock, "now", clock.now + 5))[0], decoder.forward
    timer = PromptTimer(decoder)
    timer.slowdown(64)
    assert timer.tokens == 128
    assert PromptTimer(Prefiller(make_spec(), clock, context=40)).tokens == 40  # type: ignore[arg-type]


def test_what_is_far_from_the_limit_takes_few_rounds(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_tuning, "_ROUNDS_S", 60.0)
    steps = {}
    for limit in (None, 24.0, 10.0, 60.0):
        decoder: Any = Prefiller(make_spec(), clock)
        assert PromptTimer(decoder).slowdown(1024, limit) == pytest.approx(25)
        steps[limit] = len(decoder.steps)
    assert steps[None] == steps[24.0] > steps[10.0] == steps[60.0]


@pytest.mark.parametrize(
    ("budget", "level", "cost"), [(30, 1024, 25.0), (25, 256, 6.25), (20, 256, 6.25), (3, 64, 1.5625), (1, 0, 0.0)]
)
def test_the_most_that_a_budget_pays_for(
    clock: Clock, stored: Any, tmp_path: Path, budget: float, level: int, cost: float
) -> None:
    decoder: Any = Prefiller(make_spec(), clock)
    told: list[Progress] = []
    found = tune_prompts(decoder, stored, budget_percent=budget, profiles=ProfileStore(tmp_path), progress=told.append)
    assert (found.k_chunk, found.tokens, found.cached) == (level, 512, False)
    assert found.measured_slowdown_percent == pytest.approx(cost)
    assert decoder.options.prompt_k_chunk == level
    assert [report.phase for report in told] == ["tune"]
    assert is_known(decoder, stored, budget_percent=budget, profiles=ProfileStore(tmp_path))
    assert not is_known(decoder, stored, budget_percent=budget + 0.5, profiles=ProfileStore(tmp_path))
    before = len(decoder.steps)
    decoder.set_prompt_k_chunk(0)
    again = tune_prompts(decoder, stored, budget_percent=budget, profiles=ProfileStore(tmp_path))
    assert again == replace(found, cached=True)
    assert (decoder.options.prompt_k_chunk, len(decoder.steps)) == (level, before)
    tune_prompts(decoder, stored, budget_percent=budget, profiles=ProfileStore(tmp_path), force=True)
    assert len(decoder.steps) > before


def test_a_damaged_profile_is_measured_again(clock: Clock, stored: Any, tmp_path: Path) -> None:
    decoder: Any = Prefiller(make_spec(), clock)
    tune_prompts(decoder, stored, budget_percent=20, profiles=ProfileStore(tmp_path))
    (file,) = tmp_path.glob("*.json")
    good = file.read_text(encoding="utf-8")
    for bad in (good[:-9], good.replace('"k_chunk": 256', '"k_chunk": 255', 1), good.replace('"readings"', '"read"')):
        file.write_text(bad, encoding="utf-8")
        assert not tune_prompts(decoder, stored, budget_percent=20, profiles=ProfileStore(tmp_path)).cached


def test_a_level_for_which_there_is_no_room_is_left_out(clock: Clock, stored: Any, tmp_path: Path) -> None:
    decoder: Any = Prefiller(make_spec(), clock, refused=1024)
    found = tune_prompts(decoder, stored, budget_percent=90, profiles=ProfileStore(tmp_path))
    assert found.k_chunk == 256


def test_no_budget_is_no_compensation(clock: Clock, stored: Any, tmp_path: Path) -> None:
    decoder: Any = Prefiller(make_spec(), clock)
    decoder.set_prompt_k_chunk(64)
    found = tune_prompts(decoder, stored, budget_percent=0, profiles=ProfileStore(tmp_path))
    assert (found.k_chunk, found.pending) == (0, False)
    assert (decoder.options.prompt_k_chunk, decoder.steps) == (0, [])
    with pytest.raises(RequestError):
        tune_prompts(decoder, stored, budget_percent=101, profiles=ProfileStore(tmp_path))


def test_what_cannot_be_tuned_is_said(clock: Clock, stored: Any, tmp_path: Path) -> None:
    decoder: Any = Prefiller(make_spec(), clock)
    later = PromptTuning.later(20)
    decoder.backend = "reference"
    with pytest.raises(NoTuningError):
        tune_prompts(decoder, stored, budget_percent=20, profiles=ProfileStore(tmp_path))
    found, problem = spend_on_prompts(lambda _: nullcontext(decoder), stored, later, profiles=ProfileStore(tmp_path))
    assert found is None
    assert problem is not None
    assert not problem.failure
    broken: Any = Prefiller(make_spec(), clock)
    broken.forward = lambda _step: (_ for _ in ()).throw(RequestError("broken"))
    found, problem = spend_on_prompts(lambda _: nullcontext(broken), stored, later, profiles=ProfileStore(tmp_path))
    assert found is None
    assert problem is not None
    assert problem.failure
    assert "broken" in problem.what


def test_a_stopped_search_leaves_the_decoder_as_it_was(clock: Clock, stored: Any, tmp_path: Path) -> None:
    decoder: Any = Prefiller(make_spec(), clock)
    decoder.set_prompt_k_chunk(64)
    with pytest.raises(Cancelled):
        tune_prompts(
            decoder,
            stored,
            budget_percent=20,
            profiles=ProfileStore(tmp_path),
            cancelled=lambda: len(decoder.steps) > 7,
        )
    assert decoder.options.prompt_k_chunk == 64
    assert not list(tmp_path.iterdir())

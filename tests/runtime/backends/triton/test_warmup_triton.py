"""The warm-up after a load: kernels that are compiled together, without a card; steps, reports, and failures."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from models.progress import Progress
from runtime.backends import backend
from runtime.backends.decoder import DecoderOptions, Step
from runtime.backends.triton import backend as entrance
from runtime.backends.triton import warmup
from runtime.backends.triton.decoder import TritonDecoder
from runtime.errors import BackendError, OutOfMemoryError
from runtime.kv.kinds import KINDS
from tests.runtime.conftest import make_spec

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parents[4]


class Recorded:
    """A decoder that keeps its cache's books and computes nothing."""

    def __init__(self, decoder: TritonDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decoder, self.steps, self.drawn, self.flushed = decoder, [], 0, 0
        monkeypatch.setattr(decoder, "side", None)  # as without a card, where nothing is compiled beforehand
        monkeypatch.setattr(decoder, "forward", self.forward)
        monkeypatch.setattr(decoder, "draw", self.draw)
        monkeypatch.setattr(decoder.cache.store, "flush", self.flush)

    def forward(self, step: Step) -> Any:
        self.decoder.cache.begin(step.slots, step.positions, flush=step.flush)
        self.steps.append(step)
        return np.zeros((1, 1), np.float32)

    def draw(self, step: Step, draws: Any) -> None:
        self.forward(step)
        self.drawn += len(draws)

    def flush(self, slot: int, page: int, rest: int) -> None:
        self.flushed += 1


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("context", [5, 100, 1024])
def test_every_size_of_step_comes_once(
    small: Any, device: str, monkeypatch: pytest.MonkeyPatch, kv: Any, context: int
) -> None:
    model = small({"max_context": 2048}, bits=4)
    decoder = TritonDecoder(model, DecoderOptions(context=context, max_rows=64, kv=kv), device)
    recorded, said = Recorded(decoder, monkeypatch), list[Progress]()
    warmup.warm_up(decoder, said.append)
    prompts = {step.tokens.size for step in recorded.steps if step.prefill}
    assert prompts == {M for M in (1, 2, 4, 8, 16, 32, 64) if context >= M}
    assert [step.tokens.size for step in recorded.steps if not step.prefill] == [2, 1, 1]
    assert recorded.drawn == 1
    assert (recorded.flushed > 0) == (decoder.cache.kind.windowed and context == 1024)
    assert decoder.cache.length(0) == 0
    assert [report.done for report in said] == list(range(len(recorded.steps)))
    assert {(report.phase, report.total) for report in said} == {("compile", len(recorded.steps))}


def test_on_a_card_kernels_are_compiled_together_first(
    small: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = TritonDecoder(small(bits=4), DecoderOptions(context=100, max_rows=64), device)
    recorded, said, rows = Recorded(decoder, monkeypatch), list[Progress](), list[int]()

    def together(launches: Any, done: Any) -> None:
        for launch in launches:
            launch()
        rows.extend(step.tokens.size for step in recorded.steps)
        done(3, 9)

    monkeypatch.setattr(decoder, "start", decoder.forward)
    monkeypatch.setattr(decoder, "side", "a stream")
    monkeypatch.setattr(warmup, "compile_together", together)
    warmup.warm_up(decoder, said.append)
    assert rows == [1, 2, 1, 2, 16, 32]
    assert (said[0].done, said[0].total, said[0].unit) == (3, 9, "kernels")
    assert "first time" in said[0].message
    assert recorded.steps[len(rows)].positions[0] == 0


def test_the_model_answers_as_it_does_without(small: Any, device: str) -> None:
    model = small(bits=4)
    options = DecoderOptions(context=8, max_rows=2)
    warmed, cold = backend("triton"), TritonDecoder(model, options, device)
    made = TritonDecoder(model, options, device)
    warmup.warm_up(made, lambda _: None)
    assert np.array_equal(np.array(made.forward(Step.of([0]))), cold.forward(Step.of([0])))
    assert warmed.problems(made) == ()


def test_activations_beyond_half_precision_are_counted(small: Any, device: str) -> None:
    """A channel of what the head reads, and one of what the MLP of every row does, behind which more follow."""
    decoder = TritonDecoder(small(bits=4), DecoderOptions(context=16, max_rows=4), device)
    warmup.count_limited(decoder)
    assert not decoder.problems
    for norm, least, most in (("norm", 1, 1), ("layers.0.post_norm", 4, 100)):
        decoder.model.norms[norm].zero_()[3] = 1e9
        warmup.count_limited(decoder)
        (problem,) = decoder.problems
        limited, read = re.findall(r"\d+", problem.what)
        assert least <= int(limited) <= most
        assert int(read) == 4 * (3 * 32 + 64) + 32
        decoder.model.norms[norm].fill_(1)
    assert decoder.cache.length(0) == 0


@pytest.mark.parametrize("error", [BackendError("no compiler"), OutOfMemoryError("full"), KeyboardInterrupt()])
def test_a_first_step_that_fails_closes_the_model(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    closed = []

    class Opened:
        def __init__(self, model: object, options: object) -> None: ...

        def close(self) -> None:
            closed.append(self)

    def fail(decoder: object, progress: object) -> None:
        raise error

    monkeypatch.setattr("runtime.backends.triton.decoder.TritonDecoder", Opened)
    monkeypatch.setattr("runtime.backends.triton.warmup.warm_up", fail)
    model: Any = SimpleNamespace(spec=make_spec())
    with pytest.raises(type(error)):
        entrance.BACKEND.open(model, DecoderOptions())
    assert len(closed) == 1


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of the scenarios of `together.py`."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
    command = [sys.executable, "-m", "tests.runtime.backends.triton.together"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_kernels_are_compiled_and_nothing_is_launched(compiled: dict[str, Any]) -> None:
    """A driver that can launch nothing would raise. Each variant is compiled once, however often it comes."""
    assert compiled["once"] == {
        "compiled": 3,
        "launched": [[None], [None] * 3, [None]],
        "kept": ["CompiledKernel"] * 3,
        "told": [[1, 1], [1, 2], [2, 2]],
    }
    assert (compiled["again"]["compiled"], compiled["again"]["launched"]) == (0, [[None]])


def test_other_threads_go_on_launching(compiled: dict[str, Any]) -> None:
    assert compiled["beside"] is True


def test_a_kernel_that_does_not_compile_says_so_when_it_is_launched(compiled: dict[str, Any]) -> None:
    assert "cannot change total number" in compiled["refused"]["said"]
    assert (compiled["refused"]["wrong"], compiled["refused"]["kept"]) == ([], ["CompiledKernel"] * 3)


def test_whoever_stops_it_leaves_nothing_that_waits(compiled: dict[str, Any]) -> None:
    assert compiled["stopped"]["new"] < 10
    assert compiled["stopped"]["kinds"] == ["CompiledKernel"]

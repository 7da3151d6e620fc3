"""The main path on real checkpoints: quantize, evaluate, generate. Each step has to cost or give what it should."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from models.checkpoint import Checkpoint
from models.quantize import quantize
from models.recipe import Method, Recipe
from models.store import Store, StoredModel
from runtime.backends.decoder import DecoderOptions
from runtime.load.plan import open_decoder, open_engine
from runtime.measure.evaluate import EvalResult, full_precision_perplexity, perplexity
from runtime.text.sampling import SamplingOptions
from runtime.text.tokenizer import Tokenizer
from tests.grid import grid

pytestmark = pytest.mark.data

WINDOW, STRIDE, TOKENS = 256, 128, 1500
CASES = {
    "english3m": ("wikitext2-test.txt", "wikitext2-valid.txt", 128),
    "stories260k": ("tinystories.txt", "tinystories.txt", 32),
    "babyllama105": ("tinystories.txt", "tinystories.txt", 32),
}


@dataclass
class Case:
    """A checkpoint, its text, and the models made of it."""

    folder: Path
    text: str
    calibration: str
    group_size: int
    store: Store
    found: dict[tuple[Any, ...], EvalResult] = field(default_factory=dict)
    """What was evaluated."""

    def stored(self, bits: int, residual_bits: int, method: Method | None) -> StoredModel:
        chosen = {} if method is None else {"method": method}
        recipe = Recipe(bits=bits, residual_bits=residual_bits, group_size=self.group_size, **chosen)
        name = f"{self.folder.name}-{recipe.method}-{bits}-{residual_bits}"
        if name not in [info.name for info in self.store.list()]:
            quantize(self.folder, self.store, recipe, name=name, calibration=self.calibration)
        return self.store.open(name)

    def tokens(self) -> list[int]:
        return Tokenizer(self.folder).encode(self.text)[:TOKENS]

    def evaluate(self, bits: int, residual_bits: int = 4, method: Method | None = None, **options: Any) -> EvalResult:
        """Perplexity of the case's model by a method (the recipe's default if none is given)."""
        key = (
            bits,
            residual_bits,
            method,
            *sorted(({"select": "approx", "k_chunk": 0, "kv": "fp16"} | options).items()),
        )
        if key not in self.found:
            decoder, _ = open_decoder(
                self.stored(bits, residual_bits, method), DecoderOptions(context=WINDOW, **options), "reference"
            )
            self.found[key] = perplexity(decoder, self.tokens(), WINDOW, STRIDE)
        return self.found[key]

    def full(self) -> EvalResult:
        return full_precision_perplexity(Checkpoint.open(self.folder), self.tokens(), WINDOW, STRIDE)


@pytest.fixture(scope="module", params=grid(CASES, {"stories260k"}))
def case(request: pytest.FixtureRequest, shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    text, calibration, group_size = CASES[request.param]
    return Case(
        folder=shared_data / "models" / request.param,
        text=(shared_data / "text" / text).read_text()[:40_000],
        calibration=(shared_data / "text" / calibration).read_text()[-40_000:],
        group_size=group_size,
        store=Store(tmp_path_factory.mktemp("store")),
    )


@pytest.mark.slow
def test_every_step_is_in_its_place(case: Case) -> None:
    full = case.full().perplexity
    four, three = (case.evaluate(bits, method="rtn").perplexity for bits in (4, 3))
    few, many = (case.evaluate(3, method="rtn", k_chunk=k_chunk).perplexity for k_chunk in (16, 64))
    assert full < four < three
    assert full < many < few < three
    every = case.evaluate(3, 8, method="rtn", k_chunk=1024).perplexity
    assert every == pytest.approx(full, rel=0.01)


@pytest.mark.slow
def test_the_default_quantizer_is_better_with_compensation_than_without(case: Case) -> None:
    """It is calibrated on text, so that on so little it may come out a hair below full precision."""
    full = case.full().perplexity
    four, three = (case.evaluate(bits).perplexity for bits in (4, 3))
    few, many = (case.evaluate(3, k_chunk=k_chunk).perplexity for k_chunk in (16, 64))
    assert full < four < three
    assert 0.99 * full < many < few < three
    every = case.evaluate(3, 8, k_chunk=1024).perplexity
    assert every == pytest.approx(full, rel=0.01)


@pytest.mark.parametrize("method", ["rtn", None])
def test_dynamic_selection_beats_static_beats_nothing(case: Case, method: Method | None) -> None:
    found = {
        select: case.evaluate(3, method=method, k_chunk=64, select=select).perplexity
        for select in ("approx", "exact", "static")
    }
    assert max(found["approx"], found["exact"]) < found["static"] < case.evaluate(3, method=method).perplexity


def test_approximate_selection_finds_most_of_the_exact(case: Case) -> None:
    recall = case.evaluate(3, k_chunk=64, measure_recall=True).recall
    assert recall is not None
    assert 0.8 < recall < 1.0


def test_an_int8_cache_costs_little(case: Case) -> None:
    half, int8 = (case.evaluate(4, kv=kv).perplexity for kv in ("fp16", "int8"))
    assert int8 == pytest.approx(half, rel=0.03)


@pytest.fixture(scope="module")
def stories(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    store = Store(tmp_path_factory.mktemp("stories"))
    calibration = (shared_data / "text/tinystories.txt").read_text()[:20_000]
    recipe = Recipe(bits=4, residual_bits=8, group_size=32)
    quantize(shared_data / "models/stories260k", store, recipe, name="stories", calibration=calibration)
    return store.open("stories")


def answer(model: StoredModel, prompt: str, backend: str, **options: Any) -> str:
    decoding = DecoderOptions(context=512, k_chunk=1024, select="exact")
    engine = open_engine(model, decoding, backend)
    tokens = engine.text_prompt(prompt)
    text = "".join(piece.text for piece in engine.generate(tokens, SamplingOptions(temperature=0.0, **options)))
    engine.close()
    return prompt + text


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_story_begins_as_the_checkpoints_own(stories: StoredModel, backend: str) -> None:
    story = answer(stories, "Once upon a time", backend, max_tokens=24)
    assert story.startswith("Once upon a time, there was a little girl named Lily.")

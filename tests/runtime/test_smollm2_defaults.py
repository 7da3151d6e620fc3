"""The defaults on SmolLM2: perplexity stays as measured, and drafts change none of the target's tokens."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from assets import calibration_text, evaluation_text
from models.quantize import quantize
from models.recipe import Recipe
from models.store import Store, StoredModel
from runtime.backends.decoder import DecoderOptions
from runtime.engine.gamma import FixedGamma
from runtime.engine.measure import continued
from runtime.kv.kinds import KVKind
from runtime.load.plan import open_decoder
from runtime.measure.evaluate import perplexity
from runtime.text.sampling import SamplingOptions
from runtime.text.tokenizer import Tokenizer
from tests.lab.store import ROOT, digest
from tests.real_models import HF_NAME, kept

pytestmark = [pytest.mark.data, pytest.mark.slow, pytest.mark.timeout(1800)]  # quantizing on a busy machine

OLD_S = 7 * 24 * 3600
"""So long a model of other code is kept: another checkout may use it."""

MEASURED: dict[tuple[int, KVKind, int], float] = {
    (4, "fp16", 0): 23.37,
    (4, "int4", 0): 23.44,
    (4, "fp16", 64): 20.59,
    (3, "fp16", 0): 34.14,
}
"""Perplexity by bits, kind of cache and k_chunk, on an AMD EPYC: half the text is a prompt, half is scored."""
MARGIN = 1.02
"""GPTQ's bytes differ by processor and thread count, which moves these by up to 0.6 % (by 2 % on 512 tokens)."""


@pytest.fixture(scope="module")
def stored(smollm2_hf: Path) -> Callable[[int], StoredModel]:
    """SmolLM2 by the default recipe, by bits: kept in the tests' cache for as long as `models` stays as it is."""

    def opened(bits: int) -> StoredModel:
        recipe, calibration = Recipe(bits=bits), calibration_text()
        sources = [file.read_text(encoding="utf-8") for file in sorted((ROOT / "models").rglob("*.py"))]
        name = f"{HF_NAME}-{digest([sources, recipe.to_json(), calibration])}"

        def make(folder: Path) -> None:
            for old in folder.parent.glob(f"{HF_NAME}-*"):
                if old.is_dir() and time.time() - old.stat().st_mtime > OLD_S:
                    shutil.rmtree(old)
            store = Store(folder)
            store.path(quantize(smollm2_hf, store, recipe, calibration=calibration).name).rename(folder / name)

        return StoredModel.open_folder(kept(name, make))

    return opened


@pytest.mark.parametrize(("bits", "kv", "k_chunk"), MEASURED)
def test_perplexity_is_as_measured(stored: Callable[[int], StoredModel], bits: int, kv: KVKind, k_chunk: int) -> None:
    model = stored(bits)
    tokens = Tokenizer(model.tokenizer_path).encode(evaluation_text())
    decoder, _ = open_decoder(model, DecoderOptions(kv=kv, context=len(tokens), k_chunk=k_chunk), "cpu")
    try:
        found = perplexity(decoder, tokens, len(tokens), len(tokens), as_chat=True).perplexity
    finally:
        decoder.close()
    assert found < MARGIN * MEASURED[bits, kv, k_chunk]


def test_speculated_tokens_are_the_targets_own(stored: Callable[[int], StoredModel]) -> None:
    model, greedy = stored(4), SamplingOptions(temperature=0)
    prompt = Tokenizer(model.tokenizer_path).chat([{"role": "user", "content": "What is photosynthesis?"}])
    options = DecoderOptions(kv="hierarchical", context=len(prompt) + 200, k_chunk=64, draft_k_chunk=16)
    decoder, _ = open_decoder(model, options, "cpu")
    try:
        alone, drafted = (continued(decoder, prompt, 200, greedy, FixedGamma(gamma)) for gamma in (0, 3))
    finally:
        decoder.close()
    assert list(drafted.tokens) == list(alone.tokens)
    assert drafted.speculation.acceptance_rate > 0.5

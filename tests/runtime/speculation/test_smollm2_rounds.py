"""SmolLM2 on the reference backend: drafted and verified tokens are the target's own.

The longer run is `python -m tests.bench.speculated equal --backend reference`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from assets import calibration_text
from models.quantize import quantize
from models.recipe import Recipe
from models.store import Store
from runtime.decoder import DecoderOptions
from runtime.open import open_decoder
from runtime.tokenizer import Tokenizer
from tests.bench.speculated import equal


@pytest.mark.data
@pytest.mark.slow
def test_greedy_tokens_are_the_targets_own(smollm2_hf: Path, tmp_path: Path) -> None:
    store = Store(tmp_path)
    recipe = Recipe(method="rtn", bits=3, group_size=64, residual_bits=4)
    quantize(smollm2_hf, store, recipe, name="small", calibration=calibration_text()[:2000])
    model = store.open("small")
    decoder = open_decoder(
        model, DecoderOptions(kv="hierarchical", context=200, k_chunk=1024, draft_k_chunk=16), "reference"
    )[0]
    prompt = Tokenizer(model.tokenizer_path).chat([{"role": "user", "content": "What is photosynthesis?"}])
    for line in equal(decoder, prompt, 12, (3,)):
        assert "12 tokens are the target's" in line

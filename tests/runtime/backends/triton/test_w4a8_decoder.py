"""A qoq model on the GPU backend answers as the reference does: prompt, decoded token, with compensation too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.quantize import quantize
from models.recipe import Recipe
from models.store import Store, StoredModel
from runtime.backends.decoder import DecoderOptions, Step
from runtime.backends.reference.decoder import ReferenceDecoder
from runtime.backends.triton.decoder import TritonDecoder
from runtime.backends.triton.kernels.w4a8 import W4A8Linear
from runtime.backends.triton.sizes import weight_bytes
from tests.models.conftest import TEXT, write_checkpoint, write_tokenizer
from tests.models.random_models import SIZES, random_case


@pytest.mark.parametrize(
    ("group_size", "residual_bits", "k_chunk"), [pytest.param(128, 0, 0, marks=pytest.mark.slow), (0, 4, 256)]
)
def test_the_decoder_answers_as_the_reference_does(
    tmp_path: Path, device: str, group_size: int, residual_bits: int, k_chunk: int
) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", family="qwen2", hidden=32, intermediate=48)
    recipe = Recipe.usual("qoq", group_size=group_size, residual_bits=residual_bits)
    model = StoredModel.open_folder(quantize(folder, Store(tmp_path / "store"), recipe, calibration=TEXT).path)
    options = DecoderOptions(context=32, max_rows=18, k_chunk=k_chunk, select="static")
    ours, theirs = TritonDecoder(model, options, device), ReferenceDecoder(model, options)
    assert all(isinstance(linear.weight, W4A8Linear) for linear in ours.model.linears.values())
    planned = weight_bytes(model.spec, recipe, compensated=False)
    assert ours.weight_bytes == planned
    compare(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["lfm2", "qwen3.5", "apertus", "cohere2"])
def test_other_blocks_answer_as_the_reference_does(tmp_path: Path, device: str, case: str) -> None:
    random_case(case).save_pretrained(tmp_path / "checkpoint")
    write_tokenizer(tmp_path / "checkpoint", SIZES["vocab_size"])
    recipe = Recipe.usual("qoq", group_size=0, residual_bits=0)
    folder = quantize(tmp_path / "checkpoint", Store(tmp_path / "store"), recipe, calibration=TEXT, evaluation=None)
    model, options = StoredModel.open_folder(folder.path), DecoderOptions(context=32, max_rows=18)
    compare(TritonDecoder(model, options, device), ReferenceDecoder(model, options))


def compare(ours: TritonDecoder, theirs: ReferenceDecoder) -> None:
    """Answers of both, which are closed then."""
    found = [np.concatenate([decoder.forward(step).copy() for step in steps()]) for decoder in (ours, theirs)]
    ours.close()
    theirs.close()
    # Attention's output is rounded to half precision first, and a code next to a tie may fall on its other side.
    error = np.sqrt(np.mean((found[0] - found[1]) ** 2))
    assert error < 0.02 * np.sqrt(np.mean(found[1] ** 2))


def steps() -> list[Any]:
    """A prompt of 17 rows, more than a tile of few, and two tokens after it."""
    return [
        Step.of(tokens, start, [len(tokens) - 1])
        for tokens, start in (([1, 5, 9, 30, 12, 40, 7, 8, 20, 33, 11, 50, 3, 4, 6, 10, 19], 0), ([17], 17), ([2], 18))
    ]

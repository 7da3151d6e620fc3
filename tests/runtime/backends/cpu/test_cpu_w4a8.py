"""W4A8 on the CPU: tokens rounded by one scale, to the bit, and whole models; `contract` has the products."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from models import per_token
from models.quantize import quantize
from models.recipe import Recipe
from models.store import Store, StoredModel
from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data.records import padded
from runtime.backends.decoder import DecoderOptions
from tests.close import assert_close
from tests.guarded import aligned_zeros
from tests.models.conftest import TEXT, write_checkpoint
from tests.runtime.backends.cpu.machine import Activations, Machine, matrix
from tests.runtime.backends.steps import prompt_and_token


@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("K", [64, 172, 1088])
def test_norm_rounds_tokens_by_one_scale(rows: int, K: int) -> None:
    rng = np.random.default_rng(K + rows)
    source = aligned_zeros((padded(rows, 16), padded(K, 32)), np.float32)
    source[:rows, :K] = rng.standard_normal((rows, K)) * np.exp(rng.standard_normal(K))
    weight = aligned_zeros((padded(K, 32),), np.float32)
    weight[:K] = 1
    out, inputs = np.zeros_like(source), Activations(rows, K, 128)
    to = op.Input(K, False, matrix(out), inputs.places, group_blocks=4, per_token=True)
    Machine(rows).run(op.Norm(matrix(source), to, int(weight.ctypes.data), eps=1e-5))
    check(inputs, out[:rows, :K])


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_gate_rounds_tokens_by_one_scale(rows: int) -> None:
    rng, width = np.random.default_rng(rows), 172
    source = aligned_zeros((16, 2 * padded(width, 32)), np.float32)
    source[:rows, : 2 * width] = rng.standard_normal((rows, 2 * width)) * 4
    out, inputs = aligned_zeros((16, padded(width, 32)), np.float32), Activations(rows, width, 64)
    out[:] = 7
    to = op.Input(width, False, matrix(out), inputs.places, 2, True)
    Machine(rows).run(op.Gate(matrix(source), to, op.FORMS["silu"]))
    assert not out[:rows, width:].any()
    check(inputs, out[:rows, :width])


def check(inputs: Activations, values: npt.NDArray[np.float32]) -> None:
    """Codes, scales and sums are what the reference makes of the very values that were written."""
    codes, scales = per_token.quantize(torch.from_numpy(values.copy()))
    for row in range(inputs.rows):
        own, own_scales, _, sums = inputs.parts(row)
        found = own.reshape(-1)[: inputs.K]
        np.testing.assert_array_equal(found[: inputs.width], codes[row].numpy())
        assert not found[inputs.width :].any()
        np.testing.assert_array_equal(own_scales, scales[row].expand(inputs.G).numpy())
        np.testing.assert_array_equal(sums, np.add.reduceat(found.astype(np.int32), range(0, inputs.K, inputs.group)))


@pytest.mark.parametrize("group_size", [32, 0])
@pytest.mark.parametrize(("residual_bits", "k_chunk"), [(0, 0), (4, 64), (4, 1024)])
def test_the_decoder_answers_as_the_reference_does(
    tmp_path: Path, group_size: int, residual_bits: int, k_chunk: int
) -> None:
    """Prompt and decoded tokens, with biases, with and without compensation of both."""
    folder = write_checkpoint(tmp_path / "checkpoint", family="qwen2", intermediate=160)
    recipe = Recipe.usual("qoq", group_size=group_size, residual_bits=residual_bits)
    info = quantize(folder, Store(tmp_path / "store"), recipe, calibration=TEXT)
    model = StoredModel.open_folder(info.path)
    options = DecoderOptions(context=64, max_rows=32, k_chunk=k_chunk, prompt_k_chunk=min(1024, k_chunk * 16))
    answers = [prompt_and_token(model, backend, options) for backend in ("cpu", "reference")]
    # Norms and attention round otherwise, and a code next to a tie may fall on its other side.
    # Residuals that all rows of a prompt share meet activations in INT8 here, and in float32 there.
    allowed = (0.03 if k_chunk else 0.02) * np.sqrt(np.mean(answers[1] ** 2))
    assert_close(np.sqrt(np.mean((answers[0] - answers[1]) ** 2)) < allowed, True, "exact")

"""Trellis-coded matrices on the CPU: products to the bit of INT8 arithmetic, rotated activations, whole models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models import trellis
from models.quantize import quantize
from models.recipe import Recipe
from models.store import Store, StoredModel
from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data.records import padded
from runtime.backends.cpu.kernels.activation import ROTATED_ORDER
from runtime.backends.decoder import DecoderOptions
from runtime.backends.operations.linear import gemv_int8, quantize_groups
from tests.guarded import aligned_zeros
from tests.models.conftest import TEXT, write_checkpoint
from tests.runtime.backends.cpu.machine import Activations, Machine, matrix
from tests.runtime.backends.cpu.test_cpu_kernels import product
from tests.runtime.backends.steps import prompt_and_token
from tests.runtime.backends.trellises import mixture, random_trellis


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    N=st.integers(1, 70),
    blocks=st.integers(1, 22),
    bits=st.sampled_from([2, 3, 4]),
    rows=st.integers(1, 20),
    seed=st.integers(0, 1000),
)
def test_any_product(N: int, blocks: int, bits: int, rows: int, seed: int) -> None:
    """Activations have a mean, which an offset of the levels would add up."""
    rng, K = np.random.default_rng(seed), 32 * blocks
    linear = random_trellis(N, K, bits, seed=seed)
    x = torch.from_numpy(trellis.rotate((rng.standard_normal((rows, K)) + 3).astype(np.float32)))
    codes, scales = quantize_groups(x, 64)
    expected = gemv_int8(codes, scales, linear).numpy()
    largest = 128 * x.abs().sum(1, keepdim=True).numpy() * linear.scales.T.astype(np.float64)
    ordered = codes.numpy().reshape(rows, -1, 32)[:, :, ROTATED_ORDER].reshape(rows, K)
    found = product(linear, ordered, scales.numpy())
    assert (np.abs(found - expected) <= 1e-6 * largest).all()


@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("K", [32, 64, 172, 1088])
def test_norm_rotates_what_it_quantizes_and_leaves_the_rest(rows: int, K: int) -> None:
    rng = np.random.default_rng(K + rows)
    source = aligned_zeros((padded(rows, 16), padded(K, 32)), np.float32)
    source[:rows, :K] = rng.standard_normal((rows, K)) * np.exp(rng.standard_normal(K))
    out, inputs = np.zeros_like(source), Activations(rows, K, 64)
    to = op.Input(K, False, matrix(out), inputs.places, group_blocks=2, rotated=True)
    Machine(rows).run(op.Norm(matrix(source), to, 0, eps=0.0))
    np.testing.assert_array_equal(out[:rows], source[:rows])
    expected = trellis.rotate(source[:rows, :K])
    for row in range(rows):
        codes, scales, _, _ = inputs.parts(row)
        places = codes.reshape(-1)[: inputs.K].reshape(-1, 32)[:, np.argsort(ROTATED_ORDER)].reshape(-1)
        found = places.astype(np.float32) * np.repeat(scales, 64)[: inputs.K]
        step = np.repeat(scales, 64)[: inputs.K]
        assert (np.abs(found - expected[row]) <= 0.501 * step + 1e-6).all()


def dense(folder: Path) -> Path:
    """A Qwen2 with biases, whose rows of 160 end in 32 channels."""
    return write_checkpoint(folder, family="qwen2", intermediate=160)


@pytest.mark.parametrize(
    ("write", "bits", "residual_bits", "k_chunk"),
    [
        *((dense, 2, 4, 20), (dense, 3.5, 0, 0), (dense, 3.5, 4, 1024), (dense, 4, 4, 1024), (dense, 4, 16, 20)),
        *((mixture, 2, 4, 20), (mixture, 3.5, 4, 1024), (mixture, 4, 0, 0), (mixture, 4, 16, 20)),
    ],
)
def test_the_decoder_answers_as_the_reference_does(
    tmp_path: Path, write: Callable[[Path], Path], bits: float, residual_bits: int, k_chunk: int
) -> None:
    """Prompt and decoded tokens, with and without compensation of both."""
    folder = write(tmp_path / "checkpoint")
    recipe = Recipe(method="trellis", bits=bits, residual_bits=residual_bits)
    info = quantize(folder, Store(tmp_path / "store"), recipe, calibration=TEXT)
    model = StoredModel.open_folder(info.path)
    options = DecoderOptions(
        context=64,
        max_rows=32,
        k_chunk=k_chunk,
        prompt_k_chunk=min(1024, k_chunk * 16),
        select="static",  # what the others choose differs where two channels are nearly alike
    )
    answers = [prompt_and_token(model, name, options) for name in ("cpu", "reference")]
    # Activations are in INT8 here and in float32 there: 2 % of a logit's size in the median row. A few rows may go to
    # another of two experts that are nearly equal.
    errors = np.sqrt(np.mean((answers[0] - answers[1]) ** 2, 1) / np.mean(answers[1] ** 2))
    assert np.median(errors) < 0.03

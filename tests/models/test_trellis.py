"""Trellis-coded weights against a plain reading of their definition, bit by bit and matrix by matrix."""

from __future__ import annotations

import numpy as np
import pytest

from models import trellis
from models.errors import QuantizationError
from models.quantize.calibration import InputStatistics
from models.quantize.matrix import MatrixQuantizer
from models.quantizers import quantizer
from models.quantizers import trellis as search
from models.quantizers.dequantize import dequantize, dequantize_residual
from models.recipe import Recipe
from tests.models.test_gptq import correlated, moments, output_error, weights

WHOLE = slice(0, 1 << 20)


def quantized(weight: np.ndarray, bits: int, hessian: np.ndarray) -> search.TrellisCodes:
    found = quantizer("trellis", hessian=hessian)(weight, WHOLE, bits, 64)
    assert isinstance(found, search.TrellisCodes)
    return found


def level(state: int, bits: int) -> int:
    multiplier, low = {2: 6, 3: 2, 4: 14}[bits], state % 16
    t = ((state // 16 + multiplier * low + multiplier // 2) % 16 - 7.5) / 7.5
    return round(48 * (t + 0.6 * t**9) / 1.6) + 2 * low - 15


def sylvester(order: int) -> np.ndarray:
    found = np.ones((1, 1))
    while len(found) < order:
        found = np.block([[found, found], [found, -found]])
    return found


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_weights_are_levels_of_a_stream_in_a_rotated_basis(bits: int) -> None:
    """Every weight by itself: eight bits of a long number, a formula, and the inverse of a matrix."""
    rng, width = np.random.default_rng(bits), 64 + 27
    codes = rng.integers(0, 1 << bits, (3, 96)).astype(np.uint8)
    scales = rng.uniform(1e-3, 1e-2, (3, 1)).astype(np.float16)
    words = trellis.pack(codes, bits)
    assert words.dtype == np.int32
    assert words.shape == (3, 3 * bits)
    found = trellis.dequantize(words, scales, bits, width)
    inverse = np.zeros((96, 96))
    for start, size in ((0, 64), (64, 32)):
        bit = [[i >> b & 1 for b in range(6)] for i in range(size)]
        signs = np.array([(-1) ** (b[0] * b[1] + b[2] * b[3] + b[4] * b[5]) for b in bit])
        own = slice(start, start + size)
        inverse[own, own] = np.linalg.inv(signs[:, None] * sylvester(size) / np.sqrt(size))
    for n in range(3):
        stream = sum(int(code) << bits * k for k, code in enumerate(codes[n]))
        assert stream == int.from_bytes(words[n].tobytes(), "little")
        rotated = np.array([level(stream >> bits * k & 255, bits) for k in range(96)]) * float(scales[n, 0])
        np.testing.assert_allclose(found[n], (rotated @ inverse)[:width], atol=1e-5)
    np.testing.assert_array_equal(trellis.unpack(words, bits), codes)


def test_a_rotation_is_undone_and_spreads_what_is_constant() -> None:
    x = np.random.default_rng(0).standard_normal((5, 2, 150)).astype(np.float32)
    rotated = trellis.rotate(x)
    assert rotated.shape == (5, 2, 160)
    np.testing.assert_allclose(np.square(rotated).sum(-1), np.square(x).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(trellis.unrotate(rotated, 150), x, atol=1e-6)
    np.testing.assert_allclose(np.abs(trellis.rotate(np.ones((1, 128), np.float32))), 1, rtol=1e-6)


# On white inputs: rounding to the levels that are best for a Gaussian has 0.1175, 0.0345 and 0.0095 (Max 1960), and no
# code has less than 4^-bits. Measured: 0.0830, 0.0216, 0.0059.
@pytest.mark.parametrize(("bits", "most"), [(2, 0.0862), (3, 0.0222), (4, 0.0061)])
def test_the_error_on_gaussian_weights(bits: int, most: float) -> None:
    weight = np.random.default_rng(1).standard_normal((128, 320)).astype(np.float32)
    found = quantized(weight, bits, np.eye(320, dtype=np.float32)).dequantize()
    assert 4.0**-bits < np.square(found - weight).mean() < most


@pytest.mark.parametrize(("bits", "off"), [(2, 0.2), (3, 0.05), (4, 0.03)])
def test_a_weight_that_stands_out_is_kept(bits: int, off: float) -> None:
    """As large as SmolLM2's in `layers.28.down`, whose first token depends on it."""
    weight = np.random.default_rng(1).standard_normal((8, 1536)).astype(np.float32)
    weight[5, 700] = -30
    found = quantized(weight, bits, np.eye(1536, dtype=np.float32)).dequantize()
    assert found[5, 700] == pytest.approx(-30, rel=off)


@pytest.mark.parametrize("shape", [(6, 40), (33, 300), (17, 64)], ids=str)
def test_feedback_makes_outputs_better(shape: tuple[int, int]) -> None:
    """Of tokens that it has not seen, too."""
    weight, x = weights(shape), correlated(4 * shape[1], shape[1])
    hessian = moments(x[::2])
    white = np.eye(shape[1], dtype=np.float32) * hessian.trace() / shape[1]
    errors = [output_error(weight, quantized(weight, 3, own).dequantize(), x[1::2]) for own in (hessian, white)]
    assert errors[0] < 0.7 * errors[1]


def test_pieces_of_rows_and_threads_change_nothing() -> None:
    weight, hessian = weights((600, 96)), moments(correlated(200, 96))
    whole = quantized(weight, 3, hessian)
    for rows in (slice(0, 32), slice(32, 600)):
        part = quantized(weight[rows], 3, hessian)
        np.testing.assert_array_equal(part.codes, whole.codes[rows])
        np.testing.assert_array_equal(part.scales, whole.scales[rows])


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_residuals_are_those_of_the_original_basis(bits: int) -> None:
    """With residuals of 8 bits, base and residual together are the weights."""
    weight, x = weights((40, 90)), correlated(200, 90)
    statistics = InputStatistics.empty(90, second_moments=True)
    statistics.add(x, "layers.0.o")
    matrix = MatrixQuantizer(
        "layers.0.o", weight.shape, Recipe(method="trellis", bits=bits, residual_bits=8), statistics
    )
    for rows in matrix.pieces():
        matrix.add(rows, weight[rows])
    linear = matrix.finish(None)
    assert linear.trellis
    assert linear.codes.nbytes == 40 * 96 * bits // 8
    assert linear.residual is not None
    base = dequantize(linear)
    together = base + dequantize_residual(linear.residual, linear.shape).T
    assert np.abs(together - weight).max() < 0.02 * np.abs(base - weight).max()


def test_what_cannot_be_quantized_is_refused() -> None:
    weight, hessian = weights((8, 64)), moments(correlated(100, 64))
    weight[3, 5] = np.nan
    with pytest.raises(QuantizationError, match="NaN or infinity"):
        quantized(weight, 3, hessian)
    with pytest.raises(QuantizationError, match="too far for fp16 scales"):
        quantized(np.full((8, 64), 3e8, np.float32) * np.sign(weights((8, 64))), 3, hessian)
    zeros = quantized(np.zeros((8, 64), np.float32), 3, hessian).dequantize()
    assert np.abs(zeros).max() < 1e-4
    with pytest.raises(QuantizationError, match="gptq has no 2 bits; choose the method trellis"):
        Recipe(bits=2)
    with pytest.raises(QuantizationError, match="leave group_size at 64"):
        Recipe(method="trellis", group_size=128)

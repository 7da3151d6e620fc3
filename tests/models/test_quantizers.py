"""Round-to-nearest with clip search and the residual quantizer, against plain per-group searches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import threads
from models.errors import QuantizationError
from models.packed import PackedLinear, PackedResidual, rows_of
from models.packing import pack
from models.quantizers import quantizer
from models.quantizers.dequantize import dequantize, dequantize_residual
from models.quantizers.groups import RATIOS, GroupCodes, rtn
from models.quantizers.residual import quantize_residual
from models.threads import each
from tests.close import assert_close

SHAPES = [(1, 1), (3, 32), (5, 100), (7, 128), (4, 172), (33, 352), (0, 64)]


def random_weights(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_t(4, shape) * 0.02).astype(np.float32)


def weighted_error(approximation: np.ndarray, group: np.ndarray) -> float:
    return float(((approximation - group) ** 2 * (4 * (group**2).mean() + group**2)).sum())


def best_group_error(group: np.ndarray, bits: int, ratios: tuple[float, ...]) -> float:
    """Least weighted squared error of one group over the ratios, one value after the other in double precision."""
    top, errors = 2**bits - 1, []
    low, high = min(group.min(), 0.0), max(group.max(), 0.0)
    for ratio in ratios:
        scale = max(float(np.float16((high - low) * ratio / top)), 2.0**-24)
        zero = min(max(round(-low * ratio / scale), 0), top)
        values = [(min(max(round(float(w) / scale) + zero, 0), top) - zero) * scale for w in group]
        errors.append(weighted_error(np.array(values), group))
    return min(errors)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [32, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_scales_and_zeros_are_in_range(shape: tuple[int, int], group_size: int, bits: int) -> None:
    result = rtn(random_weights(shape), bits, group_size)
    groups = -(-shape[1] // group_size)
    assert result.codes.shape == shape
    assert result.scales.shape == result.zeros.shape == (shape[0], groups)
    assert result.scales.dtype == np.float16
    assert (result.codes < 2**bits).all()
    assert (result.zeros < 2**bits).all()
    assert (result.scales > 0).all()


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("shape", [(2, 32), (3, 100), (2, 172)], ids=str)
def test_error_of_each_group_is_the_least_of_the_grid(shape: tuple[int, int], bits: int) -> None:
    weight = random_weights(shape, seed=bits)
    dequantized = rtn(weight, bits, 64).dequantize().astype(np.float64)
    for row in range(shape[0]):
        for start in range(0, shape[1], 64):
            columns = slice(start, start + 64)
            group = weight[row, columns].astype(np.float64)
            expected = best_group_error(group, bits, RATIOS)
            assert weighted_error(dequantized[row, columns], group) == pytest.approx(expected, rel=1e-4)


def test_clip_search_beats_plain_rounding() -> None:
    weight = random_weights((64, 128))
    dequantized = rtn(weight, 3, 128).dequantize()
    error = sum(weighted_error(*rows) for rows in zip(dequantized, weight, strict=True))
    plain = sum(best_group_error(row.astype(np.float64), 3, (1.0,)) for row in weight)
    assert error < 0.92 * plain


@pytest.mark.parametrize("value", [0.0, 0.3, -0.3, 1e-9, 1e4, 65504.0])
@pytest.mark.parametrize("bits", [3, 4])
def test_constant_groups_are_safe(value: float, bits: int) -> None:
    weight = np.full((2, 160), value, np.float32)
    dequantized = rtn(weight, bits, 128).dequantize()
    assert np.isfinite(dequantized).all()
    assert_close(dequantized, weight, "stored half")


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), bits=st.sampled_from([3, 4]), scale=st.sampled_from([1e-7, 1e-3, 1.0, 1e3]))
def test_no_weight_inside_the_range_is_off_by_more_than_the_clip(seed: int, bits: int, scale: float) -> None:
    weight = (np.random.default_rng(seed).uniform(-1, 1, (3, 96)) * scale).astype(np.float32)
    result = rtn(weight, bits, 64)
    dequantized = result.dequantize()
    assert np.isfinite(dequantized).all()
    step = 2 / (2**bits - 1)  # of the unclipped grid, in units of the peak
    assert np.abs(dequantized - weight).max() <= np.abs(weight).max() * (1 - RATIOS[-1] + step) + 2**-24


@pytest.mark.parametrize(
    ("bad", "why"), [*((bad, "NaN or infinity") for bad in (np.nan, np.inf, -np.inf)), (1e7, "too far for fp16")]
)
def test_weights_that_half_precision_cannot_scale_are_refused(bad: float, why: str) -> None:
    weight = random_weights((4, 64))
    weight[2, 5] = bad
    with pytest.raises(QuantizationError, match=why):
        rtn(weight, 4, 32)
    with pytest.raises(QuantizationError, match=why):
        quantize_residual(weight, 4)


def test_result_does_not_depend_on_how_rows_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weights((70, 172))
    whole, whole_residual = rtn(weight, 3, 64), quantize_residual(weight, 4)
    monkeypatch.setattr(threads, "CHUNK", 3 * 172)
    parts, parts_residual = rtn(weight, 3, 64), quantize_residual(weight, 4)
    for field in ("codes", "scales", "zeros"):
        np.testing.assert_array_equal(getattr(whole, field), getattr(parts, field))
    np.testing.assert_array_equal(whole_residual.codes, parts_residual.codes)
    np.testing.assert_array_equal(whole_residual.scales, parts_residual.scales)


def best_row_error(row: np.ndarray, top: int) -> float:
    """Of 32 scales (QDEC §4.2)."""
    errors = []
    for point in range(1, 33):
        scale = max(float(np.float16(np.abs(row).max() * point / 32 / top)), 2.0**-24)
        errors.append(float(((np.clip(np.rint(row / scale), -top, top) * scale - row) ** 2).sum()))
    return min(errors)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_residual_scale_is_the_best_of_the_grid(shape: tuple[int, int], bits: int) -> None:
    residual = random_weights(shape, seed=3)
    result = quantize_residual(residual, bits)
    top = 2 ** (bits - 1) - 1
    assert ((result.codes >= 1) & (result.codes <= 2 * top + 1)).all()
    for row, error in zip(residual, ((result.dequantize() - residual).astype(np.float64) ** 2).sum(1), strict=True):
        assert error == pytest.approx(best_row_error(row.astype(np.float64), top), rel=1e-3)


def test_more_residual_bits_leave_less_error() -> None:
    residual = random_weights((16, 256))
    errors = [np.abs(quantize_residual(residual, bits).dequantize() - residual).mean() for bits in (2, 4, 8)]
    assert errors[0] > 2 * errors[1] > 20 * errors[2]


def test_residual_of_zeros_is_zeros() -> None:
    result = quantize_residual(np.zeros((3, 40), np.float32), 4)
    np.testing.assert_array_equal(result.dequantize(), 0)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_fused_residuals_equal_those_of_the_parts(bits: int) -> None:
    """Source: QDEC; q, k and v of different magnitudes keep their own scales when they are quantized as one."""
    parts = [random_weights((48, 64), 1), 10 * random_weights((16, 64), 2), 0.1 * random_weights((16, 64), 3)]
    fused = np.concatenate(parts)
    base = rtn(fused, 3, 32)
    residual = quantize_residual(fused - base.dequantize(), bits)
    start = 0
    for part in parts:
        rows_of_part = slice(start, start + part.shape[0])
        alone = rtn(part, 3, 32)
        np.testing.assert_array_equal(base.codes[rows_of_part], alone.codes)
        np.testing.assert_array_equal(base.scales[rows_of_part], alone.scales)
        residual_alone = quantize_residual(part - alone.dequantize(), bits)
        np.testing.assert_array_equal(residual.codes[rows_of_part], residual_alone.codes)
        np.testing.assert_array_equal(residual.scales[rows_of_part], residual_alone.scales)
        start += part.shape[0]


@pytest.mark.parametrize("half", [False, True], ids=["4 bits", "16 bits"])
@pytest.mark.parametrize("shape", [(77, 64), (5, 100), (7, 128)], ids=str)
def test_a_stored_matrix_gives_the_same_numbers_whole_and_by_rows(shape: tuple[int, int], half: bool) -> None:
    weight = random_weights(shape)
    base = rtn(weight, 3, 32)
    quantized = quantize_residual(weight - base.dequantize(), 4)
    residual = PackedResidual(bits=4, codes=pack(quantized.codes.T, 4), scales=quantized.scales)
    if half:
        residual = PackedResidual(bits=16, codes=weight.T.astype(np.float16), scales=None)
    whole = PackedLinear(
        name="head",
        shape=shape,
        bits=3,
        group_size=32,
        codes=pack(base.codes, 3),
        scales=base.scales,
        zeros=base.zeros,
        bias=np.arange(shape[0], dtype=np.float32),
        residual=residual,
        rank_maximum=None,
        mean_square=None,
    )
    np.testing.assert_array_equal(dequantize(whole), base.dequantize())
    expected = weight.astype(np.float16).T if half else quantized.dequantize().T
    np.testing.assert_array_equal(dequantize_residual(residual, shape), expected)
    for rows in (slice(0, 32), slice(32, 77), slice(64, 64)):
        if rows.stop > shape[0]:
            continue
        part = rows_of(whole, rows)
        assert part.residual is not None
        np.testing.assert_array_equal(dequantize(part), dequantize(whole)[rows])
        np.testing.assert_array_equal(part.bias, whole.bias[rows])  # type: ignore[index]
        np.testing.assert_array_equal(dequantize_residual(part.residual, part.shape), expected[:, rows])


def test_methods_are_found_by_name() -> None:
    assert isinstance(quantizer("rtn")(random_weights((2, 32)), slice(0, 2), 4, 32), GroupCodes)
    with pytest.raises(QuantizationError, match="unknown method 'nearest'"):
        quantizer("nearest")


def test_work_of_a_thread_may_ask_for_all_threads() -> None:
    def row(factor: int) -> list[int]:
        return each(lambda value: factor * value, [1, 2, 3])

    assert each(row, [1, 10, 100]) == [[1, 2, 3], [10, 20, 30], [100, 200, 300]]

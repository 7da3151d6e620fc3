"""Progressive group quantization: the levels, and that intermediate values stay within INT8."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from models.errors import QuantizationError
from models.quantizers.groups import GroupCodes
from models.quantizers.progressive import LARGEST_GROUP_SCALE, PROTECTIVE, TOP, ProgressiveCodes, Rounding, quantize
from tests.close import assert_close

FloatArray = npt.NDArray[np.float32]

ADVERSARIAL = {
    "one outlier": np.r_[np.full(63, 1e-3), 100.0],
    "two signs": np.r_[np.full(32, -119.0), np.full(32, 119.0)],
    "the paper's": np.r_[np.linspace(-113, 120, 62), 127.0, -127.0],
    "all positive": np.linspace(100, 119, 64),
    "all negative": np.linspace(-119, -100, 64),
    "zeros": np.zeros(64),
    "tiny": np.linspace(-1e-30, 1e-30, 64),
    "halves": np.arange(64) - 31.5,
    "just below the top": np.r_[np.full(60, 118.5), -8.5, -7.5, 119.0, 0.0],
}


def check(found: ProgressiveCodes | GroupCodes) -> None:
    """Every product and every difference stays in a byte."""
    assert isinstance(found, ProgressiveCodes)
    width = found.codes.shape[1]
    scales, zeros = (
        np.repeat(part.astype(np.int64), found.group_size, axis=1)[:, :width]
        for part in (found.group_scales, found.zeros)
    )
    assert found.codes.max(initial=0) <= TOP
    assert found.zeros.max(initial=0) <= TOP
    assert found.group_scales.min(initial=1) >= 1
    assert found.group_scales.max(initial=1) <= LARGEST_GROUP_SCALE
    products, shifts = found.codes * scales, zeros * scales
    assert products.max(initial=0) <= 255
    assert shifts.max(initial=0) <= 255
    assert np.abs(products - shifts).max(initial=0) <= 127
    np.testing.assert_array_equal(found.integers(), products - shifts)


@settings(max_examples=150)
@given(
    weight=arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.integers(1, 100)),
        elements=st.floats(-1e4, 1e4, width=32, allow_subnormal=False),
    ),
    clip=st.booleans(),
    ratio=st.sampled_from([None, 1.0, 0.8, 0.5]),
)
def test_nothing_between_the_levels_leaves_int8(weight: FloatArray, clip: bool, ratio: float | None) -> None:
    clips = None if ratio is None else np.full(len(weight), ratio, np.float32)
    found = quantize(weight, 32, np.eye(weight.shape[1], dtype=np.float32), Rounding(clip=clip, clips=clips))
    check(found)


@pytest.mark.parametrize("name", ADVERSARIAL)
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_adversarial_weights_stay_in_int8(name: str, group_size: int) -> None:
    row = ADVERSARIAL[name].astype(np.float32)
    weight = np.stack([row, -row, row[::-1], np.roll(row, 7)])
    check(quantize(weight, group_size, None, Rounding(clip=False)))
    check(quantize(weight, group_size, None, Rounding(clip=True)))


def test_without_clipping_weights_are_off_by_half_a_step_of_each_level() -> None:
    weight = np.random.default_rng(0).normal(size=(8, 200)).astype(np.float32)
    found = quantize(weight, 64, None, Rounding(clip=False))
    assert isinstance(found, ProgressiveCodes)
    top = found.scales.astype(np.float32)
    steps = np.repeat(found.group_scales.astype(np.float32), 64, axis=1)[:, :200]
    # Half a step of each level, and what the rounding of scale and zero-point leaves beyond the last code.
    assert (np.abs(found.dequantize() - weight) <= top * (0.51 + 0.5 * steps + 7.5 * (steps > 0))).all()
    assert np.abs(found.dequantize() - weight).mean() < 0.08
    np.testing.assert_array_equal(top[:, 0], (np.abs(weight).max(1) / PROTECTIVE).astype(np.float16).astype(np.float32))


def test_clipping_never_makes_the_output_error_larger() -> None:
    rng = np.random.default_rng(1)
    weight = rng.standard_t(3, size=(32, 128)).astype(np.float32)
    x = rng.normal(size=(512, 128)).astype(np.float32) * np.exp(rng.normal(size=128)).astype(np.float32)
    hessian = x.T @ x
    losses = []
    for clip in (False, True):
        error = quantize(weight, 128, hessian, Rounding(clip=clip)).dequantize() - weight
        losses.append(np.einsum("nk,kj,nj->n", error, hessian, error))
    assert (losses[1] <= losses[0] * 1.001).all()
    assert losses[1].sum() < 0.97 * losses[0].sum()


def test_rows_that_are_told_a_ratio_keep_it() -> None:
    weight = np.random.default_rng(2).normal(size=(6, 96)).astype(np.float32)
    clips = np.array([1, 0.8, np.nan, 1, 0.8, np.nan], np.float32)
    told = quantize(weight, 32, None, Rounding(clip=True, clips=clips))
    for ratio in (1.0, 0.8):
        own = clips == np.float32(ratio)
        alone = quantize(weight[own], 32, None, Rounding(clip=False, clips=np.full(own.sum(), ratio, np.float32)))
        np.testing.assert_array_equal(told.codes[own], alone.codes)
    searched = quantize(weight, 32, None, Rounding(clip=True))
    np.testing.assert_array_equal(told.codes[np.isnan(clips)], searched.codes[np.isnan(clips)])


def test_one_level_has_a_scale_and_a_zero_point_for_each_output() -> None:
    weight = np.random.default_rng(3).normal(size=(5, 70)).astype(np.float32)
    found = quantize(weight, 96, None, Rounding(two_levels=False, clip=False))
    assert isinstance(found, GroupCodes)
    assert found.scales.shape == found.zeros.shape == (5, 1)
    span = np.maximum(weight.max(1), 0) - np.minimum(weight.min(1), 0)
    assert_close(found.scales[:, 0].astype(np.float32), (span / TOP).astype(np.float16), "rounding")
    with pytest.raises(ValueError, match="one level needs groups of 70 or more"):
        quantize(weight, 64, None, Rounding(two_levels=False))


@pytest.mark.parametrize(("value", "message"), [(np.nan, "NaN or infinity"), (1e38, "too far for fp16")])
def test_weights_that_cannot_be_rounded(value: float, message: str) -> None:
    weight = np.ones((2, 64), np.float32)
    weight[1, 3] = value
    with pytest.raises(QuantizationError, match=message):
        quantize(weight, 32, None, Rounding())

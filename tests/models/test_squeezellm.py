"""Codebooks against the best there are: dynamic programming over all weights of a row, in double precision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import threads
from models.checkpoint import Checkpoint
from models.errors import QuantizationError
from models.quantize import fisher
from models.quantize.text import token_windows
from models.quantize.work import Work
from models.quantizers import quantizer, squeezellm
from models.quantizers.groups import rtn
from tests.close import Tolerance, assert_close

SHAPES = [(1, 1), (2, 5), (3, 32), (5, 100), (4, 172), (140, 33), (0, 64)]


def weights(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_t(4, shape) * 0.02).astype(np.float32)


def importance(shape: tuple[int, int], seed: int = 1) -> np.ndarray:
    """Sensitivities as they are: sums of products of squares, a few of them far above the others."""
    rng = np.random.default_rng(seed)
    inputs = np.exp(1.5 * rng.standard_normal((1, shape[1])))
    return (rng.standard_normal(shape) ** 2 * inputs).astype(np.float16)


def errors(weight: np.ndarray, dequantized: np.ndarray, sensitivity: np.ndarray) -> np.ndarray:
    """Weighted squared error of each row."""
    difference = weight.astype(np.float64) - dequantized
    return (sensitivity.astype(np.float64) * difference**2).sum(1)


def least_error(row: np.ndarray, sensitivity: np.ndarray, cells: int) -> float:
    """Least weighted squared error of a row with so many entries of any value."""
    order = np.argsort(row)
    values, mass = row[order].astype(np.float64), sensitivity[order].astype(np.float64)

    def before(terms: np.ndarray) -> np.ndarray:
        return np.concatenate([[0.0], np.cumsum(terms)])

    zeroth, first, second = before(mass), before(mass * values), before(mass * values**2)
    start, end = np.triu_indices(len(row) + 1)
    inside = zeroth[end] - zeroth[start]
    cost = np.full((len(row) + 1, len(row) + 1), np.inf)
    around = np.divide((first[end] - first[start]) ** 2, inside, out=np.zeros_like(inside), where=inside > 0)
    cost[start, end] = second[end] - second[start] - around
    best = cost[0]
    for _ in range(cells - 1):
        best = (best[:, None] + cost).min(0)
    return float(best[-1])


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_entries_and_scales_are_in_range(shape: tuple[int, int], bits: int) -> None:
    found = squeezellm.quantize(weights(shape), importance(shape), bits)
    assert (found.codes.shape, found.codes.dtype) == (shape, np.uint8)
    assert (found.scales.shape, found.scales.dtype) == ((shape[0], 1), np.float16)
    assert (found.codebook.shape, found.codebook.dtype) == ((shape[0], 2**bits), np.int8)
    assert (found.codes < 2**bits).all()
    assert (found.scales > 0).all()
    assert (np.diff(found.codebook.astype(int)) >= 0).all()
    assert (found.codebook >= -127).all()


@pytest.mark.parametrize(("bits", "above"), [(3, 1.01), (4, 1.04)])
def test_errors_are_near_the_least_there_are(bits: int, above: float) -> None:
    """What is above is the rounding of entries to whole numbers, dearest where a row has few weights far out."""
    weight, sensitivity = weights((24, 300), seed=bits), importance((24, 300), seed=bits)
    found = errors(weight, squeezellm.quantize(weight, sensitivity, bits).dequantize(), sensitivity)
    least = np.array([least_error(*row, 2**bits) for row in zip(weight, sensitivity, strict=True)])
    ratio = found / least
    assert ratio.min() > 0.97  # sensitivities have a floor, which the reference does not know
    assert ratio.mean() < above
    assert ratio.max() < 1.2
    rounded = errors(weight, rtn(weight, bits, 128).dequantize(), sensitivity)
    assert found.sum() < 0.7 * rounded.sum()


def test_every_weight_has_the_nearest_entry() -> None:
    weight, sensitivity = weights((9, 200)), importance((9, 200))
    found = squeezellm.quantize(weight, sensitivity, 3)
    entries = found.codebook.astype(np.float64) * found.scales.astype(np.float64)
    nearest = np.abs(weight[:, :, None] - entries[:, None]).min(2)
    assert_close(np.abs(weight - found.dequantize()), nearest, Tolerance(rtol=1e-7, atol=1e-8, why="one subtraction"))


def test_sensitive_weights_are_nearer() -> None:
    weight = weights((16, 256))
    sensitivity = np.ones(weight.shape, np.float32)
    sensitivity[:, ::8] = 300
    found = squeezellm.quantize(weight, sensitivity, 3).dequantize()
    flat = squeezellm.quantize(weight, np.ones_like(sensitivity), 3).dequantize()
    assert np.square(weight - found)[:, ::8].mean() < 0.5 * np.square(weight - flat)[:, ::8].mean()
    scaled = squeezellm.quantize(weight, sensitivity * 1e-9, 3).dequantize()
    assert_close(scaled, found, "half attention")  # the unit does not matter, but for the last digit of fp16


def test_an_outlier_has_an_entry_if_it_counts() -> None:
    weight = weights((8, 256))
    weight[:, 77] = 3.0
    sensitivity = importance(weight.shape)
    sensitivity[:, 77] = 1
    dequantized = squeezellm.quantize(weight, sensitivity, 3).dequantize()
    assert_close(dequantized[:, 77], 3.0, Tolerance(rtol=0.01, why="an entry of 8 bits"))


@pytest.mark.parametrize("value", [0.0, 0.3, -0.3, 1e-7, 1e4])
def test_constant_rows_are_safe(value: float) -> None:
    weight = np.full((3, 70), value, np.float32)
    found = squeezellm.quantize(weight, importance(weight.shape), 3).dequantize()
    assert_close(found, weight, "stored half")


@pytest.mark.parametrize("bits", [3, 4])
def test_few_distinct_values_are_kept(bits: int) -> None:
    values = np.array([-1.0, -0.25, 0.0, 0.5, 1.0], np.float32)
    weight = np.random.default_rng(2).choice(values, (6, 90))
    found = squeezellm.quantize(weight, importance(weight.shape), bits).dequantize()
    assert_close(found, weight, Tolerance(atol=0.5 / 127, why="half a step of 8 bits"))


def test_rows_without_sensitivities_are_quantized_evenly() -> None:
    weight, sensitivity = weights((6, 120)), importance((6, 120))
    sensitivity[2] = 0
    sensitivity[4, 30:] = 0
    found = squeezellm.quantize(weight, sensitivity, 4).dequantize()
    even = squeezellm.quantize(weight, np.ones_like(sensitivity), 4).dequantize()
    np.testing.assert_array_equal(found[2], even[2])
    assert np.abs(found - weight).max() < 0.5 * np.abs(weight).max()


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    width=st.integers(1, 40),
    scale=st.sampled_from([1e-6, 1e-3, 1.0, 1e4]),
    decimals=st.sampled_from([1, 6]),
)
def test_random_rows_lie_between_the_least_error_and_plain_rounding(
    seed: int, width: int, scale: float, decimals: int
) -> None:
    rng = np.random.default_rng(seed)
    weight = (np.round(rng.standard_normal((2, width)), decimals) * scale).astype(np.float32)
    sensitivity = rng.uniform(0.1, 1, weight.shape).astype(np.float16)
    found = errors(weight, squeezellm.quantize(weight, sensitivity, 3).dequantize(), sensitivity)
    for row in range(2):
        least = least_error(weight[row], sensitivity[row], 8)
        step = np.abs(weight[row]).max() / 100 + 2.0**-24
        assert found[row] <= 1.5 * least + sensitivity[row].astype(np.float64).sum() * step**2


def test_result_does_not_depend_on_how_rows_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, sensitivity = weights((150, 172)), importance((150, 172))
    whole = squeezellm.quantize(weight, sensitivity, 3)
    monkeypatch.setattr(threads, "CHUNK", 7 * 172)
    monkeypatch.setattr(squeezellm, "_ROWS", 5)
    parts = squeezellm.quantize(weight, sensitivity, 3)
    for field in ("codes", "scales", "codebook"):
        np.testing.assert_array_equal(getattr(whole, field), getattr(parts, field))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_none_are_refused(bad: float) -> None:
    weight, sensitivity = weights((4, 64)), importance((4, 64))
    weight[2, 5] = bad
    with pytest.raises(QuantizationError, match="weights hold NaN or infinity"):
        squeezellm.quantize(weight, sensitivity, 3)
    sensitivity[1, 7] = bad
    with pytest.raises(QuantizationError, match="sensitivities hold NaN"):
        squeezellm.quantize(weights((4, 64)), sensitivity, 3)
    weight[2, 5] = 1e8
    with pytest.raises(QuantizationError, match="too far for fp16"):
        squeezellm.quantize(weight, importance((4, 64)), 3)


def test_input_channels_that_matter_in_other_rows_matter_too() -> None:
    weight, sensitivity = weights((16, 256)), np.ones((16, 256), np.float16)
    sensitivity[1:, ::8] = 300
    channels = squeezellm.channel_importance(sensitivity)
    assert_close(channels.mean(), 1)
    alone = squeezellm.quantize(weight, sensitivity, 3).dequantize()
    mixed = squeezellm.quantize(weight, sensitivity, 3, channels).dequantize()
    error = np.square(weight - np.stack([alone, mixed]))[:, 0, ::8].mean(1)
    assert error[1] < 0.6 * error[0]


def test_the_method_takes_the_rows_of_its_piece_and_the_channels_of_all() -> None:
    weight, sensitivity = weights((40, 64)), importance((40, 64))
    method = quantizer("squeezellm", sensitivity=sensitivity)
    whole, piece = method(weight, slice(0, 40), 3, 128), method(weight[32:], slice(32, 40), 3, 128)
    np.testing.assert_array_equal(whole.dequantize()[32:], piece.dequantize())
    with pytest.raises(QuantizationError, match="needs a calibration text"):
        quantizer("squeezellm")


@pytest.mark.data
@pytest.mark.parametrize("bits", [3, 4])
def test_real_weights_lose_less_than_by_rounding(tmp_path: Path, shared_data: Path, bits: int) -> None:
    folder = shared_data / "models" / "stories260k"
    text = (shared_data / "text" / "tinystories.txt").read_text(encoding="utf-8")
    checkpoint, work = Checkpoint.open(folder), Work(tmp_path)
    fisher.sensitivities(
        checkpoint, token_windows(folder, checkpoint.spec, text, 1024, "calibration"), work, lambda share: None
    )
    for name in checkpoint.spec.linear_names():
        weight, sensitivity = checkpoint.linear(name)[0].float().numpy(), fisher.load(work, name)
        found = errors(weight, squeezellm.quantize(weight, sensitivity, bits).dequantize(), sensitivity)
        assert found.sum() < 0.8 * errors(weight, rtn(weight, bits, 128).dequantize(), sensitivity).sum()
        rows_tried = range(0, len(weight), len(weight) // 4)
        least = [least_error(weight[row], sensitivity[row], 2**bits) for row in rows_tried]
        assert found[list(rows_tried)].sum() < 1.1 * sum(least)

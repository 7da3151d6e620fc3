"""GPTQ against a plain optimal-brain rounding, one channel after the other in double precision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from models import threads
from models.errors import QuantizationError
from models.quantize import quantize as quantize_model
from models.quantize.calibration import InputStatistics
from models.quantizers import gptq, quantizer
from models.quantizers.groups import round_to_grid, rtn, search
from models.recipe import Recipe
from models.store import Store
from tests.grid import grid


def correlated(tokens: int, width: int) -> np.ndarray:
    """Activations [tokens, width] with few directions, some large channels, and noise."""
    rng = np.random.default_rng(0)
    mixed = rng.standard_normal((tokens, 12)) @ rng.standard_normal((12, width))
    x = mixed + 0.3 * rng.standard_normal((tokens, width))
    x[:, :: max(1, width // 5)] *= 4
    return x.astype(np.float32)


def weights(shape: tuple[int, int], seed: int = 1) -> np.ndarray:
    return (np.random.default_rng(seed).standard_t(4, shape) * 0.02).astype(np.float32)


def moments(x: np.ndarray) -> np.ndarray:
    statistics = InputStatistics.empty(x.shape[1], second_moments=True)
    statistics.add(x, "layers.0.o")
    assert statistics.hessian is not None
    return statistics.hessian


def output_error(weight: np.ndarray, approximation: np.ndarray, x: np.ndarray) -> float:
    return float(np.square(x.astype(np.float64) @ (weight - approximation).astype(np.float64).T).mean())


def grids(weight: np.ndarray, bits: int, group_size: int, hessian: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and zero-points by the curvature of each channel: what a channel's error costs once the others made up."""
    order = np.argsort(-np.diag(hessian).astype(np.float64), kind="stable")
    damped = hessian.astype(np.float64) / np.diag(hessian).mean() + gptq.DAMPING * np.eye(len(hessian))
    curvature = np.empty(len(order), np.float32)
    for place, j in enumerate(order):  # the channels that follow make up for it
        curvature[j] = 1 / np.linalg.inv(damped[np.ix_(order[place:], order[place:])])[0, 0]
    return search(weight, curvature[None], bits, group_size)


def plain(weight: np.ndarray, bits: int, group_size: int, hessian: np.ndarray) -> np.ndarray:
    """Optimal brain rounding as it is derived: after each channel, the inverse loses that channel by elimination."""
    damped = hessian.astype(np.float64) / np.diag(hessian).mean() + gptq.DAMPING * np.eye(len(hessian))
    scales, zeros = grids(weight, bits, group_size, hessian)
    inverse, left = np.linalg.inv(damped), weight.astype(np.float64)
    codes = np.empty(weight.shape, np.uint8)
    for j in np.argsort(-np.diag(hessian).astype(np.float64), kind="stable"):
        scale = scales[:, j // group_size].astype(np.float64)
        zero = zeros[:, j // group_size].astype(np.float64)
        codes[:, j] = np.clip(np.rint(left[:, j] / scale) + zero, 0, 2**bits - 1)
        error = (left[:, j] - (codes[:, j] - zero) * scale) / inverse[j, j]
        left -= np.outer(error, inverse[j])
        inverse = inverse - np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return codes


@pytest.mark.parametrize("bits", grid([3, 4], {3}))
@pytest.mark.parametrize(("shape", "group_size"), [((6, 40), 32), ((9, 300), 64), ((4, 256), 128)], ids=str)
def test_codes_are_those_of_optimal_brain_rounding(shape: tuple[int, int], group_size: int, bits: int) -> None:
    """Equal but where float32 sums fall on the other side of a tie, after which a row may go its own way."""
    weight, hessian = weights(shape), moments(correlated(2 * shape[1], shape[1]))
    found = quantizer("gptq", hessian=hessian)(weight, slice(0, len(weight)), bits, group_size)
    expected = plain(weight, bits, group_size, hessian)
    assert (found.codes == expected).mean() > 0.98
    scales, zeros = grids(weight, bits, group_size, hessian)
    assert (found.scales == scales).mean() > 0.98
    assert (found.zeros == zeros).mean() > 0.98
    nearest = round_to_grid(weight, found.scales.astype(np.float32), found.zeros.astype(np.float32), bits, group_size)
    assert (found.codes != nearest.codes).mean() > 0.02


def test_uncorrelated_inputs_leave_round_to_nearest() -> None:
    weight = weights((8, 200))
    handed = gptq.feedback(np.diag(np.arange(1, 201)).astype(np.float32))
    found = gptq.quantize(weight, 3, 64, handed)
    scales, zeros = search(weight, handed.curvature[None], 3, 64)
    np.testing.assert_array_equal(found.codes, round_to_grid(weight, scales, zeros, 3, 64).codes)


@pytest.mark.parametrize("tokens", [40, 1000])
def test_the_outputs_are_nearer_on_inputs_that_were_not_seen(tokens: int) -> None:
    """Also with fewer tokens than channels, where the second moments have no inverse of their own."""
    x = correlated(2000, 256)
    weight, seen, unseen = weights((32, 256)), x[:tokens], x[1000:]
    found = gptq.quantize(weight, 3, 128, gptq.feedback(moments(seen))).dequantize()
    plain_error = output_error(weight, rtn(weight, 3, 128).dequantize(), unseen)
    assert output_error(weight, found, unseen) < (0.7 if tokens > 256 else 0.95) * plain_error


def test_channels_that_are_always_zero_are_safe() -> None:
    x = correlated(500, 96)
    x[:, 10:40] = 0
    found = gptq.quantize(weights((5, 96)), 4, 32, gptq.feedback(moments(x)))
    assert np.isfinite(found.dequantize()).all()
    none = gptq.quantize(weights((5, 96)), 4, 32, gptq.feedback(np.zeros((96, 96), np.float32)))
    scales, zeros = search(weights((5, 96)), np.ones((1, 96), np.float32), 4, 32)
    np.testing.assert_array_equal(none.codes, round_to_grid(weights((5, 96)), scales, zeros, 4, 32).codes)


def test_rows_do_not_depend_on_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, handed = weights((10, 160)), gptq.feedback(moments(correlated(400, 160)))
    whole = gptq.quantize(weight, 3, 32, handed)
    monkeypatch.setattr(threads, "CHUNK", 320)
    parts = [gptq.quantize(weight[:3], 3, 32, handed), gptq.quantize(weight[3:], 3, 32, handed)]
    assert (np.concatenate([part.codes for part in parts]) == whole.codes).mean() > 0.99


def test_what_cannot_be_used_is_refused() -> None:
    with pytest.raises(QuantizationError, match="needs a calibration text"):
        quantizer("gptq")
    with pytest.raises(QuantizationError, match="too large"):
        gptq.feedback(np.full((4, 4), np.inf, np.float32))
    with pytest.raises(QuantizationError, match="not positive semidefinite"):
        gptq.feedback(np.diag([1, 1, -5, 1]).astype(np.float32))


@pytest.mark.slow
@pytest.mark.data
def test_a_real_model_loses_less(tmp_path: Path, shared_data: Path) -> None:
    text = (shared_data / "text" / "wikitext2-valid.txt").read_text(encoding="utf-8")
    losses = {}
    for method in ("rtn", "gptq"):
        info = quantize_model(
            shared_data / "models" / "english3m",
            Store(tmp_path / method),
            Recipe(method=method, bits=3),
            calibration=text[:40_000],
            evaluation=text[100_000:120_000],
        )
        assert info.summary.perplexity_after is not None
        losses[method] = np.log(info.summary.perplexity_after / info.summary.perplexity_before)
    assert losses["gptq"] < losses["rtn"]

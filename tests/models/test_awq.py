"""AWQ: folded scales preserve the model, the search finds important channels, clipping minimizes its error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from models import architecture, threads
from models.checkpoint import Checkpoint
from models.errors import QuantizationError
from models.oracle import Oracle
from models.quantize import outer, quantize, scales
from models.quantize.calibration import InputStatistics
from models.quantize.working import WorkingBlock, sources
from models.quantizers.dequantize import dequantize
from models.quantizers.groups import FLOOR, RATIOS, clipped, rtn, to_fp16_scale
from models.recipe import Recipe
from models.spec import LAYER_TYPES
from models.store import Store
from tests.close import assert_close
from tests.models.conftest import TEXT, content, write_checkpoint
from tests.models.random_models import random_case

CASES = (
    "llama2",
    "llama-biases",
    "mistral-head-dim",
    "qwen2",
    "qwen2-tied",
    "qwen3-biases-tied",
    "phi3-partial",
    "lfm2-biases",
    "lfm3",
    "qwen3.5",
    "qwen3.5-biases",
)


def random_scales(spec: architecture.ModelSpec, kind: str, seed: int) -> np.ndarray:
    found = sources(spec, f"layers.1.{kind}")
    return np.exp(np.random.default_rng(seed).normal(0, 1, found.max() + 1))[found].astype(np.float32)


@pytest.mark.parametrize("kind", LAYER_TYPES)
@pytest.mark.parametrize("case", CASES)
def test_a_block_computes_the_same_with_scales_folded(case: str, kind: str, tmp_path: Path) -> None:
    random_case(case).save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    x = torch.randn(2, 9, checkpoint.spec.hidden_size, generator=torch.Generator().manual_seed(1))
    seen: dict[str, torch.Tensor] = {}
    plain = Oracle(checkpoint, observe=lambda name, value: seen.update({name: value.clone()})).block(1, x)
    working = WorkingBlock(checkpoint, 1)
    factors = random_scales(checkpoint.spec, kind, 2)
    working.scale_inputs(kind, factors)
    name = f"layers.1.{kind}"
    scaled_seen: dict[str, torch.Tensor] = {}
    scaled = Oracle(working, observe=lambda name, value: scaled_seen.update({name: value.clone()})).block(1, x)
    assert_close(scaled, plain, "model")
    assert_close(scaled_seen[name] * torch.from_numpy(factors), seen[name], "model")
    expected = checkpoint.linear(name)[0].float() * torch.from_numpy(factors)
    assert_close(working.linear(name)[0], expected)


def test_query_heads_that_share_a_value_head_are_tied(tmp_path: Path) -> None:
    spec = Checkpoint.open(write_checkpoint(tmp_path / "model")).spec  # 4 heads of 16 channels, 2 key-value heads
    found = sources(spec, "layers.0.o").reshape(4, 16)
    np.testing.assert_array_equal(found[0], np.arange(16))
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], np.arange(16, 32))
    np.testing.assert_array_equal(sources(spec, "layers.0.down"), np.arange(spec.intermediate_size))


def statistics_of(x: np.ndarray) -> InputStatistics:
    statistics = InputStatistics.empty(x.shape[1], second_moments=True)
    statistics.add(x, "layers.0.o")
    return statistics


def activations(width: int, seed: int = 0) -> np.ndarray:
    """Correlated inputs [2000, width] of which a few channels are much larger."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2000, 8)) @ rng.standard_normal((8, width)) + rng.standard_normal((2000, width))
    x[:, :: max(1, width // 6)] *= 20
    return x.astype(np.float32)


def random_weights(shape: tuple[int, int], seed: int = 3) -> np.ndarray:
    return (np.random.default_rng(seed).standard_t(4, shape) * 0.02).astype(np.float32)


def output_error(weight: np.ndarray, approximation: np.ndarray, x: np.ndarray) -> float:
    return float(np.square(x.astype(np.float64) @ (approximation - weight).T).mean())


def test_scales_lessen_the_error_of_the_output() -> None:
    x, weight = activations(160), random_weights((40, 160))
    found = scales.search(weight, statistics_of(x), 3, 64, np.arange(160))
    assert found.max() * found.min() == pytest.approx(1, rel=1e-4)
    assert found[0] > 2 * np.median(found)
    scaled = rtn(weight * found, 3, 64).dequantize() / found
    assert output_error(weight, scaled, x) < 0.5 * output_error(weight, rtn(weight, 3, 64).dequantize(), x)


def test_tied_channels_get_one_scale() -> None:
    tied = np.arange(96) // 2
    found = scales.search(random_weights((12, 96)), statistics_of(activations(96)), 3, 32, tied)
    np.testing.assert_array_equal(found[::2], found[1::2])
    assert len(np.unique(found)) > 10


@pytest.mark.parametrize("dead", [slice(10, 30), slice(0, 64)], ids=["some", "all"])
def test_silent_channels_get_bounded_scales(dead: slice) -> None:
    x, weight = activations(64), random_weights((8, 64))
    x[:, dead] = 0
    weight[:, 5] = 0
    found = scales.search(weight, statistics_of(x), 4, 32, np.arange(64))
    assert np.isfinite(found).all()
    assert (found > 0).all()
    assert found.max() / found.min() < 1e6
    if dead == slice(0, 64):  # nothing is better than anything: no scaling
        np.testing.assert_array_equal(found, 1)


@pytest.mark.parametrize(("rows_", "width"), [(0, 64), (1, 64), (511, 64), (5000, 64), (5000, 14336), (40, 1 << 20)])
def test_a_sample_is_bounded_and_from_all_over(rows_: int, width: int) -> None:
    found = scales.sample(rows_, width)
    assert len(np.unique(found)) == len(found) <= 512
    assert len(found) * width <= max(1 << 20, 32 * width)
    if rows_:
        assert 0 <= found.min() <= found.max() < rows_
        assert found.max() >= rows_ - 1 - rows_ // len(found)


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize(("width", "group_size"), [(64, 32), (100, 64)], ids=str)
def test_clipping_has_the_least_error_of_the_grid(width: int, group_size: int, bits: int) -> None:
    weight, x = random_weights((4, width)), activations(width)
    hessian = statistics_of(x).hessian
    assert hessian is not None
    dequantized = clipped(weight, bits, group_size, hessian).dequantize().astype(np.float64)
    top, moments = 2**bits - 1, np.diag(hessian).astype(np.float64)
    moments = moments + FLOOR * moments.mean()
    for start in range(0, width, group_size):
        channels = slice(start, start + group_size)
        importance = moments[channels]
        for row in range(4):
            group, errors = weight[row, channels].astype(np.float64), []
            low, high = min(group.min(), 0), max(group.max(), 0)
            for ratio in RATIOS:
                scale = float(to_fp16_scale(np.float32((high - low) * ratio / top)))
                zero = np.clip(np.rint(-low * ratio / scale), 0, top)
                error = (np.clip(np.rint(group / scale) + zero, 0, top) - zero) * scale - group
                errors.append(float((importance * error**2).sum()))
            error = dequantized[row, channels] - group
            assert (importance * error**2).sum() == pytest.approx(min(errors), rel=1e-3)


def test_clipping_by_the_output_beats_clipping_by_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = random_weights((40, 200)), activations(200)
    hessian = statistics_of(x).hessian
    assert hessian is not None
    found = clipped(weight, 3, 64, hessian)
    assert output_error(weight, found.dequantize(), x) < 0.8 * output_error(weight, rtn(weight, 3, 64).dequantize(), x)
    monkeypatch.setattr(threads, "CHUNK", 3 * 200)
    parts = clipped(weight, 3, 64, hessian)
    assert (parts.codes == found.codes).mean() > 0.999
    np.testing.assert_array_equal(clipped(weight[:0], 3, 64, hessian).codes.shape, (0, 200))


def test_inputs_that_are_silent_are_clipped_by_the_weights() -> None:
    weight = random_weights((6, 64))
    found = clipped(weight, 4, 32, np.zeros((64, 64), np.float32)).dequantize()
    assert np.abs(found - weight).mean() < 0.15 * np.abs(weight).mean()
    weight[1, 2] = np.nan
    with pytest.raises(QuantizationError, match="NaN or infinity"):
        clipped(weight, 4, 32, np.eye(64, dtype=np.float32))


@pytest.mark.parametrize("method", ["awq", "awq-gptq"])
def test_a_model_is_near_its_checkpoint_and_made_the_same_again(tmp_path: Path, method: str) -> None:
    folder = write_checkpoint(tmp_path / "source", family="qwen2")
    texts = {"calibration": TEXT, "evaluation": TEXT[:300]}
    stores, recipe = (Store(tmp_path / "first"), Store(tmp_path / "second")), Recipe(method=method, group_size=32)
    first, info = (quantize(folder, store, recipe, **texts) for store in stores)
    assert content(first.path) == content(info.path)
    assert info.summary.perplexity_after < 1.2 * info.summary.perplexity_before
    checkpoint, model = Checkpoint.open(folder), stores[0].open(info.name)
    for name, norm in (("layers.1.gate_up", "layers.1.post_norm"), ("head", "norm")):
        factors = checkpoint.vector(norm).numpy() / model.vector(norm)
        weight = checkpoint.linear(name)[0].float().numpy()[:64] * factors
        assert np.abs(dequantize(model.linear(name))[:64] - weight).mean() < 0.2 * np.abs(weight).mean()
        assert factors.std() > 0


def test_perplexity_before_is_that_of_the_checkpoint(
    tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's scales are in the stored norm alone; the full-precision measurement has none."""
    texts = {"calibration": TEXT, "evaluation": TEXT[:300]}
    plain = quantize(tiny_checkpoint, Store(tmp_path / "rtn"), Recipe(bits=4), **texts).summary
    monkeypatch.setattr(outer, "search", lambda weight, *_: np.linspace(0.2, 5, weight.shape[1]).astype(np.float32))
    scaled = quantize(tiny_checkpoint, Store(tmp_path / "awq"), Recipe(method="awq", bits=4), **texts).summary
    assert scaled.perplexity_before == pytest.approx(plain.perplexity_before, rel=1e-3)
    assert scaled.perplexity_after < 1.2 * plain.perplexity_before


@pytest.mark.slow
@pytest.mark.data
def test_a_real_model_loses_less_than_with_rounding(tmp_path: Path, shared_data: Path) -> None:
    text = (shared_data / "text" / "tinystories.txt").read_text(encoding="utf-8")
    losses = {}
    for method in ("rtn", "gptq", "awq", "awq-gptq"):
        info = quantize(
            shared_data / "models" / "stories260k",
            Store(tmp_path / method),
            Recipe(method=method, bits=3, residual_bits=0),
            calibration=text[:30_000],
            evaluation=text[100_000:110_000],
        )
        assert info.summary.perplexity_after is not None
        losses[method] = float(np.log(info.summary.perplexity_after / info.summary.perplexity_before))
    assert losses["awq"] < losses["rtn"]
    assert losses["awq-gptq"] < losses["gptq"]

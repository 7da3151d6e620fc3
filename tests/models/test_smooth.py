"""SmoothAttention: folded into a block of any family it leaves the model as it is, and it evens out the keys."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from models.checkpoint import Checkpoint
from models.errors import QuantizationError
from models.oracle import Oracle
from models.quantize import quantize
from models.quantize.scales import SMALLEST_SHARE, smooth_attention, smoothing
from models.quantize.streams import Streams
from models.quantize.working import WorkingBlock
from models.quantizers.dequantize import dequantize
from models.recipe import Recipe
from models.spec import ModelSpec, RopeSpec
from models.store import Store
from tests.close import Tolerance, assert_close
from tests.grid import grid
from tests.models.conftest import TEXT, write_checkpoint
from tests.models.random_models import CASES, MECHANISMS, random_case


def spec_of(
    *, heads: int = 4, kv_heads: int = 2, head_dim: int = 8, rotary: int = 8, qk_norm: bool = False
) -> ModelSpec:
    return ModelSpec(
        family="llama",
        hidden_size=16,
        intermediate_size=16,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=8,
        max_context=16,
        norm_eps=1e-5,
        rope=RopeSpec(rotary_dim=rotary),
        windows=(None,),
        qk_norm=qk_norm,
    )


def watched(weights: object, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A block's output, and its keys [B, H_kv, S, D]."""
    keys: list[torch.Tensor] = []
    output = Oracle(weights, observe_keys=lambda _, _q, seen: keys.append(seen.clone())).block(layer, x)  # type: ignore[arg-type]
    return output, keys[0]


def nothing() -> None:
    pass


UNEVEN = ("Gemma3n", "Gemma4", "DeepseekV2", "Glm4MoeLite")
SMOOTHED = [case for case, (family, _) in CASES.items() if family not in UNEVEN]
"""Cases whose keys can be smoothed."""


@pytest.mark.parametrize("case", grid(SMOOTHED, MECHANISMS & set(SMOOTHED)))
def test_a_block_computes_the_same_with_even_keys(case: str, tmp_path: Path) -> None:
    random_case(case).save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    spec = checkpoint.spec
    layer = max(spec.attention_layers)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 9, spec.hidden_size, generator=generator)
    plain, keys = watched(checkpoint, layer, x)
    working = WorkingBlock(checkpoint, layer)
    magnitude = Streams(calibration=[x], full=[], low=[]).largest_keys(working, layer, nothing)
    np.testing.assert_array_equal(magnitude, keys.abs().amax((0, 2)).numpy())
    uneven = magnitude * np.exp(np.random.default_rng(2).normal(0, 3, magnitude.shape)).astype(np.float32)
    smooth_attention(working, uneven)
    smooth, even = watched(working, layer, x)
    assert_close(smooth, plain, "model")
    scales = torch.from_numpy(smoothing(spec, uneven))
    assert scales.max() > 2 * scales.min()
    assert_close(even * scales[:, None], keys, "model")


@pytest.mark.parametrize("case", ["gemma3n", "gemma4-values", "glm4-flash"])
def test_keys_that_no_scale_leaves_even_are_refused(case: str, tmp_path: Path) -> None:
    random_case(case).save_pretrained(tmp_path)
    with pytest.raises(QuantizationError, match="cannot be smoothed"):
        quantize(tmp_path, Store(tmp_path / "store"), Recipe(smooth_attention=True), calibration="a", evaluation="a")


def test_scales_are_the_roots_of_the_larger_of_a_pair() -> None:
    magnitude = np.array([[1, 4, 16, 1, 4, 9, 2, 25], [3, 1, 1, 1, 1, 1, 1, 1]], np.float32)
    scales = smoothing(spec_of(), magnitude)
    pairs = np.array([[4, 9, 16, 25], [3, 1, 1, 1]])
    expected = np.sqrt(pairs) / np.sqrt(np.sqrt([[4 * 25], [3 * 1]]))
    assert_close(scales, np.tile(expected, 2), "rounding")
    assert_close(scales.max(1) * scales.min(1), 1, "rounding")


def test_channels_that_do_not_rotate_are_alone() -> None:
    magnitude = np.array([[1, 4, 16, 1, 4, 9, 64, 36]], np.float32)
    scales = smoothing(spec_of(kv_heads=1, rotary=4), magnitude)[0]
    assert_close(scales**2 / scales[0] ** 2 * 16, [16, 4, 16, 4, 4, 9, 64, 36])


def test_heads_that_share_a_norm_are_tied() -> None:
    magnitude = np.random.default_rng(0).uniform(1, 9, (2, 8)).astype(np.float32)
    scales = smoothing(spec_of(qk_norm=True), magnitude)
    np.testing.assert_array_equal(scales[0], scales[1])
    np.testing.assert_array_equal(scales[0], smoothing(spec_of(), np.tile(magnitude.max(0), (2, 1)))[0])


@pytest.mark.parametrize("dead", [slice(2, 3), slice(0, 7), slice(0, 8)], ids=["one", "most", "all"])
@pytest.mark.parametrize("size", [1e-30, 1.0, 3e38])
def test_silent_channels_get_bounded_scales(dead: slice, size: float) -> None:
    magnitude = np.full((1, 8), size, np.float32)
    magnitude[:, dead] = 0
    scales = smoothing(spec_of(kv_heads=1, rotary=0), magnitude)
    assert np.isfinite(scales).all()
    assert SMALLEST_SHARE**0.25 * 0.999 <= scales.min() <= scales.max() <= SMALLEST_SHARE**-0.25 * 1.001 < 6
    if dead == slice(0, 8):
        np.testing.assert_array_equal(scales, 1)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_keys_that_are_no_numbers_are_refused(value: float, tmp_path: Path) -> None:
    working = WorkingBlock(Checkpoint.open(write_checkpoint(tmp_path / "model")), 1)
    magnitude = np.ones((2, 16), np.float32)
    magnitude[1, 3] = value
    with pytest.raises(QuantizationError, match=r"NaN or infinity in the keys of layers\.1"):
        smooth_attention(working, magnitude)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Keys as a cache of 4 bits with a scale and a zero for each token and head returns them."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = (high - low) / 15
    return torch.round((x - low) / step) * step + low


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_planted_outlier_channel_costs_less(family: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "model", family=family))
    spec, name = checkpoint.spec, "layers.1.qkv"

    class Planted(WorkingBlock):
        def __init__(self) -> None:
            super().__init__(checkpoint, 1)
            weight, _ = self.linear(name)
            weight[spec.q_width + torch.tensor([5, 5 + spec.head_dim // 2, spec.head_dim])] *= 40
            weight[: spec.q_width] /= 8  # scores of a size that softmax does not saturate at

    x = torch.randn(2, 40, spec.hidden_size, generator=torch.Generator().manual_seed(3))
    plain, smooth = Planted(), Planted()
    smooth_attention(smooth, Streams(calibration=[x], full=[], low=[]).largest_keys(smooth, 1, nothing))
    errors = []
    for working in (plain, smooth):
        seen: dict[str, torch.Tensor] = {}
        oracle = Oracle(
            working,
            observe=lambda name, value, into=seen: into.update({name: value.clone()}),  # type: ignore[misc]
            observe_keys=lambda _, _q, keys, into=seen: into.update(keys=keys.clone()),  # type: ignore[misc]
        )
        oracle.block(1, x)
        exact = seen["layers.1.o"]
        oracle.observe_keys = lambda _, _q, keys: keys.copy_(rounded(keys))  # the cache's loss, in place
        oracle.block(1, x)
        errors.append(float((seen["layers.1.o"] - exact).square().mean()))
    assert errors[1] < 0.3 * errors[0]


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq", "squeezellm"])
def test_every_recipe_can_have_it(method: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", family="qwen2")
    checkpoint, store = Checkpoint.open(folder), Store(tmp_path / "store")
    recipe = Recipe(method=method, group_size=32, smooth_attention=True)
    stored = [
        store.open(quantize(folder, store, each, calibration=TEXT, evaluation=TEXT).name)
        for each in (recipe, replace(recipe, smooth_attention=False))
    ]
    assert stored[0].path.name == f"model-{method}-4bit-g32-sa"
    assert Recipe.from_json(json.loads((stored[0].path / "recipe.json").read_text())["recipe"]) == recipe
    assert "smooth_attention" not in json.loads((stored[1].path / "recipe.json").read_text())["recipe"]
    spec = checkpoint.spec
    weights = [torch.from_numpy(dequantize(model.linear("layers.1.qkv"))) for model in stored]
    ratio = (weights[0].norm(dim=1) / weights[1].norm(dim=1))[: spec.q_width + spec.kv_width]
    queries = ratio[: spec.q_width].reshape(spec.num_kv_heads, -1, spec.head_dim)
    keys = ratio[spec.q_width :].reshape(spec.num_kv_heads, spec.head_dim)
    assert keys.max() > 1.1 * keys.min()
    if method != "awq":  # whose own scales change with it
        assert_close(queries[:, 0] * keys, torch.ones_like(keys), Tolerance(rtol=0.1, why="weights of 4 bits"))
        assert_close(queries[:, 1] * keys, torch.ones_like(keys), Tolerance(rtol=0.1, why="weights of 4 bits"))

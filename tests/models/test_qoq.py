"""QoQ's steps: folded into a model of any family they preserve its logits and have their intended effect."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from models import per_token
from models.checkpoint import Checkpoint
from models.errors import QuantizationError
from models.oracle import Oracle
from models.packing import unpack
from models.quantize import quantize
from models.quantize.qoq import CLIPS, clip_heads, prepare, smoothing
from models.quantize.rotated import RotatedCheckpoint, paley_matrix, rotation
from models.quantize.streams import Streams
from models.quantize.working import WorkingBlock, sources
from models.recipe import QOQ_STEPS, Recipe
from models.store import Store, StoredModel, StoredModelInfo
from runtime.backends.decoder import DecoderOptions
from runtime.backends.operations.linear import gemm_w4a8, integer_weights, quantize_groups
from runtime.load.plan import open_decoder
from runtime.measure.evaluate import perplexity
from runtime.text.tokenizer import Tokenizer
from tests.close import assert_close
from tests.grid import grid
from tests.models.conftest import TEXT, write_checkpoint
from tests.models.random_models import CASES, MECHANISMS, MIXTURES, random_case

ALL = tuple(step for step in QOQ_STEPS if step != "clip")
"""The steps that change weights before they are rounded."""
EVALUATION = TEXT[:300]


class _Prepared:
    """Weights of a model whose blocks were prepared."""

    def __init__(self, checkpoint: Checkpoint, blocks: list[WorkingBlock]) -> None:
        self.spec, self._checkpoint, self._blocks = checkpoint.spec, checkpoint, blocks

    def _owner(self, name: str) -> Any:
        return self._blocks[int(name.split(".")[1])] if name.startswith("layers") else self._checkpoint

    def vector(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self._owner(name).vector(name)
        return found

    def linear(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        found: tuple[torch.Tensor, torch.Tensor | None] = self._owner(name).linear(name)
        return found

    def embedding(self) -> torch.Tensor:
        return self._checkpoint.embedding()


def nothing() -> None:
    pass


REFUSED = (*MIXTURES, "Gemma3n", "Gemma4", "Gemma4Unified", "FalconH1")
DENSE = [
    case
    for case, (family, changes) in CASES.items()
    if family not in (*MIXTURES, "Gemma3n", "Gemma4", "Gemma4Unified", "FalconH1")
    and not changes.get("num_local_experts")
]
"""Mixtures, Gemma 3n and 4 and Falcon-H1 are refused, see test_quantize_experts.py and `Pipeline`."""


def prepared(checkpoint: Checkpoint, recipe: Recipe, tokens: torch.Tensor) -> _Prepared:
    """All blocks after a recipe's steps."""
    source = RotatedCheckpoint.of(checkpoint) if recipe.rotate else checkpoint
    x, blocks = source.embedding()[tokens].float(), []
    for layer in range(source.spec.num_layers):
        working = WorkingBlock(source, layer)
        prepare(working, Streams(calibration=[x], full=[], low=[]), recipe, nothing)
        x = Oracle(working).block(layer, x)
        blocks.append(working)
    return _Prepared(source, blocks)


@pytest.mark.parametrize("case", grid(DENSE, MECHANISMS & set(DENSE)))
@pytest.mark.parametrize("step", grid([*ALL, "all"], {"all"}))
def test_logits_are_unchanged_before_rounding(case: str, step: str, tmp_path: Path) -> None:
    model = random_case(case)
    model.save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    on = dict.fromkeys(QOQ_STEPS, False) | dict.fromkeys(ALL if step == "all" else (step,), True)
    recipe = Recipe.usual("qoq", group_size=32, **on)
    if recipe.rotate and checkpoint.spec.norm_after:
        with pytest.raises(QuantizationError, match="cannot be rotated"):
            RotatedCheckpoint.of(checkpoint)
        return
    tokens = torch.randint(3, 67, (2, 11), generator=torch.Generator().manual_seed(1))
    plain, changed = Oracle(checkpoint), Oracle(prepared(checkpoint, recipe, tokens))  # type: ignore[arg-type]
    before, after = (oracle.logits(tokens) for oracle in (plain, changed))
    assert float((before - after).abs().max()) < 1e-4 * max(1.0, float(before.abs().max()))


def test_rotation_spreads_an_outlier_of_the_stream(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, hidden=64)
    checkpoint = Checkpoint.open(tmp_path)
    rotated = RotatedCheckpoint.of(checkpoint)
    x = torch.zeros(1, 64)
    x[0, 5] = 100
    assert_close(rotated.turn(x).abs(), torch.full((1, 64), 12.5), "sums")
    assert torch.equal(rotated.vector("layers.0.input_norm"), torch.ones(64))


def test_reordering_sorts_channels_by_their_largest_activation(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    working = WorkingBlock(Checkpoint.open(tmp_path), 0)
    x = torch.randn(2, 20, 64, generator=torch.Generator().manual_seed(0))
    recipe = Recipe(method="qoq", residual_bits=0, reorder=True)
    prepare(working, Streams(calibration=[x], full=[], low=[]), recipe, nothing)
    seen: dict[str, torch.Tensor] = {}
    Oracle(working, observe=seen.__setitem__).block(0, x)
    largest = seen["layers.0.down"].abs().amax((0, 1))
    assert_close(largest, largest.sort(descending=True).values, "exact")


def test_heads_of_q_and_k_have_clip_ratios_and_v_has_none(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    working = WorkingBlock(Checkpoint.open(tmp_path), 0)
    x = torch.randn(2, 20, 64, generator=torch.Generator().manual_seed(0))
    clips = clip_heads(working, [x], Recipe.usual("qoq", group_size=32), nothing)
    spec = working.spec
    assert clips.shape == (spec.q_width + 2 * spec.kv_width,)
    assert np.isnan(clips[spec.q_width + spec.kv_width :]).all()
    heads = clips[: spec.q_width + spec.kv_width].reshape(-1, spec.head_dim)
    assert (heads == heads[:, :1]).all()
    assert {float(ratio) for ratio in heads[:, 0]} <= {float(np.float32(ratio)) for ratio in CLIPS}


def test_heads_are_clipped_where_that_helps_alone(tmp_path: Path) -> None:
    """Large weights whose inputs are silent waste the range; of weights that are all as large, none is to be cut."""
    write_checkpoint(tmp_path)
    working = WorkingBlock(Checkpoint.open(tmp_path), 0)
    spec, generator = working.spec, torch.Generator().manual_seed(0)
    heads = working.linear("layers.0.qkv")[0][: spec.q_width + spec.kv_width].view(-1, spec.head_dim, 64)
    wasteful = torch.tensor([True, True, False, False, True, False])  # four of queries, two of keys
    for head, wastes in zip(heads, wasteful, strict=True):
        drawn = torch.randn(head.shape, generator=generator)
        head[:] = (drawn if wastes else drawn.sign()) / 8
        if wastes:
            head[:, [5, 40]] = 0.75
    x = torch.randn(2, 20, 64, generator=generator)
    x[..., [5, 40]] = 0
    clips = clip_heads(working, [x], Recipe.usual("qoq", group_size=32), nothing)
    found = torch.from_numpy(clips[: spec.q_width + spec.kv_width]).view(-1, spec.head_dim)[:, 0]
    assert bool((found[wasteful] < 1).all())
    assert bool((found[~wasteful] == 1).all())


@pytest.mark.parametrize("kind", ["o", "down"])
def test_what_outshines_other_inputs_is_divided(kind: str, tmp_path: Path) -> None:
    """A token's inputs share one scale, and the weights of this channel its group's range."""
    write_checkpoint(tmp_path)
    working = WorkingBlock(Checkpoint.open(tmp_path), 0)
    width = working.linear(f"layers.0.{kind}")[0].shape[1]
    x = torch.randn(200, width, generator=torch.Generator().manual_seed(0))
    x[:, 7] *= 100
    scales = smoothing(working, kind, x, Recipe.usual("qoq", group_size=32))
    tied = sources(working.spec, f"layers.0.{kind}")
    others = scales[tied != tied[7]]
    assert len(set(scales[tied == tied[7]].tolist())) == 1
    assert scales[7] > 2 * others.max()


def test_tokens_are_rounded_as_one_group() -> None:
    x = torch.randn(7, 100, generator=torch.Generator().manual_seed(0))
    x[3] = 0
    codes, scales = per_token.quantize(x)
    expected, steps = quantize_groups(x, 128)
    assert torch.equal(codes, expected)
    assert torch.equal(scales, steps)
    assert_close(per_token.rounded(x), codes.float() * scales, "exact")


@pytest.fixture(scope="module", params=[32, 128, 0])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StoredModelInfo:
    """A model with groups of so many channels; 0: of whole output channels."""
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), family="qwen2")
    store, recipe = Store(tmp_path_factory.mktemp("store")), Recipe.usual("qoq", group_size=request.param)
    info = quantize(folder, store, recipe, calibration=TEXT, evaluation=EVALUATION)
    assert StoredModel.open_folder(info.path).recipe == recipe
    return info


def test_a_stored_model_computes_with_whole_numbers(stored: StoredModelInfo) -> None:
    """Every tensor is there as documented, and the reference backend's sums are those of its integers."""
    model = StoredModel.open_folder(stored.path)
    group_size = model.recipe.group_size
    with safe_open(stored.path / "block-00000.safetensors", "np") as file:
        assert ("layers.0.down.group_scales" in file.keys()) == (group_size > 0)  # noqa: SIM118
    packed = model.linear("layers.0.qkv")
    N, K = packed.shape
    groups = -(-K // (group_size or K))
    assert packed.zeros is not None
    assert packed.zeros.shape == (N, groups)
    assert packed.scales.shape == (N, 1)
    codes = unpack(np.ascontiguousarray(packed.codes), 4, K).astype(np.int64)
    scales = np.ones((N, groups), np.int64) if packed.group_scales is None else packed.group_scales.astype(np.int64)
    zeros, scales = (np.repeat(part, packed.group_size, axis=1)[:, :K] for part in (packed.zeros.astype(int), scales))
    weights = (codes - zeros) * scales
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(2))
    activations, steps = per_token.quantize(x)
    total = activations.numpy().astype(np.int64) @ weights.T
    factors = packed.scales.astype(np.float32)[:, 0] * steps.numpy()
    assert packed.bias is not None
    expected = total.astype(np.float32) * factors + packed.bias
    np.testing.assert_array_equal(gemm_w4a8(activations, steps, integer_weights(packed), packed).numpy(), expected)


def test_the_reference_backend_evaluates_what_quantizing_promised(stored: StoredModelInfo) -> None:
    """Quantizing computes with numbers that whole ones stand for; what differs is the cache, which holds halves."""
    model, summary = StoredModel.open_folder(stored.path), stored.summary
    decoder, _ = open_decoder(model, DecoderOptions(context=256, max_rows=64), "reference")
    tokens = Tokenizer(model.tokenizer_path).encode(EVALUATION)
    found = perplexity(decoder, tokens, 256, 256, as_chat=True).perplexity
    decoder.close()
    assert found == pytest.approx(summary.perplexity_after, rel=0.003)
    assert summary.perplexity_before is not None
    assert found < 1.6 * summary.perplexity_before


def test_what_is_asked_for_has_to_go_together() -> None:
    for bad, message in (
        ({"method": "gptq", "rotate": True}, "rotate: only for the method qoq"),
        ({"method": "qoq", "bits": 3}, "qoq supports only 4 bits, not 3 and 4"),
        ({"method": "qoq", "group_size": 48}, "a multiple of 32, or 0 for a whole output channel, not 48"),
        ({"method": "rtn", "group_size": 0}, "a multiple of 32, not 0"),
    ):
        with pytest.raises(QuantizationError, match=message):
            Recipe(**bad)  # type: ignore[arg-type]
    usual = Recipe.usual("qoq")
    assert (usual.group_size, usual.residual_bits, usual.reorder) == (128, 0, True)
    assert not usual.rotate
    assert not Recipe.usual("qoq", group_size=0).reorder
    assert Recipe.from_json(usual.to_json()) == usual
    assert not set(QOQ_STEPS) & Recipe().to_json().keys()
    assert replace(usual, clip=False).to_json().keys() >= {"smooth_outputs", "reorder"}


@pytest.mark.parametrize("order", [12, 20, 24, 28, 36, 44, 60, 76])
def test_paleys_matrices_are_hadamards(order: int) -> None:
    matrix = paley_matrix(order)
    assert set(matrix.unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(matrix @ matrix.T, order * torch.eye(order))


@pytest.mark.parametrize("order", [1, 2, 6, 30, 92, 172])
def test_orders_that_paley_lacks(order: int) -> None:
    with pytest.raises(ValueError, match=f"no Hadamard matrix of order {order}"):
        paley_matrix(order)


@pytest.mark.parametrize("width", [1, 2, 3, 64, 92, 96, 288, 576, 896])
def test_rotations_are_orthogonal(width: int) -> None:
    found = rotation(width)
    assert found.width == width
    matrix = found(torch.eye(width))
    assert_close(matrix @ matrix.T, torch.eye(width), "sums")
    x = torch.randn(3, 5, width, generator=torch.Generator().manual_seed(0))
    assert_close(found(x), x @ matrix, "sums")
    assert_close(found.outputs(x[0].T.contiguous()), matrix.T @ x[0].T, "sums")


@pytest.mark.parametrize(
    ("width", "blocks", "paley"),
    [
        *((576, 1, 36), (1536, 1, 12), (3584, 1, 28), (736, 1, 368), (4096, 1, 1), (92, 23, 1)),
        pytest.param(11008, 1, 5504, marks=pytest.mark.slow),
    ],
)
def test_a_rotation_mixes_all_channels_where_there_is_a_construction(width: int, blocks: int, paley: int) -> None:
    found = rotation(width)
    assert (found.blocks, found.paley) == (blocks, paley)
    one = torch.zeros(1, width)
    one[0, 0] = 1
    spread = found(one)
    assert_close(spread[spread != 0].abs(), (width / blocks) ** -0.5, "sums")
    assert int((spread != 0).sum()) == width // blocks


def test_no_channels_cannot_be_rotated() -> None:
    with pytest.raises(ValueError, match="1 channel at least"):
        rotation(0)

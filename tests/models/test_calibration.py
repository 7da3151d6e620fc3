"""Statistics of activations, keys and queries, and what compensation restores of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from models.checkpoint import Checkpoint
from models.errors import QuantizationError
from models.oracle import Oracle
from models.packed import tensor_names
from models.quantize import calibration, quantize
from models.quantize.calibration import SALIENT_CHUNK, InputStatistics, KeyMoments, levels, without_salient
from models.quantize.text import calibration_limit, token_windows
from models.quantizers import gptq, quantizer
from models.quantizers.gptq import DAMPING
from models.quantizers.groups import rtn
from models.quantizers.residual import quantize_residual
from models.recipe import Recipe
from models.store import Store
from tests.close import assert_close
from tests.models.conftest import TEXT, write_checkpoint


@pytest.mark.parametrize("alike", [0.0, 0.999])
def test_second_moments_of_bfloat16_products_can_be_factored(alike: float) -> None:
    """Of channels that are all alike, too, where rounding is largest beside the smallest eigenvalue.

    A product is rounded to 8 bits, so off by 1/512 at most; a sum of twelve by less. GPTQ damps by half the mean.
    """
    random = np.random.default_rng(7)
    exactly, fast = (
        InputStatistics.empty(600, second_moments=True, expected_k_chunk=64, products=products)
        for products in (None, torch.bfloat16)
    )
    for _ in range(4):
        common, own = random.normal(size=(256, 1)), random.normal(size=(256, 600))
        x = (alike * common + (1 - alike) * own).astype(np.float32) * 30
        for statistics in (exactly, fast):
            statistics.add(x, "layers.0.down")
    assert exactly.hessian is not None
    assert fast.hessian is not None
    size = np.sqrt(np.outer(np.diag(exactly.hessian), np.diag(exactly.hessian)))
    assert np.abs((fast.hessian - exactly.hessian) / size).max() < 1 / 512
    np.testing.assert_array_equal(fast.hessian, fast.hessian.T)
    damped = fast.hessian / np.diag(fast.hessian).mean() + DAMPING * np.eye(600)
    assert np.linalg.eigvalsh(damped).min() > DAMPING / 2


def test_statistics_follow_their_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_CHUNK", 100)
    x = np.random.default_rng(0).standard_normal((3, 17, 24)).astype(np.float32)
    statistics = InputStatistics.empty(24, second_moments=True)
    for sequence in x:
        statistics.add(sequence[None], "layers.0.qkv")
    flat = x.reshape(-1, 24)
    expected = [max(sorted(np.abs(row), reverse=True)[rank] for row in flat) for rank in range(24)]
    np.testing.assert_array_equal(statistics.rank_maximum, expected)
    assert_close(statistics.mean_square(), (flat.astype(np.float64) ** 2).mean(0), "rounding")
    assert_close(statistics.hessian, flat.T @ flat, "model")
    assert InputStatistics.empty(24).hessian is None
    np.testing.assert_array_equal(InputStatistics.empty(5).mean_square(), 0)
    assert statistics.rank_maximum.dtype == statistics.mean_square().dtype == np.float32
    assert statistics.rank_maximum[0] == np.abs(x).max()
    assert (np.diff(statistics.rank_maximum) <= 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_activations_that_are_no_numbers_are_refused(bad: float) -> None:
    x = np.zeros((4, 8), np.float32)
    x[2, 3] = bad
    with pytest.raises(QuantizationError, match=r"before layers\.1\.o"):
        InputStatistics.empty(8).add(x, "layers.1.o")


def test_stored_statistics_are_those_of_the_calibration_text(tmp_path: Path) -> None:
    folder, store = write_checkpoint(tmp_path / "source"), Store(tmp_path / "store")
    quantize(folder, store, Recipe(bits=3, group_size=32), name="small", calibration=TEXT)
    checkpoint = Checkpoint.open(folder)
    seen: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    oracle = Oracle(checkpoint, observe_keys=lambda layer, q, k: seen.setdefault(layer, []).append((q, k)))
    text = token_windows(folder, checkpoint.spec, TEXT, calibration_limit("rtn"), "calibration", spread=True)
    for tokens in text:
        oracle.logits(tokens)
    for layer, batches in seen.items():
        found = store.open("small").key_statistics(layer)
        assert found is not None
        keys = torch.cat([k.transpose(1, 2).flatten(0, 1) for _, k in batches])  # [tokens, H_kv, D]
        assert_close(found.mean, keys.double().mean(0), "float32")
        queries = torch.cat([q.transpose(1, 2).flatten(0, 1) for q, _ in batches])  # [tokens, H, D]
        share = checkpoint.spec.num_heads // checkpoint.spec.num_kv_heads
        for head, axis in enumerate(found.axis):
            mine = queries[:, head * share : (head + 1) * share].flatten(0, 1).double()
            assert np.linalg.norm(axis) == pytest.approx(1, abs=1e-5)
            along = float((mine @ torch.tensor(axis).double()).square().sum())
            assert along == pytest.approx(float(torch.linalg.eigvalsh(mine.T @ mine)[-1]), rel=1e-4)


def test_without_a_calibration_text_nothing_is_stored(tmp_path: Path) -> None:
    folder, store = write_checkpoint(tmp_path / "source"), Store(tmp_path / "store")
    quantize(
        folder, store, Recipe(bits=4, method="rtn", group_size=32, residual_bits=0), name="plain", calibration=None
    )
    assert store.open("plain").key_statistics(0) is None


def test_a_broken_checkpoint_is_named(tmp_path: Path) -> None:
    spec = Checkpoint.open(write_checkpoint(tmp_path / "source")).spec
    moments = KeyMoments(spec, 1)
    assert moments.tensors() == {}
    q, k = torch.ones(1, spec.num_heads, 3, spec.head_dim), torch.ones(1, spec.num_kv_heads, 3, spec.head_dim)
    moments.observe(1, q, k)
    assert sorted(moments.tensors()) == sorted(tensor_names(1))
    moments.observe(1, q * torch.inf, k)
    with pytest.raises(QuantizationError, match=r"keys or queries of layers\.1"):
        moments.tensors()


def test_the_largest_of_every_chunk_are_left_out() -> None:
    x = np.random.default_rng(0).standard_normal((5, 1500)).astype(np.float32)
    assert without_salient(x, 0) is x
    left = without_salient(x, 20)
    for row, kept in zip(x, left, strict=True):
        for start, stop in ((0, SALIENT_CHUNK), (SALIENT_CHUNK, 1500)):
            count = -(-(stop - start) * 20 // SALIENT_CHUNK)
            order = np.argsort(-np.abs(row[start:stop]), kind="stable")
            assert not kept[start:stop][order[:count]].any()
            np.testing.assert_array_equal(kept[start:stop][order[count:]], row[start:stop][order[count:]])


def test_narrow_matrices_give_at_least_one() -> None:
    for width in (1, 8, 31):
        x = np.arange(1, width + 1, dtype=np.float32)[None]
        np.testing.assert_array_equal(without_salient(x, 1), np.where(x == width, 0, x))


def planted(seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Correlated inputs [4096, 128] of which some channels are always salient, and weights [64, 128]."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((4096, 12)) @ rng.standard_normal((12, 128))).astype(np.float32)
    x += 0.1 * rng.standard_normal(x.shape).astype(np.float32)
    x *= np.exp(rng.standard_normal(128)).astype(np.float32)
    x[:, 7] += 60 * np.abs(x[:, 7]).mean()
    return x, rng.standard_normal((64, 128)).astype(np.float32)


def test_no_level_of_compensation_is_worse_than_plain_rounding() -> None:
    """Where a base that looks at all inputs alone, or at what is left of them alone, is far worse at the other."""
    x, weight = planted()
    train, held_out = x[:3072], x[3072:]

    def errors(base: np.ndarray) -> np.ndarray:
        outputs = [without_salient(held_out, k_chunk) @ (weight - base).T for k_chunk in levels(128)]
        return np.array([float(np.square(y).sum()) for y in outputs])

    def fed_back(hessian: np.ndarray | None) -> np.ndarray:
        assert hessian is not None
        return errors(gptq.quantize(weight, 3, 128, gptq.feedback(hessian)).dequantize())

    plain = errors(rtn(weight, 3, 128).dequantize())
    everything, alone = fed_back(train.T @ train), without_salient(train, 128)
    statistics = InputStatistics.empty(128, second_moments=True, expected_k_chunk=128)
    statistics.add(train, "layers.0.o")
    ours = fed_back(statistics.hessian)
    assert (ours < plain).all()
    assert (np.diff(ours) < 0).all()
    assert ours[-1] < everything[-1]
    assert ours[0] < fed_back(alone.T @ alone)[0]


def test_second_moments_are_those_of_every_level() -> None:
    x = np.random.default_rng(2).standard_normal((64, 32)).astype(np.float32)
    counts = np.random.default_rng(3).random(64).astype(np.float32)
    plain, expecting = (InputStatistics.empty(32, second_moments=True, expected_k_chunk=k) for k in (0, 64))
    for statistics in (plain, expecting):
        statistics.add(x, "layers.0.o", counts)
    np.testing.assert_array_equal(plain.mean_square(), expecting.mean_square())
    np.testing.assert_array_equal(plain.rank_maximum, expecting.rank_maximum)
    assert levels(64) == (0, 16, 64)
    left = [np.sqrt(counts)[:, None] * without_salient(x, k_chunk).astype(np.float64) for k_chunk in (0, 16, 64)]
    total = float(np.square(left[0]).sum())
    assert_close(expecting.hessian, sum(each.T @ each * total / np.square(each).sum() for each in left), "sums")
    assert_close(plain.hessian, left[0].T @ left[0], "sums")
    restored = np.square(left[0]).sum(0) - np.square(left[-1]).sum(0)
    found = expecting.restored()
    assert found is not None
    assert_close(found, restored / restored.mean() + 0.1, "rounding")
    assert plain.restored() is None
    assert callable(quantizer("gptq", hessian=expecting.hessian))


def test_residual_scales_are_those_of_what_is_restored() -> None:
    """A large residual in a column that is never chosen does not widen the scale of those that are."""
    _, weight = planted()
    residual = weight * 0.01
    residual[:, 3] *= 30
    importance = np.where(np.arange(128) == 3, 0.1, 1.1).astype(np.float32)
    alike, weighed = (quantize_residual(residual, 4, each).dequantize() for each in (None, importance))
    others = np.arange(128) != 3
    assert np.square(weighed - residual)[:, others].sum() < 0.5 * np.square(alike - residual)[:, others].sum()

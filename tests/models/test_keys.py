"""Statistics of a block's keys and queries, gathered while a model is quantized."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from models.checkpoint import Checkpoint
from models.errors import QuantizationError
from models.keys import tensor_names
from models.oracle import Oracle
from models.quantize import quantize
from models.quantize.keys import KeyMoments
from models.quantize.text import calibration_limit, token_windows
from models.recipe import Recipe
from models.store import Store
from tests.close import assert_close


def test_stored_statistics_are_those_of_the_calibration_text(
    tmp_path: Path, checkpoint_maker: Callable[..., Path], short_text: str
) -> None:
    folder, store = checkpoint_maker(tmp_path / "source"), Store(tmp_path / "store")
    quantize(folder, store, Recipe(bits=3, group_size=32), name="small", calibration=short_text)
    checkpoint = Checkpoint.open(folder)
    seen: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    oracle = Oracle(checkpoint, observe_keys=lambda layer, q, k: seen.setdefault(layer, []).append((q, k)))
    text = token_windows(folder, checkpoint.spec, short_text, calibration_limit("rtn"), "calibration", spread=True)
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


def test_without_a_calibration_text_nothing_is_stored(
    tmp_path: Path, checkpoint_maker: Callable[..., Path], short_text: str
) -> None:
    folder, store = checkpoint_maker(tmp_path / "source"), Store(tmp_path / "store")
    quantize(
        folder, store, Recipe(bits=4, method="rtn", group_size=32, residual_bits=0), name="plain", calibration=None
    )
    assert store.open("plain").key_statistics(0) is None


def test_a_broken_checkpoint_is_named(tmp_path: Path, checkpoint_maker: Callable[..., Path]) -> None:
    spec = Checkpoint.open(checkpoint_maker(tmp_path / "source")).spec
    moments = KeyMoments(spec, 1)
    assert moments.tensors() == {}
    q, k = torch.ones(1, spec.num_heads, 3, spec.head_dim), torch.ones(1, spec.num_kv_heads, 3, spec.head_dim)
    moments.observe(1, q, k)
    assert sorted(moments.tensors()) == sorted(tensor_names(1))
    moments.observe(1, q * torch.inf, k)
    with pytest.raises(QuantizationError, match=r"keys or queries of layers\.1"):
        moments.tensors()

"""Attention on the GPU over every kind of cache, where it is hardest: a real model's numbers, and a long past.

Two bounds for each case. Against the cache's own numbers, read back in float32, what the kernel adds: numbers and
weights rounded to half precision. Against the exact numbers, what the kind of cache adds, as a share of the output's
root mean square: `LIMITS`, about half as much again as was measured.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.quantize import quantize as quantize_model
from models.recipe import Recipe
from models.store import Store
from runtime.backends.decoder import DecoderOptions, Step
from runtime.backends.operations import layers as reference
from runtime.backends.reference.decoder import ReferenceDecoder
from runtime.backends.triton.kernels import attention as kernels
from runtime.backends.triton.kernels.attention import launch_config
from runtime.kv.kinds import KINDS, PARTS, KVKind
from runtime.text.tokenizer import Tokenizer
from tests.grid import QUICK_CACHES, grid
from tests.runtime.backends.triton.test_cache_triton import ROWS, Pair
from tests.runtime.conftest import make_spec

KERNEL = 4e-3
"""What the kernel may add: 2^-11 for each of value, weight and output, of values of size 1."""


def rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


def errors(
    kv: KVKind,
    history: torch.Tensor,
    q: torch.Tensor,
    device: str,
    *,
    context: int,
    window: int | None = None,
    rows: int = ROWS,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the last queries [M, H, D] behind keys and values [2, T, H_kv, D]: kernel less float32 over what the cache
    reads back, kernel less exact, and exact."""
    (_, _, H_kv, D), (M, H, _) = history.shape, q.shape
    spec = make_spec(num_layers=1, num_heads=H, num_kv_heads=H_kv, head_dim=D)
    caches = Pair(spec, kv, device, context=context, rows=rows)
    slots, positions = caches.read(history, M)
    found, expected = caches.attended(slots, positions, window, q=q)
    exact = reference.attend(q.half().float(), *history, torch.from_numpy(positions).long(), window)
    return found - expected, found - exact, exact


LENGTH = 300
"""No multiple of a page."""
LIMITS: dict[KVKind, float] = {
    "fp16": 3e-3, "int8": 0.021, "hierarchical": 0.016, "int4": 0.33, "kcvt4": 0.15, "gear-l4": 0.11, "gear4": 0.05,
    "kivi2": 0.35, "gear-l2": 0.36, "gear2": 0.48,
}  # fmt: skip


@pytest.fixture(scope="module")
def attended(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Queries [300, H, D], and keys and values [2, 300, H_kv, D], of two layers of a real model that reads a text."""
    words = (shared_data / "text/tinystories.txt").read_text()[:4000]
    store = Store(tmp_path_factory.mktemp("store"))
    recipe = Recipe(bits=4, residual_bits=4, group_size=32)
    quantize_model(shared_data / "models/english3m", store, recipe, name="small", calibration=words)
    model = store.open("small")
    tokens = Tokenizer(model.tokenizer_path).encode(words)[:LENGTH]
    rows = np.arange(LENGTH, dtype=np.int32)
    decoder = ReferenceDecoder(model, DecoderOptions(context=LENGTH, max_rows=LENGTH))
    queries: list[torch.Tensor] = []
    attend = decoder.cache.attend

    def watched(layer: int, q: torch.Tensor, *rest: Any, **how: Any) -> torch.Tensor:
        queries.append(q.clone())
        return attend(layer, q, *rest, **how)

    step = Step(tokens=np.array(tokens, np.int32), slots=np.zeros_like(rows), positions=rows, logit_rows=rows[:1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder.cache, "attend", watched)
        decoder.forward(step)
    read = decoder.cache.read
    return [
        (queries[layer], torch.stack([read(part, layer, 0) for part in PARTS]).clone())
        for layer in (0, model.spec.num_layers - 1)
    ]


@pytest.mark.data
@pytest.mark.parametrize("kv", grid(KINDS, QUICK_CACHES))
def test_errors_on_a_real_model_are_bounded(
    device: str, kv: KVKind, attended: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    share = 0.0
    for queries, history in attended:
        kernel, whole, exact = errors(kv, history, queries[-2:], device, context=400)
        assert kernel.abs().max() <= 4 * KERNEL * max(1.0, rms(exact))
        share = max(share, rms(whole) / rms(exact))
    assert share <= LIMITS[kv]


LONG, SEEN = 65536, 1024


def far(kv: KVKind, device: str, window: int | None) -> float:
    """Largest error at the end of 64k tokens whose values rise with their positions, so that every block counts."""
    x = torch.randn(2, LONG, 1, 8, generator=torch.Generator().manual_seed(0))
    x[1] = 0.1 * x[1] + (torch.arange(LONG) / LONG)[:, None, None]
    q = torch.randn(1, 1, 8, generator=torch.Generator().manual_seed(1))
    kernel, _, exact = errors(kv, x, q, device, context=LONG, window=window, rows=4096)
    assert exact.abs().min() > 0.3
    return float(kernel.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("kv", sorted(QUICK_CACHES))
def test_the_end_of_sixty_four_thousand_tokens(device: str, kv: KVKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last thousand of them: the interpreter takes a minute for all, so that is done for one kind."""
    monkeypatch.setattr(kernels, "launch_config", lambda *shape, **how: replace(launch_config(*shape, **how), splits=3))
    assert far(kv, device, SEEN) <= 2e-3


@pytest.mark.slow
def test_all_of_sixty_four_thousand_tokens(device: str) -> None:
    assert far("int4", device, None) <= 2e-3

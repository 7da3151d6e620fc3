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
from runtime.backends.reference.cache import ReferenceCache
from runtime.backends.reference.decoder import ReferenceDecoder
from runtime.backends.triton.kernels import attention as kernels
from runtime.backends.triton.kernels.attention import launch_config
from runtime.backends.triton.kernels.cache import LayerPages, Rows
from runtime.backends.triton.workspace import Workspace
from runtime.kv.kinds import KINDS, PARTS, KVKind
from runtime.text.tokenizer import Tokenizer
from tests.grid import QUICK_CACHES, grid
from tests.runtime.conftest import make_spec

KERNEL = 4e-3
"""What the kernel may add: 2^-11 for each of value, weight and output, of values of size 1."""


def rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


class Written:
    """One layer's keys and values [2, T, H_kv, D] of each slot, exact and in a cache."""

    def __init__(
        self, kv: KVKind, histories: list[torch.Tensor], device: str, *, context: int, rows: int = 128
    ) -> None:
        self.histories, self.device, self.context = histories, device, context
        _, _, H_kv, D = histories[0].shape
        spec = make_spec(num_layers=1, num_heads=H_kv, num_kv_heads=H_kv, head_dim=D)
        self.cache = ReferenceCache(KINDS[kv], spec, context=context, slots=len(histories), max_rows=rows)
        for slot, history in enumerate(histories):
            for start in range(0, history.shape[1], rows):
                x = history[:, start : start + rows]
                positions = torch.arange(start, start + x.shape[1])
                slots = torch.full_like(positions, slot)
                self.cache.begin(slots.int().numpy(), positions.int().numpy())
                self.cache.append(0, slots, positions, *x)

    def pages(self) -> LayerPages:
        """The cache as the GPU's kernels read it: the bytes are the same."""
        cache, device = self.cache, self.device
        store, paged = cache.store, [cache.paged_length(slot) for slot in range(len(self.histories))]
        _, _, H_kv, D = self.histories[0].shape
        return LayerPages(
            kind=cache.kind,
            head_dim=D,
            kv_heads=H_kv,
            layers=1,
            pools={part: store.pools[part][:, 0].to(device) for part in PARTS},
            windows={part: store.windows[part][:, 0].to(device) for part in PARTS},
            tables=torch.from_numpy(cache.table.tables).to(device),
            paged=torch.tensor(paged, dtype=torch.int32, device=device),
        )

    def errors(
        self, q: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, window: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Kernel less float32 over what the cache reads back; kernel less exact; exact. q float32 [M, H, D]."""
        M, H, D = q.shape
        q = q.half()
        x = torch.full((M, H * D), torch.nan, dtype=torch.float16, device=self.device)
        rows = Rows(*(each.to(torch.int32).to(self.device) for each in (positions, slots)))
        flat = q.reshape(M, H * D).to(self.device)
        kernels.attend(flat, self.pages(), rows, window, x, Workspace(self.device), context=self.context)
        found = x.cpu().float().view(M, H, D)
        exact = torch.empty(M, H, D)
        for slot, history in enumerate(self.histories):
            own = slots == slot
            exact[own] = reference.attend(q[own].float(), *history, positions[own], window)
        return found - self.cache.attend(0, q.float(), slots, positions, window), found - exact, exact


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
    slots, positions = torch.zeros(2, dtype=torch.long), torch.tensor([LENGTH - 2, LENGTH - 1])
    share = 0.0
    for queries, history in attended:
        kernel, whole, exact = Written(kv, [history], device, context=400).errors(queries[positions], slots, positions)
        assert kernel.abs().max() <= 4 * KERNEL * max(1.0, rms(exact))
        share = max(share, rms(whole) / rms(exact))
    assert share <= LIMITS[kv]


LONG, SEEN = 65536, 1024


def far(kv: KVKind, device: str, window: int | None) -> float:
    """Largest error at the end of 64k tokens whose values rise with their positions, so that every block counts."""
    x = torch.randn(2, LONG, 1, 8, generator=torch.Generator().manual_seed(0))
    x[1] = 0.1 * x[1] + (torch.arange(LONG) / LONG)[:, None, None]
    written = Written(kv, [x], device, context=LONG, rows=4096)
    q = torch.randn(1, 1, 8, generator=torch.Generator().manual_seed(1))
    kernel, _, exact = written.errors(q, torch.zeros(1, dtype=torch.long), torch.tensor([LONG - 1]), window)
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

"""Keys and values of real models: the error of each kind, and the gain of GEAR's corrections."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from models.spec import ModelSpec
from runtime.backends.decoder import DecoderOptions, Step
from runtime.backends.operations.pages import dequantize_page, low_rank_product, quantize_page
from runtime.backends.reference.decoder import ReferenceDecoder
from runtime.kv.kinds import KINDS, PARTS, KVKind, Part
from runtime.text.tokenizer import Tokenizer
from tests.runtime.real import opened

pytestmark = pytest.mark.data
TOKENS = 256


@dataclass(frozen=True)
class Cached:
    """What a model put into its cache for a text: pages [layers, pages, H_kv, 128, D] of keys and of values."""

    spec: ModelSpec
    pages: dict[Part, torch.Tensor]

    def error(self, name: KVKind, part: Part, *, draft: bool = False) -> float:
        """Relative, root mean square."""
        x, kind = self.pages[part], KINDS[name]
        back = dequantize_page(kind, part, quantize_page(kind, part, x), self.spec.head_dim, draft=draft)
        return float((back - x).norm() / x.norm())


@pytest.fixture(scope="module", params=["demo", "babyllama105"])
def cached(request: pytest.FixtureRequest, shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Cached:
    """The bundled model has heads of 64 channels, the other of 16."""
    model, words = opened(request.param, shared_data, tmp_path_factory)
    tokens = Tokenizer(model.tokenizer_path).encode(words)[:TOKENS]
    decoder = ReferenceDecoder(model, DecoderOptions(context=TOKENS, max_rows=TOKENS))
    rows = np.arange(TOKENS, dtype=np.int32)
    decoder.forward(
        Step(tokens=np.array(tokens, np.int32), slots=np.zeros_like(rows), positions=rows, logit_rows=rows[:1])
    )
    pages: dict[Part, torch.Tensor] = {}
    for part in PARTS:
        x = torch.stack([decoder.cache.read(part, layer, 0) for layer in range(model.spec.num_layers)])
        pages[part] = x.unflatten(1, (-1, 128)).transpose(2, 3)
    return Cached(spec=model.spec, pages=pages)


@pytest.mark.parametrize("part", PARTS)
def test_errors_of_real_keys_and_values_are_bounded(cached: Cached, part: Part) -> None:
    limits: dict[KVKind, float] = {"fp16": 3e-4, "int8": 0.012, "hierarchical": 0.008, "int4": 0.15, "kcvt4": 0.11}
    for name, limit in limits.items():
        assert cached.error(name, part) < limit
    assert cached.error("hierarchical", part) < 0.1 * cached.error("hierarchical", part, draft=True) < 0.011


@pytest.mark.parametrize("names", [("kcvt4", "gear-l4", "gear4"), ("kivi2", "gear-l2", "gear2")], ids=["4", "2"])
@pytest.mark.parametrize("part", PARTS)
def test_gear_lowers_the_error_step_by_step(cached: Cached, names: tuple[KVKind, ...], part: Part) -> None:
    errors = [cached.error(name, part) for name in names]
    assert errors[0] > 1.05 * errors[1]
    assert errors[1] > 1.02 * errors[2]


@pytest.mark.parametrize("name", ["gear-l4", "gear-l2"])
@pytest.mark.parametrize("part", PARTS)
def test_power_iteration_is_within_five_percent_of_the_svd(cached: Cached, name: KVKind, part: Part) -> None:
    kind, x = KINDS[name], cached.pages[part].half().float()
    stored = quantize_page(kind, part, x)
    backbone = {field: array for field, array in stored.items() if field not in ("a", "b")}
    residual = x - dequantize_page(kind, part, backbone, cached.spec.head_dim)
    more = (1 + kind.alike(part)) ** 0.5 - 1  # both in the metric that the correction is made for
    left, residual = (
        y + more * y.mean(-1, keepdim=True) for y in (residual - low_rank_product(stored["a"], stored["b"]), residual)
    )
    found = left.flatten(-2).norm(dim=-1)
    best = torch.linalg.svdvals(residual)[..., kind.rank :].norm(dim=-1)
    assert float((found / best).max()) < 1.05

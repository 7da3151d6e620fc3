"""Products with the source's own weights: against float64, row by row the same bits, and whole models against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from models.oracle import Oracle
from models.spec import MixtureSpec
from runtime.backends.cpu.decoder import CpuDecoder
from runtime.backends.cpu.tiles import Arena, tile_exact
from runtime.backends.decoder import DecoderOptions, Step
from runtime.errors import RequestError
from tests.runtime.conftest import BEHIND, BOTH_SIDES, LATENTS, SHARED, SINKS, TinyModel, make_model, make_spec

TYPES = {"f16": np.float16, "bf16": np.uint16, "f32": np.float32}


def bits_of(weight: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    """A weight in a type, as `SourceWeights` gives it."""
    return (weight.view(np.uint32) >> 16).astype(np.uint16) if kind == "bf16" else weight.astype(TYPES[kind])


def values_of(stored: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The numbers that it stands for, float32."""
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


class Source:
    """The weights that a tiny model was rounded from, in a type."""

    def __init__(self, model: TinyModel, kind: str) -> None:
        self.model, self.spec, self._kind = model, model.spec, kind

    def matrix(self, name: str) -> np.ndarray[Any, Any]:
        return bits_of(self.model.full[name], self._kind)

    # What an oracle asks for

    def linear(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        bias = self.model.linears[name].bias
        return torch.from_numpy(values_of(self.matrix(name))), None if bias is None else torch.from_numpy(bias)

    def vector(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self.model.vectors[name])

    def embedding(self) -> torch.Tensor:
        return torch.from_numpy(self.model.table)

    def token_rows(self, tokens: torch.Tensor, layer: int) -> torch.Tensor:
        P = self.spec.token_width
        return torch.from_numpy(self.model.tokens)[tokens, layer * P : (layer + 1) * P].float()


@pytest.mark.parametrize("kind", TYPES)
def test_tiles_hold_every_weight_once(kind: str) -> None:
    weight = bits_of(np.random.default_rng(0).standard_normal((41, 70), np.float32), kind)
    tiles = tile_exact(weight, Arena())
    wide = tiles.transpose(0, 2, 1, 3).reshape(48, 96)
    assert np.array_equal(wide[:41, :70], weight)
    assert not wide[41:].any()
    assert not wide[:, 70:].any()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [*((kind, {}) for kind in TYPES), *(("bf16", each) for each in (BOTH_SIDES, SINKS, BEHIND, SHARED, LATENTS))],
    ids=str,
)
def test_a_model_computes_as_its_source(kind: str, changes: dict[str, Any]) -> None:
    """A prompt in two steps, then single rows and several: those of one row have the same bits as among others."""
    model = make_model(make_spec(**changes), bits=3, residual_bits=4)
    source, tokens = Source(model, kind), np.random.default_rng(5).integers(0, 96, 60)
    own = Oracle(source).logits(torch.from_numpy(tokens[None]))[0].float().numpy()
    decoder = CpuDecoder(model, DecoderOptions(kv="fp16", context=80, max_rows=40, exact=source))
    found = [decoder.forward(Step.of(tokens[:37], 0, prefill=True)).copy()]
    found += [decoder.forward(Step.of(tokens[37:39], 37, prefill=True)).copy()]
    found += [decoder.forward(Step.of([token], 39 + i)).copy() for i, token in enumerate(tokens[39:46])]
    found += [decoder.forward(Step.of(tokens[46:], 46)).copy()]
    error = np.abs(np.concatenate(found) - own).max() / own.std()
    assert error < 0.01, "an fp16 cache rounds keys and values"
    together = decoder.forward(Step.of(tokens[39:46], 39))
    assert np.array_equal(together, np.concatenate(found[2:9]))
    rough = decoder.forward(Step.of(tokens[46:], 46, draft=True))
    assert np.abs(rough - own[46:]).max() / own.std() > 0.1, "drafts are made of low-bit weights"


def test_experts_are_refused() -> None:
    model = make_model(make_spec(mixture=MixtureSpec(experts=4, chosen=2, width=32, normalized=True)))
    with pytest.raises(RequestError, match="experts"):
        CpuDecoder(model, DecoderOptions(context=32, exact=Source(model, "f32")))

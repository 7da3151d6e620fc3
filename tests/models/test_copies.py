"""Losses of layer types, measured while a model is quantized, against models put together by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models.checkpoint import Checkpoint
from models.errors import StoreError
from models.losses import TypeLosses
from models.oracle import Oracle
from models.quantize import copies, quantize
from models.quantize.text import CALIBRATION_TOKENS, token_windows
from models.quantizers.dequantize import dequantize, dequantize_residual
from models.recipe import Recipe
from models.spec import LAYER_TYPES
from models.store import Store, StoredModel, layout
from tests.models.conftest import TEXT, write_checkpoint


class OneTypeLow:
    """A checkpoint's weights, those of one layer type low-bit."""

    def __init__(self, checkpoint: Checkpoint, model: StoredModel, kind: str, *, whole: bool = False) -> None:
        self.checkpoint, self.model, self.kind, self.whole = checkpoint, model, kind, whole
        self.spec = replace(checkpoint.spec, tied=False)

    def vector(self, name: str) -> torch.Tensor:
        return self.checkpoint.vector(name)

    def linear(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight, bias = self.checkpoint.linear(name)
        if name.rpartition(".")[2] != self.kind:
            return weight, bias
        linear = self.model.linear(name)
        low = dequantize(linear)
        if self.whole:
            assert linear.residual is not None
            low = low + dequantize_residual(linear.residual, linear.shape).T
        return torch.from_numpy(low), bias

    def embedding(self) -> torch.Tensor:
        return self.checkpoint.embedding()


def divergence(full: torch.Tensor, low: torch.Tensor) -> float:
    full, low = full.double().log_softmax(-1), low.double().log_softmax(-1)
    return float((full.exp() * (full - low)).sum(-1).mean())


@pytest.mark.parametrize("options", [{}, {"family": "qwen2", "tied": False}], ids=["tied", "biases"])
def test_losses_are_those_of_models_put_together_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    monkeypatch.setattr(copies, "K_CHUNKS", (0, 1024))
    folder = write_checkpoint(tmp_path / "source", dtype=torch.float32, **options)
    store = Store(tmp_path / "store")
    info = quantize(folder, store, Recipe(bits=3, group_size=32), calibration=TEXT)
    model, checkpoint = store.open(info.name), Checkpoint.open(folder)
    found = model.losses
    assert found is not None
    assert set(found.nats) == {*LAYER_TYPES, "head"}
    windows = token_windows(info.path, model.spec, TEXT, CALIBRATION_TOKENS, "calibration", spread=True)
    sequences = [sequence for window in windows for sequence in window if len(sequence) >= copies.LENGTH]
    wanted = min(len(sequences), copies.TOKENS // copies.LENGTH)
    chosen = [sequences[index * len(sequences) // wanted][: copies.LENGTH] for index in range(wanted)]
    tokens = torch.stack(chosen)
    assert found.tokens == tokens.numel()
    full = Oracle(checkpoint).logits(tokens)
    for kind, nats in found.nats.items():
        for whole, measured in zip((False, True), nats, strict=True):
            by_hand = divergence(full, Oracle(OneTypeLow(checkpoint, model, kind, whole=whole)).logits(tokens))
            assert measured == pytest.approx(by_hand, rel=0.01, abs=2e-6), (kind, whole)
        assert nats[0] > 10 * nats[1]


@pytest.mark.parametrize("method", ["awq", "squeezellm"])
@pytest.mark.parametrize("residual_bits", [4, 16])
def test_methods_that_change_the_block_are_compared_with_what_it_became(
    tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, method: str, residual_bits: int
) -> None:
    monkeypatch.setattr(copies, "K_CHUNKS", (0, 1024))
    store = Store(tmp_path / "store")
    recipe = Recipe(method=method, bits=3, group_size=32, residual_bits=residual_bits)
    found = store.open(quantize(tiny_checkpoint, store, recipe, calibration=TEXT).name).losses
    assert found is not None
    for nats in found.nats.values():
        assert nats[1] < nats[0] / (1000 if residual_bits == 16 else 5)


def test_more_channels_lose_less_and_a_damaged_file_is_named(tmp_path: Path, tiny_checkpoint: Path) -> None:
    store = Store(tmp_path / "store")
    info = quantize(tiny_checkpoint, store, Recipe(bits=3, group_size=32), calibration=TEXT)
    found = store.open(info.name).losses
    assert found is not None
    assert found.k_chunk == copies.K_CHUNKS
    for nats in found.nats.values():
        assert nats[0] > nats[-1] > 0
    damaged = store.open(info.name)
    (info.path / layout.LOSSES).write_text("[]")
    with pytest.raises(StoreError, match=r"losses\.json is damaged .* quantize the model again"):
        _ = damaged.losses


def test_there_are_none_without_residuals(tmp_path: Path, tiny_checkpoint: Path) -> None:
    store = Store(tmp_path / "store")
    info = quantize(tiny_checkpoint, store, Recipe(group_size=32, residual_bits=0), calibration=TEXT)
    assert store.open(info.name).losses is None
    assert not (info.path / layout.LOSSES).exists()


def test_wide_models_use_fewer_tokens(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint)
    windows = [torch.arange(256).remainder(90).repeat(4, 1)]
    count = 1 + len(LAYER_TYPES) * len(copies.K_CHUNKS)
    assert [states.shape for states in copies.start(checkpoint, windows)] == [(count, copies.LENGTH, 64)] * 4
    monkeypatch.setattr(copies, "STATES_BYTES", 4 * count * 64 * 75)
    assert sum(states.shape[1] for states in copies.start(checkpoint, windows)) == 2 * copies.LENGTH
    monkeypatch.setattr(copies, "STATES_BYTES", 4 * count * 64 * 20)
    assert [states.shape[1] for states in copies.start(checkpoint, windows)] == [20]
    assert copies.start(checkpoint, []) == []


LOSSES = TypeLosses(k_chunk=(0, 16), nats={"qkv": (0.5, 0.125)}, tokens=64)


def test_losses_survive_their_file_and_those_of_another_version_are_left_alone() -> None:
    assert TypeLosses.from_json(json.dumps(LOSSES.to_json()).encode()) == LOSSES
    assert TypeLosses.from_json(json.dumps({**LOSSES.to_json(), "version": 2}).encode()) is None


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"k_chunk": [4, 16]},
        {"k_chunk": [0, 0]},
        {"k_chunk": [0, 2000]},
        {"nats": {"qkv": [0.5]}},
        {"nats": {"qkv": [0.5, -1]}},
        {"nats": {"qkv": [0.5, float("nan")]}},
        {"nats": 3},
        {"tokens": 0},
        {"tokens": None},
    ],
)
def test_damaged_losses_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"loss|k_chunk"):
        TypeLosses.from_json(json.dumps({**LOSSES.to_json(), **change}).encode())

"""Allocation of bits to blocks: sensitivities compared with whole models, and the resulting choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.checkpoint import Checkpoint
from models.errors import QuantizationError
from models.oracle import Oracle
from models.quantize import allocation
from models.quantize.allocation import allocate, divergences, most_sensitive
from models.quantize.text import token_windows
from models.quantizers.groups import rtn
from models.recipe import Recipe
from tests.close import assert_close
from tests.models.conftest import spoil, write_checkpoint
from tests.models.random_models import random_case

CASES = ("llama-biases", "mistral-window", "qwen2-tied", "qwen3", "gemma2", "phi3-partial")


def windows(vocabulary: int, *shapes: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocabulary, shape, generator=generator) for shape in shapes]


class OneBlockAt3Bits:
    """A checkpoint's weights for the oracle with one block rounded to 3 bits."""

    def __init__(self, checkpoint: Checkpoint, layer: int | None, group_size: int) -> None:
        self.checkpoint, self.spec, self.layer, self.group_size = checkpoint, checkpoint.spec, layer, group_size
        self.vector, self.embedding = checkpoint.vector, checkpoint.embedding

    def linear(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight, bias = self.checkpoint.linear(name)
        if name.startswith(f"layers.{self.layer}."):
            weight = rounded(weight, 3, self.group_size)
        return weight, bias


def rounded(weight: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    return torch.from_numpy(rtn(weight.float().numpy(), bits, group_size).dequantize())


class MixedBlocks:
    """A checkpoint's weights for the oracle with blocks of different bits."""

    def __init__(self, checkpoint: Checkpoint, bits: tuple[int, ...]) -> None:
        self.checkpoint, self.spec, self.bits = checkpoint, checkpoint.spec, bits
        self.vector, self.embedding = checkpoint.vector, checkpoint.embedding

    def linear(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight, bias = self.checkpoint.linear(name)
        return (weight if name == "head" else rounded(weight, self.bits[int(name.split(".")[1])], 128)), bias


def loss(weights: Any, tokens: list[torch.Tensor]) -> float:
    oracle, total = Oracle(weights), 0.0
    for batch in tokens:
        logs = oracle.logits(batch).double().log_softmax(-1)[:, :-1]
        total -= float(logs.gather(2, batch[:, 1:, None]).sum())
    return total / sum(batch[:, 1:].numel() for batch in tokens)


def brute_force(checkpoint: Checkpoint, group_size: int, tokens: list[torch.Tensor]) -> np.ndarray:
    """Divergences from the whole model's logits, a model for every block."""

    def logs(layer: int | None) -> torch.Tensor:
        oracle = Oracle(OneBlockAt3Bits(checkpoint, layer, group_size))
        return torch.cat([oracle.logits(batch).double().log_softmax(-1).flatten(0, 1) for batch in tokens])

    full = logs(None)
    blocks = range(checkpoint.spec.num_layers)
    return np.array([float((full.exp() * (full - logs(layer))).sum(1).mean()) for layer in blocks])


@pytest.mark.parametrize("case", CASES)
def test_divergences_equal_those_of_whole_models(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_case(case).save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    monkeypatch.setattr(
        allocation, "_PIECE", 20 * checkpoint.spec.hidden_size
    )  # four pieces of the vocabulary, one ragged
    monkeypatch.setattr(allocation, "_BATCH", 2)
    tokens = windows(checkpoint.spec.vocab_size, (3, 16), (1, 7))
    shares: list[float] = []
    found = divergences(checkpoint, 32, tokens, shares.append)
    expected = brute_force(checkpoint, 32, tokens)
    assert expected.min() > 0.003
    assert_close(found, expected, "relative")
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)
    assert shares[0] > 0


def test_the_most_sensitive_blocks_get_4_bits_and_the_earlier_of_equals() -> None:
    assert most_sensitive([0.1, 0.4, 0.2, 0.3], 3.5) == (3, 4, 3, 4)
    assert most_sensitive([1.0, 2.0, 2.0, 2.0], 3.5) == (3, 4, 4, 3)
    assert most_sensitive([0.0, float("inf"), 5.0], 3.34) == (3, 4, 3)


@pytest.mark.parametrize(
    ("bits", "blocks", "large"),
    [(3.5, 32, 16), (3.5, 5, 3), (3.25, 8, 2), (3.3, 10, 3), (3.7, 10, 7), (3.01, 8, 0), (3.99, 8, 8), (3.9, 1, 1)],
)
def test_the_average_is_the_nearest_there_is(bits: float, blocks: int, large: int) -> None:
    found = most_sensitive(np.arange(blocks, dtype=np.float64), bits)
    assert found == (3,) * (blocks - large) + (4,) * large
    assert abs(sum(found) / blocks - bits) <= 0.5 / blocks + 1e-9


class OneLoudBlock:
    """A checkpoint in which all blocks but one add little to the hidden states."""

    def __init__(self, checkpoint: Checkpoint, layer: int) -> None:
        self.checkpoint, self.spec, self.layer = checkpoint, checkpoint.spec, layer
        self.vector, self.embedded, self.head_rows = checkpoint.vector, checkpoint.embedded, checkpoint.head_rows

    def linear(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight, bias = self.checkpoint.linear(name)
        quiet = name.endswith((".o", ".down")) and not name.startswith(f"layers.{self.layer}.")
        return (weight * 0.02 if quiet else weight), bias


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_a_block_made_sensitive_is_found(layer: int, tmp_path: Path) -> None:
    checkpoint: Any = OneLoudBlock(Checkpoint.open(write_checkpoint(tmp_path / "model", layers=4)), layer)
    found = allocate(checkpoint, Recipe(bits=3.25, group_size=64), windows(96, (4, 32)), lambda share: None)
    assert found == tuple(4 if block == layer else 3 for block in range(4))


def test_nothing_is_computed_where_all_blocks_are_alike(tiny_checkpoint: Path) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint)
    assert allocate(checkpoint, Recipe(bits=3.1), [], lambda share: pytest.fail("nothing to do")) == (3, 3)
    assert allocate(checkpoint, Recipe(bits=3.9), [], lambda share: pytest.fail("nothing to do")) == (4, 4)


def test_an_average_needs_a_text(tiny_checkpoint: Path) -> None:
    with pytest.raises(QuantizationError, match="needs a calibration text"):
        allocate(Checkpoint.open(tiny_checkpoint), Recipe(bits=3.5), [], lambda share: None)


def test_damaged_weights_are_reported(tmp_path: Path) -> None:
    folder = spoil(write_checkpoint(tmp_path / "model"), (5, 5))
    with pytest.raises(QuantizationError, match=r"layers\.1\.gate_up: .*NaN"):
        allocate(Checkpoint.open(folder), Recipe(bits=3.5), windows(96, (1, 8)), lambda share: None)


def test_overflow_counts_as_most_sensitive(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, real = Checkpoint.open(tiny_checkpoint), rtn

    def broken(weight: Any, bits: int, group_size: int) -> Any:
        found = real(weight, bits, group_size)
        if weight.shape[0] == 64 and np.array_equal(weight, checkpoint.linear("layers.1.o")[0].float().numpy()):
            found.scales[:] = np.inf
        return found

    monkeypatch.setattr(allocation, "rtn", broken)
    with np.errstate(invalid="ignore"):
        found = divergences(checkpoint, 32, windows(96, (1, 8)), lambda share: None)
    assert np.isfinite(found[0])
    assert found[1] == np.inf
    assert most_sensitive(found, 3.5) == (3, 4)


def test_tokens_are_bounded_and_from_all_over_the_text(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint)
    text = windows(96, (4, 16), (4, 16), (1, 9))
    bytes_of_a_token = 4 * 3 * 64
    monkeypatch.setattr(allocation, "STATES_BYTES", 40 * bytes_of_a_token)
    rows = [text[0][0], text[1][0]]  # two sequences of 16 fit into 40 tokens
    expected = brute_force(checkpoint, 32, [row[None] for row in rows])
    assert_close(divergences(checkpoint, 32, text, lambda share: None), expected, "relative")
    monkeypatch.setattr(allocation, "STATES_BYTES", 1 << 30)
    monkeypatch.setattr(allocation, "MAX_WORK", 0)
    monkeypatch.setattr(allocation, "ENOUGH_TOKENS", 40)
    assert_close(divergences(checkpoint, 32, text, lambda share: None), expected, "relative")
    monkeypatch.setattr(allocation, "STATES_BYTES", 0)
    expected = brute_force(checkpoint, 32, [text[0][:1, :16]])
    assert_close(divergences(checkpoint, 32, text, lambda share: None), expected, "relative")


@pytest.mark.data
@pytest.mark.parametrize(
    ("bits", "expected"), [(3.25, (4, 3, 3, 3)), (3.5, (4, 3, 3, 4)), (3.75, (4, 3, 4, 4))], ids=str
)
def test_a_real_model(bits: float, expected: tuple[int, ...], shared_data: Path) -> None:
    folder = shared_data / "models" / "english3m"
    checkpoint = Checkpoint.open(folder)
    text = (Path(__file__).parents[2] / "assets/text/calibration.md").read_text(encoding="utf-8")
    tokens = token_windows(folder, checkpoint.spec, text, 2048, "calibration", spread=True)
    assert allocate(checkpoint, Recipe(bits=bits), tokens, lambda share: None) == expected


@pytest.mark.data
@pytest.mark.parametrize(
    ("model", "text", "least"),
    [("english3m", "wikitext2-test.txt", 0.005), ("babyllama105", "tinystories.txt", 0.05)],
    ids=["english3m", "babyllama105"],
)
def test_the_choice_costs_less_than_its_opposite(model: str, text: str, least: float, shared_data: Path) -> None:
    folder = shared_data / "models" / model
    checkpoint = Checkpoint.open(folder)
    calibration = (Path(__file__).parents[2] / "assets/text/calibration.md").read_text(encoding="utf-8")
    evaluation = (shared_data / "text" / text).read_text(encoding="utf-8")[:40000]
    tokens = token_windows(folder, checkpoint.spec, calibration, 2048, "calibration", spread=True)
    found = divergences(checkpoint, 128, tokens, lambda share: None)
    unseen = token_windows(folder, checkpoint.spec, evaluation, 3000, "evaluation")
    chosen, opposite = (loss(MixedBlocks(checkpoint, most_sensitive(sign * found, 3.5)), unseen) for sign in (1, -1))
    assert chosen < opposite - least

"""Steps of decoders, and the reference decoder as the GPU's are compared with it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from runtime.backends.decoder import CompensationMode, DecoderOptions, Step
from runtime.backends.reference.decoder import ReferenceDecoder
from runtime.backends.reference.linear import ReferenceLinear
from runtime.backends.triton.decoder import TritonDecoder
from runtime.kv.kinds import KINDS
from tests.close import Tolerance, assert_close

SMALL = {
    "hidden_size": 32, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32,
    "vocab_size": 64,
}  # fmt: skip
"""As small as the kernels' tiles: the interpreter takes a tenth of a second for a program of a product."""
LOGITS = 1e-2
"""Half-precision inputs are rounded from float32 sums in another order, so some differ in the last bit, 2^-11.

What the reference keeps in float32 (queries, attention's output before it is rounded) differs by as much. Through two
blocks that stays under 0.5 % of the logits' spread; a wrong mask, rotation or scale is off by the spread."""


def step(tokens: Any, start: int, *, rows: Any = None, **how: Any) -> Step:
    """Rows of one slot at consecutive positions; the logits of the last unless `rows` names some."""
    return Step.of(tokens, start, [len(tokens) - 1] if rows is None else rows, **how)


def text(count: int) -> list[int]:
    """Tokens of a prompt."""
    return [(7 * i) % 61 for i in range(count)]


class HalfLinear(ReferenceLinear):
    """The reference's layer as the GPU sees it: its input rounded to half precision."""

    def __init__(self, inner: ReferenceLinear) -> None:
        self.__dict__.update(inner.__dict__)

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, *, way: CompensationMode, draft: bool = False
    ) -> torch.Tensor:
        return super().__call__(x.half().float(), positions, way=way, draft=draft)


def reference(model: Any, options: DecoderOptions) -> ReferenceDecoder:
    decoder = ReferenceDecoder(model, options)
    decoder.linears = {name: HalfLinear(linear) for name, linear in decoder.linears.items()}
    return decoder


def both(model: Any, options: DecoderOptions, device: str) -> tuple[TritonDecoder, ReferenceDecoder]:
    return TritonDecoder(model, options, device), reference(model, options)


def assert_logits(found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any], share: float = LOGITS) -> None:
    """Within a share of the logits' spread."""
    assert found.shape == wanted.shape
    if wanted.size:
        spread = Tolerance(atol=share * float(wanted.std()), why="half precision, rounded from sums in another order")
        assert_close(found, wanted, spread)


def assert_same(ours: TritonDecoder, theirs: Any, steps: Iterable[Step], share: float = LOGITS) -> None:
    """Logits of both, step by step."""
    for one in steps:
        assert_logits(np.array(ours.forward(one)), theirs.forward(one), share)


def assert_replayed(captured: TritonDecoder, launched: TritonDecoder, steps: Iterable[Step]) -> None:
    """A decoder that captures gives the bits of one that launches."""
    for one in steps:
        expected = launched.start(one).cpu().numpy()
        assert np.array_equal(captured.forward(one), expected)


def copy_cache(source: Any, target: Any, slot: int = 0) -> None:
    """Let a slot hold what another decoder's first holds, in the same layout."""
    cache = source.cache
    pieces = [{name: array.copy() for name, array in piece.items()} for piece in cache.export(0)]
    target.cache.load(slot, cache.length(0), cache.paged_length(0), pieces)


def read_prompt(decoder: Any, tokens: list[int], rows: int = 128) -> None:
    for start in range(0, len(tokens), rows):
        decoder.forward(step(tokens[start : start + rows], start))


def behind_pages(model: Any, kv: Any, device: str) -> tuple[TritonDecoder, Any, int]:
    """A decoder and the reference behind a prompt that fills a page or cuts one off its window, and its length."""
    prompt = text(KINDS[kv].unpaged + KINDS[kv].page + 2)
    options = DecoderOptions(context=300, max_rows=len(prompt), kv=kv, k_chunk=300, select="static")
    ours, theirs = both(model, options, device)
    theirs.forward(step(prompt, 0, prefill=True))
    copy_cache(theirs, ours)
    return ours, theirs, len(prompt)

"""A checkpoint in full precision over any kind of cache: the reference decoder with its products in float32.

So what a kind of cache costs can be told from what low-bit weights cost.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from models.checkpoint import Checkpoint
from models.weights import Weights
from runtime.backends.decoder import DecoderOptions, Step, Way
from runtime.backends.reference.decoder import ReferenceDecoder

PAGE = 128
"""Tokens of the longest page; all others divide it."""
STEP = 64
"""Tokens between places at which a page of some kind may end: sinks and pages are multiples of it."""


class _FullLinear:
    """A linear layer of the checkpoint; nothing to compensate."""

    recall_sum = 0.0
    selections = 0

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight.float(), None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor, _positions: torch.Tensor, *, way: Way, draft: bool = False) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)


class FullDecoder(ReferenceDecoder):
    """The reference decoder on a checkpoint that is not quantized.

    Args:
        checkpoint: The model.
        options: `kv`, `context` and `max_rows` count.
        stored: A low-bit form of it, which knows of its keys what some kinds of cache want to know; None: nothing.
    """

    def __init__(self, checkpoint: Checkpoint, options: DecoderOptions, stored: Weights | None = None) -> None:
        spec = checkpoint.spec
        self.spec, self.options, self.weight_bytes = spec, options, 0
        linears = {name: _FullLinear(*checkpoint.linear(name)) for name in spec.linear_names()}
        self.linears = linears  # type: ignore[assignment]  # of these, the decoder only calls them
        self.vectors = {name: checkpoint.vector(name).float() for name in spec.vector_names()}
        self.embedding = checkpoint.embedding()
        self._remember(stored)


def feed(decoder: ReferenceDecoder, tokens: Sequence[int], start: int = 0) -> npt.NDArray[np.float32]:
    """Run tokens in one step. Returns the last one's logits, float32 [V], a copy.

    Args:
        decoder: The model; slot 0 goes on from `start`.
        tokens: At most options.max_rows of them.
        start: Position of the first.
    """
    return _run(decoder, tokens, start, np.array([len(tokens) - 1], np.int32))[0]


def rows(decoder: ReferenceDecoder, tokens: Sequence[int], start: int) -> npt.NDArray[np.float32]:
    """The same with the logits of all of them, float32 [tokens, V].

    Every row sees what decoding the tokens one by one would see if no page ends inside the step: steps of `STEP`
    tokens from position 0 on do that for every kind.
    """
    return _run(decoder, tokens, start, np.arange(len(tokens), dtype=np.int32))


def _run(
    decoder: ReferenceDecoder, tokens: Sequence[int], start: int, wanted: npt.NDArray[np.int32]
) -> npt.NDArray[np.float32]:
    return decoder.forward(Step.of(tokens, start, wanted)).copy()


def keys_and_values(checkpoint: Checkpoint, tokens: Sequence[int]) -> dict[str, torch.Tensor]:
    """What attention reads of a text: `keys` (rotated) and `values`, float32 [layers, T, H_kv, D], half precision.

    Args:
        checkpoint: The model.
        tokens: At most its context.
    """
    count = len(tokens)
    decoder = FullDecoder(checkpoint, DecoderOptions(context=count, max_rows=count))
    feed(decoder, tokens)
    layers = range(checkpoint.spec.num_layers)
    return {part: torch.stack([decoder.cache.read(part, i, 0) for i in layers]) for part in ("keys", "values")}

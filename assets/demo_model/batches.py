"""Rows of tokens for training and for measuring: one conversation a row, rows of like length together."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from assets.demo_model.corpus import Writer
from assets.demo_model.vocabulary import PAD, chat_tokens, token_id

if TYPE_CHECKING:
    from tokenizers import Tokenizer

OTHER_WEIGHT = 0.1
"""Mean weight of the loss on what the user says, beside 1 for the model's own answers."""
OTHER_SHARE = 0.2
"""Share of the user's tokens whose loss is computed at all, each with a weight that makes up for the others."""
POOLED_STEPS = 4
"""Steps for which conversations are drawn together."""
LONG_SHARE = 0.01
"""Share of the conversations that are long."""
_LONG_TURNS = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Tokens with the weight of each as a target."""

    tokens: npt.NDArray[np.int64]
    """[B, S] token ids."""
    weights: npt.NDArray[np.float32]
    """[B, S] weight of predicting this token from those before it; 0 for padding, begin tokens and left-out ones."""


def batches(
    writer: Writer, tokenizer: Tokenizer, step: int, *, tokens: int, part: int, context: int
) -> tuple[Batch, ...]:
    """The rows of one step, in parts of like length; the same arguments give the same rows.

    Conversations are drawn for several steps at once, sorted by length and cut into parts, so that little padding is
    needed; each step takes its share of the parts, drawn from all lengths.

    Args:
        writer: Where conversations come from.
        tokenizer: Tokenizer of the model.
        step: Number of the step from 0; steps share no conversation.
        tokens: About how many tokens a step has, padding not counted.
        part: Most tokens of a part, padding counted, unless a single row is longer.
        context: Length at which a conversation is cut.

    Returns:
        The parts.
    """
    pool, turn = divmod(step, POOLED_STEPS)
    parts = _pool(writer, tokenizer, pool, tokens * POOLED_STEPS, part, context)
    return parts[turn::POOLED_STEPS]


@lru_cache(maxsize=2)
def _pool(writer: Writer, tokenizer: Tokenizer, pool: int, tokens: int, part: int, context: int) -> tuple[Batch, ...]:
    number, found, rows = pool * tokens, 0, []
    while found < tokens:
        rng = random.Random(f"{writer.seed} {writer.split} row {number}")  # noqa: S311  reproducible, not secret
        conversation = writer.conversation(number, turns=_LONG_TURNS if rng.random() < LONG_SHARE else None)
        number += 1
        ids, answers = chat_tokens(tokenizer, conversation.messages())
        weights = [1.0 if answer else (OTHER_WEIGHT / OTHER_SHARE) * (rng.random() < OTHER_SHARE) for answer in answers]
        rows.append((ids[:context], [0.0, *weights[1:context]]))
        found += len(rows[-1][0])
    rows.sort(key=lambda row: len(row[0]))
    made, first = [], 0
    for last in range(1, len(rows) + 1):
        if last == len(rows) or (last + 1 - first) * len(rows[last][0]) > part:
            made.append(_padded(rows[first:last], token_id(tokenizer, PAD)))
            first = last
    random.Random(f"{writer.seed} {pool}").shuffle(made)  # noqa: S311
    return tuple(made)


def _padded(rows: list[tuple[list[int], list[float]]], padding: int) -> Batch:
    length = max(len(ids) for ids, _ in rows)
    tokens = np.full((len(rows), length), padding, np.int64)
    weights = np.zeros((len(rows), length), np.float32)
    for i, (ids, given) in enumerate(rows):
        tokens[i, : len(ids)] = ids
        weights[i, : len(ids)] = given
    return Batch(tokens=tokens, weights=weights)

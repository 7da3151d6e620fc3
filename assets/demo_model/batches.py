"""Rows of tokens for training and for measuring: conversations laid one after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from assets.demo_model.corpus import Writer
from assets.demo_model.vocabulary import PAD, chat_tokens, token_id

if TYPE_CHECKING:
    from tokenizers import Tokenizer

OTHER_WEIGHT = 0.1
"""Weight of the loss on what the user says, beside 1 for the model's own answers."""
_LONG_TURNS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Tokens with the weight of each as a target."""

    tokens: npt.NDArray[np.int64]
    """[B, S] token ids."""
    weights: npt.NDArray[np.float32]
    """[B, S] weight of predicting this token from those before it; 0 for padding and for begin tokens."""


def batch(writer: Writer, tokenizer: Tokenizer, step: int, *, rows: int, length: int, long: bool) -> Batch:
    """The rows of one step; the same arguments give the same rows.

    Args:
        writer: Where conversations come from.
        tokenizer: Tokenizer of the model.
        step: Number of the step from 0; steps share no conversation number.
        rows: B.
        length: S.
        long: One long conversation a row instead of several short ones.

    Returns:
        The batch.
    """
    tokens = np.full((rows, length), token_id(tokenizer, PAD), np.int64)
    weights = np.zeros((rows, length), np.float32)
    number = step * rows * length
    for row in range(rows):
        used = 0
        while used < length:
            conversation = writer.conversation(number, turns=_LONG_TURNS if long else None)
            number += 1
            ids, answers = chat_tokens(tokenizer, conversation.messages())
            if used and used + len(ids) > length:
                break
            ids, answers = ids[: length - used], answers[: length - used]
            tokens[row, used : used + len(ids)] = ids
            weights[row, used : used + len(ids)] = np.where(answers, 1.0, OTHER_WEIGHT)
            weights[row, used] = 0.0
            used += len(ids)
    return Batch(tokens=tokens, weights=weights)

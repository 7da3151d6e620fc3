"""Divergence between next-token distributions: whole ones, and outlines of them that take little memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating[Any]]
_TINY = np.float32(1e-30)
_ROWS = 8
"""Rows that are computed at a time, so that little memory is needed beside the logits."""


@dataclass(frozen=True, slots=True)
class Outline:
    """Next-token distributions by their most likely tokens; all others count as one."""

    tokens: npt.NDArray[np.int32]
    """int32 [R, n], the most likely tokens of each row, the likeliest first."""
    probabilities: npt.NDArray[np.float32]
    """float32 [R, n + 1], their probabilities, and that of all others together."""

    @classmethod
    def of(cls, logits: FloatArray, most: int) -> Outline:
        """The outline of logits [R, V].

        Args:
            logits: floating point [R, V].
            most: Tokens to keep of each row, n; all but one if the vocabulary has no more.
        """
        most, parts = min(most, logits.shape[1] - 1), []
        for start in range(0, len(logits), _ROWS):
            rows = logits[start : start + _ROWS]
            tokens = np.argpartition(rows, -most, axis=1)[:, -most:].astype(np.int32)
            order = np.argsort(-np.take_along_axis(rows, tokens, 1), axis=1, kind="stable")
            tokens = np.take_along_axis(tokens, order, 1)
            parts.append(cls(tokens, np.exp(_outlined(rows, tokens))))
        return cls.joined(parts)

    @classmethod
    def joined(cls, parts: Sequence[Outline]) -> Outline:
        """The rows of several outlines, one after the other."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("tokens", "probabilities")))

    def rows(self, start: int, end: int) -> Outline:
        """The rows start .. end - 1."""
        return Outline(self.tokens[start:end], self.probabilities[start:end])

    def divergence(self, logits: FloatArray) -> float:
        """Sum over rows of the Kullback-Leibler divergence of logits [R, V] from these distributions, in nats.

        It is at most that of the whole distributions.
        """
        total = 0.0
        for start in range(0, len(logits), _ROWS):
            own = self.rows(start, start + _ROWS)
            apart = np.log(np.maximum(own.probabilities, _TINY)) - _outlined(logits[start : start + _ROWS], own.tokens)
            total += float((own.probabilities * apart).sum(dtype=np.float64))
        return total


def _outlined(logits: FloatArray, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Log-probabilities float32 [R, n + 1] of some tokens of each row, and of all others together."""
    shifted: npt.NDArray[np.float32] = np.subtract(logits, logits.max(axis=1, keepdims=True), dtype=np.float32)
    chosen = np.take_along_axis(shifted, tokens, axis=1)
    np.exp(shifted, out=shifted)
    total = shifted.sum(axis=1, keepdims=True, dtype=np.float64)
    np.put_along_axis(shifted, tokens, np.float32(0), axis=1)
    others = shifted.sum(axis=1, keepdims=True, dtype=np.float64)
    rest = np.log(np.maximum(others, 1e-30) / total)
    return np.concatenate([chosen - np.log(total), rest], axis=1).astype(np.float32)

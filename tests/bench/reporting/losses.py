"""Losses of a text by pieces, and the standard error of their differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.measure.evaluate import EvalResult
from tests.bench.reporting.results import Entry

PIECES = 24
"""Stretches of the text whose losses are kept, for the noise of differences."""
SURE = 2.0
"""Standard errors from which a difference counts."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How much worse one model is than another on the same tokens."""

    nats: float
    """Mean difference of the loss, in nats a token; positive: the first is worse."""
    error: float
    """Its standard error, from the differences of the text's pieces."""

    @property
    def worse(self) -> bool:
        """Whether the first is worse beyond noise."""
        return self.nats > SURE * self.error

    @property
    def better(self) -> bool:
        """Whether the first is better beyond noise."""
        return self.nats < -SURE * self.error

    def __str__(self) -> str:
        return f"{self.nats:+.4f} ± {self.error:.4f}"


def difference(one: Entry, other: Entry) -> Difference:
    """Of two entries with the losses of the same pieces of text."""
    apart = piece_losses(one) - piece_losses(other)
    tokens = int(one["tokens"])
    error = math.sqrt(apart.size * float(apart.var(ddof=1))) / tokens if apart.size > 1 else math.inf
    return Difference(float(apart.sum()) / tokens, error)


def percent(one: Entry, other: Entry) -> float:
    """How much larger one perplexity is than another, in percent."""
    return 100 * (float(one["perplexity"]) / float(other["perplexity"]) - 1)


def pieces(nats: Sequence[float]) -> list[float]:
    """Losses of consecutive windows summed to `PIECES` stretches, or fewer where the text has fewer windows."""
    return [round(float(part.sum()), 3) for part in np.array_split(np.asarray(nats), min(PIECES, len(nats)))]


def numbers(result: EvalResult) -> dict[str, Any]:
    """What is kept of an evaluation."""
    return {
        "perplexity": round(result.perplexity, 5),
        "nats": round(result.nll_sum / result.tokens, 6),
        "tokens": result.tokens,
        "recall": None if result.recall is None else round(result.recall, 4),
        "pieces": pieces(result.window_nll),
        "seconds": round(result.seconds, 2),
    }


def piece_losses(entry: Entry) -> npt.NDArray[np.float64]:
    """The kept losses of an entry's pieces, in nats."""
    values: Sequence[float] = entry["pieces"]
    return np.asarray(values, np.float64)

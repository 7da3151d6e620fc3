"""Losses of a low-bit model's layer types by compensated channels, from which the tuner chooses `k_chunk`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.foreign import parse_json

FORMAT = "lowbit-chat-losses"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeLosses:
    """The loss of a model in which only the layers of one type are low-bit, for a few `k_chunk`.

    Losses of single types add up to that of the whole model within some percent (`docs/decisions/tuner.md`).
    """

    k_chunk: tuple[int, ...]
    """Salient channels per 1024 that are compensated in the type's layers, ascending; the first is 0."""
    nats: Mapping[str, tuple[float, ...]]
    """By layer type, for each of these: KL divergence of the next-token distribution from the full-precision model's,
    in nats, averaged over tokens."""
    tokens: int
    """Tokens of the calibration text that it is averaged over."""

    def __post_init__(self) -> None:
        rising = all(low < high for low, high in zip(self.k_chunk, self.k_chunk[1:], strict=False))
        if not self.k_chunk or self.k_chunk[0] != 0 or not rising or self.k_chunk[-1] > 1024:
            raise ValueError(f"k_chunk ascends from 0 to at most 1024, not {self.k_chunk}")
        for kind, found in self.nats.items():
            if len(found) != len(self.k_chunk) or not all(math.isfinite(nats) and nats >= 0 for nats in found):
                raise ValueError(f"{kind} needs {len(self.k_chunk)} losses of at least 0, not {found}")
        if self.tokens < 1:
            raise ValueError(f"losses of {self.tokens} tokens")

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "tokens": self.tokens,
            "k_chunk": list(self.k_chunk),
            "nats": {kind: list(found) for kind, found in self.nats.items()},
        }

    @classmethod
    def from_json(cls, content: bytes) -> TypeLosses | None:
        """Read losses.json.

        Returns:
            The losses; None where another version of the program wrote them.

        Raises:
            ValueError: it is malformed.
        """
        data = parse_json(content)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError("not the losses of layer types")
        if data.get("version") != VERSION:
            return None
        try:
            return cls(
                k_chunk=tuple(int(k_chunk) for k_chunk in data["k_chunk"]),
                nats={str(kind): tuple(float(nats) for nats in found) for kind, found in data["nats"].items()},
                tokens=int(data["tokens"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the losses of layer types: {error!r}") from error

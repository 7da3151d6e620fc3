"""Certificates: what a stored model loses of its source on a text, as measured by the program's own decoder.

`certificate.json` lies beside the model's files. It is not one of them: it is measured once they are published, and
`tune-device` adds what a budget buys. It names the files that it was measured on by their manifest's checksum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from models.foreign import parse_json
from models.store.durable import write_file
from models.store.manifest import json_bytes, read_stored

FILE = "certificate.json"
FORMAT = "lowbit-chat-certificate"
VERSION = 1
TOLERANCES = {"kl": (0.05, 0.002), "same_percent": (0.0, 2.0), "perplexity": (0.02, 0.0)}
"""How far a repeated number may be off, as a share of it and beside that: other processors and cards round activations
another way (docs/decisions/models.md)."""

KChunk = Mapping[str, int] | int


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to run a model, and what it loses on the text."""

    kv: str
    """Kind of KV cache."""
    k_chunk: KChunk
    """Salient channels per 1024 of decoded tokens, as in `DecoderOptions`."""
    prompt_k_chunk: KChunk = 0
    """The same of prompts."""
    budget_percent: float | None = None
    """The slowdown budget that bought these; None: they were not bought."""
    kl: float = 0.0
    """Divergence of the next-token distribution from the source's (Kullback-Leibler), nats a token. Tokens beyond the
    source's most likely ones count as one, so it is at most that of the whole distributions."""
    same_percent: float = 0.0
    """Share of tokens at which the most likely next token is the source's."""
    perplexity: float = 0.0

    @property
    def name(self) -> str:
        """`k_chunk 16`, or `within 5 %`."""
        return f"k_chunk {self.k_chunk}" if self.budget_percent is None else f"within {self.budget_percent:g} %"

    def apart(self, other: Way) -> list[str]:
        """Which numbers of another measurement of this way are outside the tolerance: `kl is 0.2, was 0.1`."""
        found = []
        for field, (share, beside) in TOLERANCES.items():
            was, now = getattr(self, field), getattr(other, field)
            if not abs(now - was) <= share * was + beside:
                found.append(f"{field} is {now:.5g}, was {was:.5g}")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The content of certificate.json."""

    model: str
    """sha256 of the manifest, which has those of all files."""
    text: str
    """sha256 of the evaluation text, as in recipe.json."""
    tokens: int
    """Scored tokens: the second halves of windows, whose first halves are prompts."""
    seed: int
    """`DecoderOptions.seed`."""
    source_perplexity: float
    """Of the full-precision source on the same tokens."""
    ways: tuple[Way, ...]

    def write(self, folder: Path) -> None:
        """Write it beside the model's files. Raises StoreError where the disk refuses."""
        write_file(folder / FILE, [json_bytes({"format": FORMAT, "version": VERSION, **asdict(self)})])

    @classmethod
    def read(cls, folder: Path) -> Certificate | None:
        """A model's certificate; None where there is none, or one of another version.

        Raises:
            StoreError: it is damaged.
        """
        try:
            found: Certificate | None = read_stored(folder / FILE, cls._parsed)
        except FileNotFoundError:
            return None
        return found

    @classmethod
    def _parsed(cls, content: bytes) -> Certificate | None:
        data = parse_json(content)
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise ValueError("not a certificate")
        if data.pop("version", None) != VERSION:
            return None
        try:
            found = cls(**{**data, "ways": tuple(Way(**way) for way in data["ways"])})
            numbers = [n for way in found.ways for n in (way.kl, way.same_percent, way.budget_percent or 0)]
            perplexities = [found.source_perplexity, *(way.perplexity for way in found.ways)]
            if not found.ways or min(perplexities) <= 0 or not all(map(math.isfinite, numbers + perplexities)):
                raise ValueError("numbers are missing, or are none")
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a certificate: {error!r}") from error
        return found

    def bought(self, way: Way) -> Certificate:
        """With what a budget buys, in place of what it bought before."""
        others = (own for own in self.ways if own.budget_percent is None or own.budget_percent != way.budget_percent)
        return replace(self, ways=(*others, way))

    @property
    def words(self) -> str:
        """For people: a line for what the default budget is about to buy, and one for each budget that was tuned."""
        usual = [way for way in self.ways if (way.kv, way.budget_percent) == ("fp16", None)][-1:]
        small = [way for way in self.ways if (way.kv, way.budget_percent) == ("int4", None)]
        lines = [self.line(way) for way in (*usual, *(way for way in self.ways if way.budget_percent is not None))]
        for own, other in zip(usual, small, strict=False):
            lines[0] += f"; 4-bit cache {100 * (other.perplexity / own.perplexity - 1):+.1f} %"
        return "\n".join(lines)

    def line(self, way: Way) -> str:
        """What one way of running the model loses, for people."""
        grown = 100 * (way.perplexity / self.source_perplexity - 1)
        return (
            f"{way.name}: KL {way.kl:.3f} nats a token, same top token {way.same_percent:.0f} %, "
            f"perplexity {way.perplexity:.2f} ({grown:+.1f} %)"
        )

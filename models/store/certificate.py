"""Certificates: what a stored model loses of its source on a text, as measured by the program's own decoder.

`certificate.json` lies beside the model's files. It is not one of them: it is measured once they are published, and
`tune-device` adds what a budget buys. It names the files that it was measured on by their manifest's checksum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from models.errors import StoreError
from models.foreign import parse_json
from models.store.durable import write_file
from models.store.manifest import content_of, json_bytes, read_stored

FILE = "certificate.json"
FORMAT = "lowbit-chat-certificate"
VERSION = 1
TOLERANCES = {"kl": (0.05, 0.002), "same_percent": (0.0, 2.0), "perplexity": (0.02, 0.0)}
"""How far a repeated number may be off, as a share of it and beside that: other processors and cards round activations
another way (docs/decisions/models.md)."""
CACHE_LIMIT = 0.03
"""Most that a kind of KV cache may cost as a model's default: divergence, nats a token (docs/decisions/kv.md)."""

KEPT_WORDS = "the source's own weights, kept bit for bit: they lose nothing"

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

    model: str = ""
    """sha256 of the manifest, which has those of all files."""
    text: str | None = None
    """sha256 of the evaluation text, as in recipe.json; None: its source was not measured."""
    tokens: int = 0
    """Scored tokens: the second halves of windows, whose first halves are prompts."""
    seed: int = 0
    """`DecoderOptions.seed`."""
    kept: bool = False
    """Whether its weights are the source's, bit for bit, so that they lose nothing; only its cache can."""
    source_perplexity: float | None = None
    """Of the full-precision source on the same tokens; None as above."""
    ways: tuple[Way, ...] = ()
    """Empty as above."""
    caches: tuple[Way, ...] = ()
    """What kinds of cache lose of an exact one over the same weights, on answers over that one: the default kind's, if
    that was too much that of 8 bits, and if that was, too, `fp16`'s, which is rounded elsewhere. Empty: not checked.
    """

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
    def of(cls, folder: Path) -> Certificate:
        """The certificate of the files in a folder; one without numbers where none is whole and theirs."""
        try:
            found = cls.read(folder)
        except StoreError:
            found = None
        return found if found is not None and found.model == content_of(folder) else cls()

    @classmethod
    def _parsed(cls, content: bytes) -> Certificate | None:
        data = parse_json(content)
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise ValueError("not a certificate")
        if data.pop("version", None) != VERSION:
            return None
        try:
            lists = {name: tuple(Way(**way) for way in data.get(name, ())) for name in ("ways", "caches")}
            found = cls(**{**data, **lists})
            every = found.ways + found.caches
            numbers = [n for way in every for n in (way.kl, way.same_percent, way.budget_percent or 0)]
            perplexities = [way.perplexity for way in every]
            if found.ways:
                perplexities.append(float(data["source_perplexity"]))
            sound = min(perplexities, default=1) > 0 and all(map(math.isfinite, numbers + perplexities))
            if not sound or not (every or found.kept):
                raise ValueError("numbers are missing, or are none")
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a certificate: {error!r}") from error
        return found

    def bought(self, way: Way) -> Certificate:
        """With what a budget buys, in place of what it bought before."""
        others = (own for own in self.ways if own.budget_percent is None or own.budget_percent != way.budget_percent)
        return replace(self, ways=(*others, way))

    def lost(self, budget_percent: float | None) -> float | None:
        """By how many percent perplexity grows within a budget, or with 0 without compensation; None: not measured."""
        for way in self.ways:
            found = 0.0 if way.k_chunk == 0 and way.budget_percent is None else way.budget_percent
            if self.source_perplexity and found is not None and found == budget_percent:
                return 100 * (way.perplexity / self.source_perplexity - 1)
        return None

    @property
    def kv(self) -> str | None:
        """The kind of cache that is the default for the model: the first that is no harm; None: not checked."""
        return next((way.kv for way in self.caches if not self.harms(way.kv)), None)

    def harms(self, kv: str) -> bool:
        """Whether a kind of cache was found to damage the model's answers: `fp16` never, what is like it neither."""
        limit = max([CACHE_LIMIT, *(2 * way.kl for way in self.caches if way.kv == "fp16")])
        return any(way.kl > limit for way in self.caches if way.kv == kv)

    @property
    def words(self) -> str:
        """For people: a line for what the default budget may buy, each tuned one, or kept weights; for caches."""
        usual = [way for way in self.ways if (way.kv, way.budget_percent) == ("fp16", None)][-1:]
        lines = [self.line(way) for way in (*usual, *(way for way in self.ways if way.budget_percent is not None))]
        return "\n".join([*([KEPT_WORDS] if self.kept else lines), self.cache_words])

    @property
    def cache_words(self) -> str:
        """What the kinds of cache that were checked do to answers, and which is the default therefore."""
        if not self.caches:
            return "4-bit cache: not checked with this model"
        parts = [f"{way.kv} cache: KL {way.kl:.3f}, same top token {way.same_percent:.0f} %" for way in self.caches]
        words = "; ".join(parts)
        return words if self.kv == self.caches[0].kv else f"{words}; so {self.kv} is the default"

    def line(self, way: Way) -> str:
        """What one way of running the model loses, for people."""
        grown = 100 * (way.perplexity / self.source_perplexity - 1) if self.source_perplexity else 0.0
        return (
            f"{way.name}: KL {way.kl:.3f} nats a token, same top token {way.same_percent:.0f} %, "
            f"perplexity {way.perplexity:.2f} ({grown:+.1f} %)"
        )

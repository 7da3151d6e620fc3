"""How much of GEAR's correction is needed: perplexity by rank, by share of outliers, and by share of corrected tokens.

As in GEAR's Figure 4a and 4b, at 2 bits. The full-precision model runs over the cache, each window as a chat: its first
half is a prompt, its second half is decoded and scored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from models.checkpoint import Checkpoint
from models.spec import ModelSpec
from models.weights import Weights
from runtime.backends.decoder import DecoderOptions, Int32Array
from runtime.backends.reference.cache import ReferenceCache
from runtime.kv.kinds import KINDS, LOW_RANK, PARTS, SPARSITY, CacheKind, page_bytes
from runtime.measure.evaluate import perplexity
from tests.bench.caches.full import STEP, FullDecoder
from tests.bench.caches.laboratory import Laboratory
from tests.bench.reporting.losses import numbers
from tests.bench.reporting.results import digest

WINDOWS = {"smollm2": 2048}
"""Tokens of a window, half of them a prompt, of the models that are measured."""
TOKENS = 4096
"""Tokens of the text at most."""
RANKS, SPARSITIES, SHARES = (0, 1, 2, LOW_RANK, 8), (0.0, SPARSITY, 0.04, 0.08), (0.0, 0.25, 0.5, 0.75, 1.0)
"""Ranks without outliers, shares of outliers at the usual rank, and shares of a prompt's tokens that are corrected. 1 %
of vectors of 64 and 128 numbers is as many as 2 %: one at each end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to correct."""

    rank: int = LOW_RANK
    """Rank of a page's low-rank matrix."""
    sparsity: float = 0.0
    """Share of outliers."""
    share: float = 1.0
    """Share of the prompt's tokens, the most recent ones, whose pages have a low-rank matrix."""

    @property
    def kind(self) -> CacheKind:
        """The kind of cache."""
        return replace(KINDS["gear2"], rank=self.rank, sparsity=self.sparsity)


def ways() -> list[Way]:
    """All ways, each once."""

    def listed() -> Iterator[Way]:
        yield from (Way(rank=rank) for rank in RANKS)
        yield from (Way(sparsity=sparsity) for sparsity in SPARSITIES)
        yield from (Way(share=share) for share in SHARES)

    return list(dict.fromkeys(listed()))


def measure(laboratory: Laboratory) -> None:
    """Measure what is missing for one model; only those of `WINDOWS` are measured."""
    case, notebook = laboratory.case, laboratory.notebook
    if case.name not in WINDOWS:
        return
    window, tokens = WINDOWS[case.name], laboratory.tokens[:TOKENS]
    for way in (None, *ways()):
        about = {"rank": None, "sparsity": None, "share": None} if way is None else _described(way)
        identity = {"source": laboratory.source, "text": digest(tokens), "window": window, **about}

        def run(way: Way | None = way, about: dict[str, Any] = about) -> dict[str, Any]:
            decoder = decoder_of(laboratory.checkpoint, laboratory.low_bit(), window, way)
            try:
                result = perplexity(decoder, tokens, window, window // 2, as_chat=True, rows=STEP)
            finally:
                decoder.close()
            notebook.tell(f"{case.name}, corrected by {about}: {result.perplexity:.4f} in {result.seconds:.1f} s")
            size = 100.0 if way is None else _percent(way.kind, laboratory.checkpoint.spec)
            return {"model": case.name, "window": window, **about, "bytes": round(size, 2), **numbers(result)}

        notebook.known("corrected", identity, notebook.codes.reference, run)
        notebook.results.save()


def _described(way: Way) -> dict[str, Any]:
    return {"rank": way.rank, "sparsity": way.sparsity, "share": way.share}


def _percent(kind: CacheKind, spec: ModelSpec) -> float:
    """Bytes of a page, in percent of the same tokens in half precision."""
    return 100 * page_bytes(kind, spec) / (4 * kind.page * spec.head_dim * spec.num_kv_heads * spec.num_layers)


def decoder_of(checkpoint: Checkpoint, stored: Weights | None, window: int, way: Way | None) -> FullDecoder:
    """A model in full precision over a cache that is corrected in one way.

    Args:
        checkpoint: The model.
        stored: See `FullDecoder`.
        window: Tokens of a window; its first half is the prompt.
        way: How; None: the fp16 cache.
    """
    options = DecoderOptions(kv="fp16" if way is None else "gear2", context=window)
    decoder = FullDecoder(checkpoint, options, stored)
    if way is not None:
        decoder.cache.close()
        decoder.cache = _PartlyCorrected(way, decoder, prompt=window // 2)
    return decoder


class _PartlyCorrected(ReferenceCache):
    """A cache in whose slot 0 only the latest pages of a prompt have a low-rank matrix, and all pages after it.

    Args:
        way: How it is corrected.
        decoder: The decoder that it is for.
        prompt: Tokens of the prompt.
    """

    def __init__(self, way: Way, decoder: FullDecoder, *, prompt: int) -> None:
        options = decoder.options
        super().__init__(way.kind, decoder.spec, context=options.context, slots=1, max_rows=options.max_rows)
        pages = self.kind.whole_pages(prompt)
        self._plain = 0 if way.rank == 0 else round((1 - way.share) * pages)

    def begin(self, slots: Int32Array, positions: Int32Array, *, flush: bool = True, draft: bool = False) -> None:
        """See `runtime.kv.interfaces.KVCache.begin`."""
        super().begin(slots, positions, flush=flush, draft=draft)
        if plain := self.table.held(0)[: self._plain]:
            for part in PARTS:
                self.store.fields(part, self.store.pools[part])["a"][plain] = 0

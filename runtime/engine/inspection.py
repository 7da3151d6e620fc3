"""Token inspection: the model's candidates at each token of an answer, with compensation, without it, and as a draft.

The answer is re-read rather than generated: its prompt as a prompt, its tokens many at a time as in a verification,
once as the model runs and once without any compensation. A chat pays nothing for it until somebody looks. The
uncompensated pass reads the whole conversation without compensation, as if the budget were off: it shows what the base
model alone would have said after the same text. Sums over many rows may be added in another order than those over one,
so logits equal those of the answer up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from models.progress import Progress, ProgressCallback
from runtime.backends.decoder import Decoder, Float32Array, Step
from runtime.compensation import k_chunk_by_type
from runtime.errors import Cancelled
from runtime.text.tokenizer import Tokenizer
from runtime.wire.requests import Candidate, InspectedToken, Inspection

ALTERNATIVES = 6
"""Most likely tokens reported at each place."""
KNOWN = 64
"""Most likely tokens of each pass whose logits are kept for comparison with the other pass."""
DRAFTED_ROWS = 4
"""Tokens drafted in a row after verified ones."""
MAX_TOKENS = 2048
"""Most tokens of an answer that are read."""
CONTEXT_TOKENS = 8
"""Tokens before the answer that are decoded with it, so that its first token gets its leading space."""


@dataclass(frozen=True, slots=True)
class _View:
    """The candidates of one place in one pass."""

    best: int
    logits: Mapping[int, float]
    """Token ids of the most likely tokens and the token itself, with their logits."""
    normalizer: float
    """log of the sum of exp of all logits."""


def _view(logits: Float32Array, token: int) -> _View:
    count = min(KNOWN, logits.size)
    likely = np.argpartition(logits, -count)[-count:]
    kept = {int(each): float(logits[each]) for each in [*likely[np.argsort(-logits[likely], kind="stable")], token]}
    highest = logits.max()
    return _View(int(logits.argmax()), kept, float(highest + np.log(np.exp(logits - highest, dtype=np.float64).sum())))


def inspect(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    name: str,
    drafts: bool,
    progress: ProgressCallback,
    cancelled: Callable[[], bool],
) -> Inspection:
    """Re-read an answer.

    Args:
        decoder: The model; slot 0, which must hold all tokens but the last, is overwritten.
        tokenizer: The model's.
        prompt: Tokens before the answer, at least one.
        answer: Tokens of the answer, at least one.
        name: The model's.
        drafts: Whether to also draft each token.
        progress: Called after each step.
        cancelled: Checked before each step.

    Returns:
        The tokens of the answer, which is complete if it has fewer than `MAX_TOKENS`.

    Raises:
        Cancelled: `cancelled` said so.
        InvalidActivationError: the model computed NaN or infinity.
    """
    reader = _Reader(decoder, [*prompt, *answer], len(prompt), progress, cancelled)
    base: list[_View] = []
    if _compensates(decoder):
        reader.readings += 1
        base = [_view(row, token) for row, token in zip(reader.read(compensate=False), answer, strict=True)]
    drafted: list[int | None] = []
    rows = reader.read(drafted=drafted if drafts else None)
    views = [_view(row, token) for row, token in zip(rows, answer, strict=True)]
    detokenizer = tokenizer.detokenizer(prompt[-CONTEXT_TOKENS:])
    texts = [detokenizer.add(token) for token in answer]
    texts[-1] += detokenizer.flush()
    told = [
        _told(tokenizer, text, token, view, base[at] if base else None, drafted[at] if drafts else None)
        for at, (text, token, view) in enumerate(zip(texts, answer, views, strict=True))
    ]
    return Inspection(tokens=told, model=name, compensated=bool(base), complete=len(answer) < MAX_TOKENS)


def _compensates(decoder: Decoder) -> bool:
    """Whether a decoder compensates anything."""
    options = decoder.options
    return any(any(k_chunk_by_type(each).values()) for each in (options.k_chunk, options.prompt_k_chunk))


class _Reader:
    """Runs a conversation through slot 0 of a decoder, any number of times."""

    def __init__(
        self,
        decoder: Decoder,
        tokens: Sequence[int],
        first: int,
        progress: ProgressCallback,
        cancelled: Callable[[], bool],
    ) -> None:
        self._decoder, self._tokens, self._first = decoder, tokens, first
        self._progress, self._cancelled = progress, cancelled
        self._done = 0
        self.readings = 1

    def read(self, *, compensate: bool = True, drafted: list[int | None] | None = None) -> Iterator[Float32Array]:
        """The logits [V] that each token of the answer was sampled from; each is overwritten two tokens later.

        Args:
            compensate: Whether to compensate as the model normally does.
            drafted: Receives the most likely draft token at each place, unless None.
        """
        decoder, first, end = self._decoder, self._first, len(self._tokens) - 1
        decoder.cache.clear(0)
        for at in range(0, first, decoder.options.max_rows):
            until = min(at + decoder.options.max_rows, first)
            logits = self._forward(at, until, wanted=int(until == first), compensate=compensate, prefill=True)
        if drafted is not None:
            drafted.append(None)  # the first token of an answer comes from the prompt, without a draft
        yield logits[0]
        at = first
        while at < end:
            until = min(at + self._most(drafts=drafted is not None), end)
            if drafted is not None:
                guess = self._forward(at, until, wanted=until - at, draft=True)
                drafted.extend(int(each) for each in guess.argmax(axis=1))
            yield from self._forward(at, until, wanted=until - at, compensate=compensate)
            at = until

    def _most(self, *, drafts: bool) -> int:
        """Tokens of the next step: no more than see what they saw when they were written."""
        most = min(self._decoder.options.max_rows, self._decoder.cache.batch_invariant_rows(0))
        return min(most, DRAFTED_ROWS) if drafts else most

    def _forward(
        self, at: int, until: int, *, wanted: int, compensate: bool = True, prefill: bool = False, draft: bool = False
    ) -> Float32Array:
        if self._cancelled():
            raise Cancelled("the inspection was cancelled")
        count = until - at
        logits = self._decoder.forward(
            Step.of(
                self._tokens[at:until],
                at,
                range(count - wanted, count),
                compensate=compensate,
                prefill=prefill,
                draft=draft,
            )
        )
        if not draft:
            self._done += count
            total = self.readings * (len(self._tokens) - 1)
            words = "reading the answer as generated" if compensate else "reading it without compensation"
            self._progress(Progress(phase="inspect", done=self._done, total=total, unit="tokens", message=words))
        return logits


def _told(
    tokenizer: Tokenizer, text: str, token: int, own: _View, base: _View | None, draft: int | None
) -> InspectedToken:
    """The candidates of a place, best first, and which of them is the token, the uncompensated choice and the draft."""
    likely = [*own.logits][:ALTERNATIVES]
    if base is not None:
        likely += [*base.logits][:ALTERNATIVES]
    ids = list(dict.fromkeys([*likely, token, *([] if draft is None else [draft])]))
    ids.sort(key=lambda each: -own.logits.get(each, -np.inf))
    candidates = [
        Candidate(
            text=tokenizer.piece(each),
            logit=own.logits.get(each),
            probability=_probability(own, each),
            base_logit=None if base is None else base.logits.get(each),
            base_probability=None if base is None else _probability(base, each),
        )
        for each in ids
    ]
    return InspectedToken(
        text=text,
        candidates=candidates,
        chosen=ids.index(token),
        base_best=None if base is None else ids.index(base.best),
        draft=None if draft is None else ids.index(draft),
    )


def _probability(view: _View, token: int) -> float | None:
    logit = view.logits.get(token)
    return None if logit is None else float(np.exp(logit - view.normalizer))

"""What a loaded model loses on a short text with one compensation or another, as a chat gets it.

The first half of each window is a prompt, compensated as prompts are; in the second half, next-token distributions are
compared with those of the same model with all residuals (half of the head's), which are nearly the full-precision
model's. Such divergences say with a few hundred tokens what perplexities say with many thousands. No reading of a clock
enters, so the same compensation always loses the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from runtime.backends.decoder import Decoder, DecoderOptions
from runtime.compensation import CHUNK, k_chunk_by_type
from runtime.measure.evaluate import FloatArray, Int64Array, Window, scores, windows
from runtime.text.divergence import Outline

WINDOW, TOKENS = 128, 1024
"""Tokens of a window and of the text at most; half of each window is scored."""
_MIN_WINDOWS, _PARAMETERS = 3, 1080e6
"""Windows times parameters that a pass over the text has about: larger models read fewer windows. By their size, not by
a clock, so that they read the same ones again."""
_OUTLINED = 256
"""Tokens of a distribution that are told apart; all others count as one. Whole distributions would take 100 MB."""
_MOST_ROWS, _ROW_PARAMETERS = 32, 8e9
"""Rows of a step, at most and times parameters: a step takes some 50 ms, between which work can be interrupted."""
_MOST = CHUNK // 2
"""Residuals that are compared with where prompts do not have all of them, and of the head. A decoded token reads all
from a copy, which would take as much memory as the residuals, and up to a second to make."""


def text_id(text: str, options: DecoderOptions) -> str:
    """Identity of a text, and of how a decoder reads it."""
    prompts = sorted(k_chunk_by_type(options.prompt_k_chunk).items())
    how = f"{min(WINDOW, options.context)} {prompts} {options.select} {_OUTLINED} {text[: 8 * TOKENS]}"
    return hashlib.sha256(how.encode()).hexdigest()[:16]


class TextLoss:
    """Measures compensations on the text.

    Args:
        decoder: A loaded model; slot 0 of its cache is overwritten.
        tokens: The text, encoded.
        cancelled: Polled between steps.
    """

    def __init__(self, decoder: Decoder, tokens: Sequence[int], cancelled: Callable[[], bool]) -> None:
        self._decoder, self._cancelled = decoder, cancelled
        window = min(WINDOW, decoder.options.context)
        self._text = np.asarray(tokens[:TOKENS], np.int64)
        most = max(_MIN_WINDOWS, round(_PARAMETERS / decoder.spec.parameters))
        parts = windows(self._text.size, window, window, as_chat=True)
        self._parts = [part for part in parts if part.prompt > part.start][:most]
        rows = min(_MOST_ROWS, int(_ROW_PARAMETERS / decoder.spec.parameters))
        self._rows = 1 << max(1, rows.bit_length() - 1)
        self._reference: list[Outline] = []

    def __call__(self, k_chunk: Mapping[str, int]) -> float:
        """Nats per token; the decoder's k_chunk is restored afterwards.

        Raises:
            RequestError: the text is too short.
            Cancelled: `cancelled` said so.
        """
        before = self._decoder.options
        try:
            with self._decoder.session():
                self._refer()
                self._decoder.set_k_chunk(k_chunk)
                return self._measure()
        finally:
            self._decoder.set_k_chunk(before.k_chunk, before.n_tb)

    def _refer(self) -> None:
        """Run the model with all residuals, once: as a prompt, where prompts have all of them."""
        all_there = k_chunk_by_type(self._decoder.options.prompt_k_chunk)["qkv"] == CHUNK
        self._decoder.set_k_chunk({**k_chunk_by_type(0 if all_there else _MOST), "head": _MOST})
        for part in self._parts[len(self._reference) :]:
            read = replace(part, prompt=part.end - 1) if all_there else part
            self._reference.append(Outline.joined([Outline.of(each, _OUTLINED) for each, _ in self._scores(read)]))

    def _measure(self) -> float:
        """Mean divergence from the reference, in nats."""
        total, count = 0.0, 0
        for part, reference in zip(self._parts, self._reference, strict=True):
            at = 0
            for logits, _ in self._scores(part):
                total += reference.rows(at, at + len(logits)).divergence(logits)
                at += len(logits)
            count += at
        return total / count

    def _scores(self, part: Window) -> Iterator[tuple[FloatArray, Int64Array]]:
        return scores(self._decoder, self._text, part, self._rows, self._cancelled, prefilled=self._rows)

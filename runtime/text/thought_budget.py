"""Budget of reasoning: once it is used up, the tag that ends the reasoning is put into the answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.text.channels import (
    APERTUS_MARKS,
    CHANNEL_MARKS,
    CHANNELS_THOUGHT_END,
    COHERE_MARKS,
    PAIRED_MARKS,
    PAIRED_THOUGHT_END,
)
from runtime.text.constraint import Constraint, Float32Array
from runtime.text.reasoning import TAGS, ReasoningReader
from runtime.text.tokenizer import Tokenizer

_ENDS = (
    (CHANNEL_MARKS, CHANNELS_THOUGHT_END),
    (PAIRED_MARKS, PAIRED_THOUGHT_END),
    *((marks, marks[1]) for marks in (COHERE_MARKS, APERTUS_MARKS)),
)
_CONTEXT_TOKENS = 8
"""Tokens before the answer that are shown to the detokenizer."""


class ThoughtBudget(Constraint):
    """The state of an answer that reasons for a limited number of tokens. A call within the reasoning is finished."""

    def __init__(
        self, inner: Constraint | None, budget: int, tokenizer: Tokenizer, prompt: Sequence[int], thought: str = ""
    ) -> None:
        """Start at the beginning of an answer.

        Args:
            inner: What else is enforced.
            budget: Most tokens of reasoning, without its tags.
            tokenizer: The model's.
            prompt: The tokens before the answer, which may end with the tag that begins the reasoning.
            thought: The reasoning, with its tag, that they end with.
        """
        begun = tokenizer.encode(thought.partition(TAGS[0])[2].lstrip("\n"), special=False)
        self._inner, self._left = inner, budget - len(begun)
        self._pieces, self._reader = tokenizer.detokenizer(prompt[-_CONTEXT_TOKENS:]), ReasoningReader()
        self._reader.feed(thought or tokenizer.reasoning_opened(prompt))
        marked = next((end for marks, end in _ENDS if tokenizer.added_tokens.keys() >= set(marks)), None)
        self._end = tokenizer.encode(marked or f"\n{TAGS[1]}\n\n", special=False)
        self._forced: list[int] = []  # the rest of the end that is being put in
        self._check_budget()

    @property
    def free(self) -> bool:
        """Whether the answer may end here as well as continue."""
        return not self._forced and (self._inner is None or self._inner.free)

    def masked(self, logits: Float32Array) -> Float32Array:
        """Logits float32 [V], with minus infinity for disallowed tokens.

        Raises:
            RequestError: a grammar has become too complex.
        """
        if self._forced:
            only = np.full_like(logits, -np.inf)
            only[self._forced[0]] = logits[self._forced[0]]
            return only
        return logits if self._inner is None else self._inner.masked(logits)

    def allows(self, token: int) -> bool:
        """Whether a token may come next."""
        if self._forced:
            return token == self._forced[0]
        return self._inner is None or self._inner.allows(token)

    def take(self, token: int) -> None:
        """Advance by a sampled token.

        Raises:
            RequestError: a grammar has become too complex.
        """
        if self._inner is not None:
            self._inner.take(token)
        self._forced = self._forced[1:]
        if self._reader.inside is not False:
            self._left -= self._reader.inside is True
            self._reader.feed(self._pieces.add(token))
            self._check_budget()

    def _check_budget(self) -> None:
        if self._reader.inside and self._left <= 0 and self.free:
            self._forced, self._end = self._end, []

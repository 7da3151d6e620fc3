"""Constrained answers: only tokens that a grammar lets follow are drawn, so the whole answer fits a JSON schema, say.

llguidance does the work: it keeps a parser beside the answer and says before each token which of the vocabulary may
come. Where the grammar is complete that includes the end of the sequence; where nothing else may come it is that alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from runtime.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

Float32Array = npt.NDArray[np.float32]
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""The schema of any JSON object."""
WHITE_SPACE = r"[ \n]{0,12}"
"""White space between JSON's tokens: as models like to write it, and never without end."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must look like."""

    text: str
    """As llguidance takes it."""

    @classmethod
    def of_schema(cls, schema: Mapping[str, Any]) -> Grammar:
        """JSON that fits a schema.

        Raises:
            RequestError: the schema is not acceptable, or asks for what cannot be enforced.
        """
        from llguidance import LLMatcher

        options: JsonCompileOptions = {"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE}
        return cls(LLMatcher.grammar_from_json_schema(dict(schema), overrides=options)).checked("JSON schema")

    @classmethod
    def of_lark(cls, text: str) -> Grammar:
        """A text that a context-free grammar derives, written as the Lark parser has it.

        Raises:
            RequestError: it is no such grammar.
        """
        from llguidance import LLMatcher

        return cls(LLMatcher.grammar_from_lark(text)).checked("grammar")

    @classmethod
    def of_regex(cls, pattern: str) -> Grammar:
        """A text that a regular expression matches as a whole.

        Raises:
            RequestError: it is no regular expression.
        """
        from llguidance import LLMatcher

        return cls(LLMatcher.grammar_from_regex(pattern)).checked("regular expression")

    def checked(self, kind: str) -> Grammar:
        """This grammar, if it is one.

        Raises:
            RequestError: it is none.
        """
        from llguidance import LLMatcher

        wrong, messages = LLMatcher.validate_grammar_with_warnings(self.text)
        if wrong:
            raise RequestError(f"the {kind} cannot be enforced: {' '.join(messages[0].split())}")
        return self


class Constraint:
    """Where an answer stands in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        """Stand at the beginning.

        Raises:
            RequestError: the matcher could not be made.
        """
        self._matcher = matcher
        self._check()

    def masked(self, logits: Float32Array) -> Float32Array:
        """Logits float32 [V], those of tokens that may not come next being minus infinity.

        Raises:
            RequestError: the grammar has become too complex to be followed.
        """
        bits = self._matcher.compute_bitmask()
        self._check()
        allowed = np.unpackbits(np.frombuffer(bits, np.uint8), count=logits.size, bitorder="little")
        return np.where(allowed, logits, np.float32(-np.inf))

    def take(self, token: int) -> None:
        """Go on behind a token that was drawn.

        Raises:
            RequestError: the grammar has become too complex to be followed.
        """
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(f"the grammar cannot be followed: {' '.join(self._matcher.get_error().split())}")


class HasJson(Protocol):
    """What is asked of a tokenizer."""

    def to_json(self) -> str:
        """As the `tokenizers` package writes it."""
        ...


class Constraints:
    """Makes the constraints of a model's answers."""

    def __init__(self, tokenizer: HasJson, *, vocab_size: int, eos: Collection[int]) -> None:
        """Nothing is read before the first constraint.

        Args:
            tokenizer: The model's.
            vocab_size: Logits of a row.
            eos: Tokens that end an answer.
        """
        self._source, self._vocab_size, self._eos = tokenizer, vocab_size, sorted(eos)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Takes some tenths of a second."""
        from llguidance import LLTokenizer

        try:
            return LLTokenizer(self._source.to_json(), n_vocab=self._vocab_size, eos_token=self._eos)
        except ValueError as error:
            raise RequestError(
                f"this model's answers cannot be constrained: its tokenizer is unusual ({error})"
            ) from error

    def begin(self, grammar: Grammar) -> Constraint:
        """The constraint of one answer.

        Raises:
            RequestError: the grammar is none, or this model has a tokenizer that cannot be constrained.
        """
        from llguidance import LLMatcher

        return Constraint(LLMatcher(self._tokenizer, grammar.text, log_level=0))

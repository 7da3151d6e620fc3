"""Constrained answers: only tokens that a grammar lets follow are drawn, so the whole answer fits a JSON schema, say.

llguidance does the work: it keeps a parser beside the answer and says before each token which of the vocabulary may
come. Where the grammar is complete that includes the end of the sequence; where nothing else may come it is that alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from models.foreign import panics_raised
from runtime.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

T = TypeVar("T")
Float32Array = npt.NDArray[np.float32]
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""The schema of any JSON object."""
WHITE_SPACE = r"[ \n]{0,12}"
"""White space between JSON's tokens: as models like to write it, and never without end."""
MOST_CHARACTERS = 2**17
"""Of a grammar as llguidance takes it."""
STACK_BYTES = 2**11
"""Stack for each of them: llguidance descends from rule to rule, which takes up to 1,150 bytes a character."""
_stacks = threading.Lock()


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

        if len(self.text) > MOST_CHARACTERS:
            raise RequestError(
                f"the {kind} cannot be enforced: it has {len(self.text):,} characters, and at most {MOST_CHARACTERS:,} "
                "are read"
            )
        try:
            with panics_raised():
                wrong, messages = self.deep(lambda: LLMatcher.validate_grammar_with_warnings(self.text))
        except ValueError as error:
            wrong, messages = True, [str(error)]
        if wrong:
            raise RequestError(f"the {kind} cannot be enforced: {' '.join(messages[0].split())}")
        return self

    def deep(self, work: Callable[[], T]) -> T:
        """Do with this grammar what may descend as deep as it is long, on a stack that is large enough.

        Where a stack ends, the whole process does.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 -- it is raised where the result is waited for
                future.set_exception(error)

        with _stacks:  # the size is set for whatever thread is begun next
            before = threading.stack_size(2**23 + STACK_BYTES * len(self.text))
            try:
                threading.Thread(target=run, name="grammar", daemon=True).start()
            finally:
                threading.stack_size(before)
        return future.result()


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
            with panics_raised():
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

        tokenizer = self._tokenizer
        return Constraint(grammar.deep(lambda: LLMatcher(tokenizer, grammar.text, log_level=0)))

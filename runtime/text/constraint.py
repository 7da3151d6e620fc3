"""Constrained decoding: samples only tokens that a grammar allows, to make an answer match a JSON schema, say.

llguidance keeps a parser of the answer and computes the mask of allowed tokens before each sample. The end of the
sequence is allowed where the grammar is complete, and forced where nothing else may follow.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from models.foreign import panics_raised
from runtime.errors import RequestError
from runtime.text.schema_process import ask

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")
Float32Array = npt.NDArray[np.float32]
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""The schema of any JSON object."""
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as chat templates write it, for `x-guidance`."""
WHITE_SPACE = r"[ \n]{0,12}"
"""White space between JSON tokens: as models usually write it, but bounded."""
MAX_CHARACTERS = 2**17
"""Longest grammar, in llguidance's format."""
STACK_BYTES = 2**11
"""Stack per character: llguidance recurses from rule to rule, using up to 1,150 bytes a character."""
_TOKEN = re.compile(r"<(\[[\d, -]*\]|[^<>\s\"]+)>")
_stacks = threading.Lock()


@dataclass(frozen=True, slots=True)
class Grammar:
    """The grammar of an answer."""

    text: str

    @classmethod
    def of_schema(cls, schema: Mapping[str, Any]) -> Grammar:
        """JSON that fits a schema; objects get the declared properties only (`runtime.text.enforceable`).

        Raises:
            RequestError: the schema is invalid, or cannot be enforced.
        """
        try:
            text = json.dumps(schema)
        except (RecursionError, ValueError, TypeError) as error:
            raise RequestError(f"the JSON schema cannot be enforced: {error}") from error
        return cls(_asked("JSON schema", "schema", text))

    @classmethod
    def of_lark(cls, text: str) -> Grammar:
        """Text of a context-free grammar, in the syntax of the Lark parser.

        Raises:
            RequestError: the grammar is invalid.
        """
        return cls.unchecked(text).checked("grammar")

    @classmethod
    def unchecked(cls, text: str) -> Grammar:
        """As `of_lark`, of rules that this program wrote."""
        from llguidance import LLMatcher

        return cls(LLMatcher.grammar_from_lark(text))

    @classmethod
    def of_regex(cls, pattern: str) -> Grammar:
        """Text that fully matches a regular expression.

        Raises:
            RequestError: the expression is invalid.
        """
        from llguidance import LLMatcher

        return cls(LLMatcher.grammar_from_regex(pattern)).checked("regular expression")

    def checked(self, kind: str) -> Grammar:
        """Check this grammar in the schema process.

        Raises:
            RequestError: it is invalid, or takes too much time or memory.
        """
        _asked(kind, "grammar", self.text)
        return self

    def check(self) -> None:
        """Check this grammar. That may take any time and memory: see `runtime.text.schema_process`.

        Raises:
            RequestError: it is invalid.
        """
        from llguidance import LLMatcher, LLTokenizer

        def build() -> str:
            wrong, messages = LLMatcher.validate_grammar_with_warnings(self.text)
            if wrong:
                return messages[0]
            # Some grammars are valid, but take forever to begin with. Any tokenizer shows that, without others' tokens.
            named = any("no tokenizer" in message for message in messages)
            text = _TOKEN.sub('"x"', self.text) if named else self.text
            error: str = LLMatcher(LLTokenizer("byte"), text, log_level=0).get_error()
            return "" if named else error

        if len(self.text) > MAX_CHARACTERS:
            raise RequestError(f"it has {len(self.text):,} characters, and at most {MAX_CHARACTERS:,} are read")
        try:
            with panics_raised():
                wrong = self.deep(build)
        except ValueError as error:
            wrong = str(error)
        if wrong:
            raise RequestError(" ".join(wrong.split()))

    def deep(self, work: Callable[[], T]) -> T:
        """Run a function that may recurse as deeply as this grammar is long, on a sufficiently large stack.

        A stack overflow would end the whole process.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 -- raised where the result is awaited
                future.set_exception(error)

        with _stacks:  # the stack size applies to the next thread that starts
            before = threading.stack_size(2**23 + STACK_BYTES * len(self.text))
            try:
                threading.Thread(target=run, name="grammar", daemon=True).start()
            finally:
                threading.stack_size(before)
        return future.result()


@lru_cache(maxsize=64)
def _asked(kind: str, work: str, text: str) -> Any:
    """What the schema process says; the same schema or grammar comes with every request of a client.

    Raises:
        RequestError: it is refused.
    """
    try:
        return ask(work, text)
    except RequestError as error:
        raise RequestError(f"the {kind} cannot be enforced: {error}") from error


class Constraint:
    """The parser state of one answer."""

    def __init__(self, matcher: LLMatcher) -> None:
        """Start at the beginning of the grammar.

        Raises:
            RequestError: the matcher could not be made.
        """
        self._matcher = matcher
        self._check()

    def masked(self, logits: Float32Array) -> Float32Array:
        """Logits float32 [V], with minus infinity for disallowed tokens.

        Raises:
            RequestError: the grammar has become too complex.
        """
        bits = self._matcher.compute_bitmask()
        self._check()
        allowed = np.unpackbits(np.frombuffer(bits, np.uint8), count=logits.size, bitorder="little")
        return np.where(allowed, logits, np.float32(-np.inf))

    @property
    def free(self) -> bool:
        """Whether the answer may end here as well as continue, as where any text is allowed."""
        return bool(self._matcher.is_accepting()) and not self._matcher.is_stopped()

    def allows(self, token: int) -> bool:
        """Whether a token may come next."""
        return bool(self._matcher.validate_tokens([token]))

    def take(self, token: int) -> None:
        """Advance by a sampled token.

        Raises:
            RequestError: the grammar has become too complex.
        """
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(f"the grammar cannot be followed: {' '.join(self._matcher.get_error().split())}")


class HasJson(Protocol):
    """The part of a tokenizer used here."""

    def to_json(self) -> str:
        """The tokenizer in the format of the `tokenizers` package."""
        ...


class Constraints:
    """Makes the constraints of a model's answers."""

    def __init__(self, tokenizer: HasJson, *, vocab_size: int, eos: Collection[int]) -> None:
        """Create lazily: nothing is read before the first constraint."""
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
            RequestError: the grammar is invalid, or the model's tokenizer is not supported.
        """
        from llguidance import LLMatcher

        tokenizer = self._tokenizer
        try:
            with panics_raised():
                return Constraint(grammar.deep(lambda: LLMatcher(tokenizer, grammar.text, log_level=0)))
        except ValueError as error:
            raise RequestError(f"the grammar cannot be followed: {error}") from error

"""Call constraint: the parser state of an answer that may call tools, or must.

Text costs nothing: a grammar is built when the first call begins, and followed from there. A call always ends well:
when few tokens are left, or the model repeats itself, only what closes the call is allowed where that is possible.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from runtime.errors import RequestError
from runtime.text.call_grammar import CallRules
from runtime.text.constraint import Constraint, Constraints, Float32Array, Grammar
from runtime.text.tokenizer import Tokenizer
from runtime.text.tool_calls import ENDS, CallFormat

BARE_TOKENS = 64
"""Tokens within which an answer without a marker must have named its tool to be a call."""
SPARE, PER_ARGUMENT = 32, 16
"""Tokens that are kept for closing a call, and for each argument that is still required."""
RUN, PERIOD = 64, 16
"""The model repeats itself if its last tokens have a period of at most this many."""
CLOSING = frozenset('"}] \n')
"""Characters of tokens that close texts, lists and objects."""


Begin = Callable[[Grammar], Constraint]
"""Begins a constraint; see `runtime.text.constraint.Constraints.begin`."""


class Closers:
    """The tokens that close a call, found out when they are first needed."""

    def __init__(self, tokenizer: Tokenizer, ends: Collection[int]) -> None:
        self._tokenizer, self._ends = tokenizer, ends
        self._masks: tuple[npt.NDArray[np.bool_], ...] | None = None

    def only(self, logits: Float32Array, *first: int) -> Float32Array:
        """Logits [V] of nothing but these tokens, if any of them is allowed; else as they are.

        The end of the answer comes first, then the tokens that are given, then those that begin with a quotation mark:
        in a text, a brace would only be one more letter.
        """
        if self._masks is None:
            self._masks = self._found(logits.size)
        ends, *others = self._masks
        given = np.zeros(logits.size, np.bool_)
        given[list(first)] = True
        for mask in (ends, given, *others):
            closing = np.where(mask, logits, np.float32(-np.inf))
            if np.isfinite(closing.max()):
                return closing
        return logits

    def _found(self, size: int) -> tuple[npt.NDArray[np.bool_], ...]:
        ends, texts, others = np.zeros((3, size), np.bool_)
        for token in range(min(size, self._tokenizer.vocab_size)):
            text = self._tokenizer.piece(token)
            if text.strip() and set(text) <= CLOSING:
                (texts if text.startswith('"') else others)[token] = True
        ends[[token for token in self._ends if token < size]] = True
        return ends, texts, others


class AnswerConstraints(Constraints):
    """Makes the constraints of a model's answers: of grammars, and of calls."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos: Collection[int]) -> None:
        super().__init__(tokenizer, vocab_size=vocab_size, eos=eos)
        self._model, self._closers = tokenizer, Closers(tokenizer, eos)

    def of(self, grammar: Grammar | None, rules: CallRules | None, limit: int) -> Constraint | None:
        """The constraint of an answer; None if nothing is to be enforced, or can be.

        Args:
            grammar: The grammar of the whole answer, unless it calls tools.
            rules: The tools that it may call, or must.
            limit: Most tokens of the answer.

        Raises:
            RequestError: the grammar is invalid, or the model's tokenizer is not supported.
        """
        if rules is None:
            return None if grammar is None else self.begin(grammar)
        form = self._model.call_format
        if form is None and grammar is None and not rules.required:
            return None
        either = grammar is not None and not rules.required
        rules = replace(rules, required=True) if either else rules
        calls = CallConstraint(rules, form or CallFormat(), self._model, self.begin, self._closers, limit)
        return FormOrCalls(self.begin(grammar), calls) if either and grammar is not None else calls


class CallConstraint(Constraint):
    """The state of one answer."""

    def __init__(
        self,
        rules: CallRules,
        form: CallFormat,
        tokenizer: Tokenizer,
        begin: Begin,
        closers: Closers,
        limit: int,
    ) -> None:
        """Start at the beginning of an answer.

        Args:
            rules: The tools.
            form: How the model writes calls.
            tokenizer: The model's.
            begin: Begins a constraint with a grammar.
            closers: The tokens that close a call.
            limit: Most tokens of the answer.
        """
        self._rules, self._form, self._begin, self._closers = rules, form, begin, closers
        self._added = tokenizer.added_tokens
        self._mark = self._added.get(form.mark)
        self._piece, self._encode = tokenizer.piece, tokenizer.encode
        self._left = limit
        # Arguments that are written out stand between two tags each.
        tags = 0 if form.style == "json" else 2 * len(tokenizer.encode(ENDS[form.style], special=False))
        self._margin = min(limit // 2, SPARE + tags + (PER_ARGUMENT + tags) * rules.fewest)
        self._tokens: list[int] = []  # since the first call began
        self._texts: list[str] = []
        self._inner: Constraint | None = None
        self._rest: list[int] = []  # of the end of an argument that is being closed
        self._over = False  # whether nothing is enforced any more
        names = "|".join(re.escape(tool.name) for tool in rules.tools)
        self._bare = re.compile(rf'\s*\{{\s*"name"\s*:\s*"(?:{names})"')
        if rules.required:
            self._inner = begin(rules.answer(form, self._added))

    @property
    def free(self) -> bool:
        """Whether any text is allowed."""
        return self._inner is None or (not self._rules.required and self._inner.free)

    def masked(self, logits: Float32Array) -> Float32Array:
        """Logits float32 [V], with minus infinity for tokens that no call allows."""
        if self.free:
            return logits
        assert self._inner is not None
        try:
            allowed = self._inner.masked(logits)
        except RequestError:
            if not self._enter(loose=True):
                return logits
            allowed = self._inner.masked(logits)
        if self._rest or self._left <= self._margin or self._repeats():
            return self._closing(allowed)
        return allowed

    def _closing(self, allowed: Float32Array) -> Float32Array:
        """Logits [V] of nothing but what leads to the end of the call, where that is allowed."""
        if self._form.style == "json":
            return self._closers.only(allowed)
        # A text that is written out ends with several tokens.
        rest = self._rest or self._encode(ENDS[self._form.style], special=False)
        self._rest = rest if np.isfinite(allowed[rest[0]]) else []
        return self._closers.only(allowed, *self._rest[:1])

    def allows(self, token: int) -> bool:
        """Whether a token may come next."""
        return self._inner is None or self._inner.allows(token)

    def take(self, token: int) -> None:
        """Advance by a sampled token."""
        self._left -= 1
        if self._over:
            return
        self._tokens.append(token)
        if self._rest:
            self._rest = self._rest[1:] if token == self._rest[0] else []
        if self._inner is not None:
            try:
                self._inner.take(token)
            except RequestError:
                self._enter(loose=True)
            return
        self._texts.append(self._piece(token))
        if (first := self._begins(token)) is not None:
            del self._tokens[:first]
            self._enter(loose=False)

    def _repeats(self) -> bool:
        """Whether the model goes in a circle."""
        tail = self._tokens[-RUN:]
        return len(tail) == RUN and any(tail[period:] == tail[:-period] for period in range(1, PERIOD + 1))

    def _begins(self, token: int) -> int | None:
        """Index of the token with which a call begins, if its beginning is complete; None if it is not."""
        if not self._form.mark:
            if len(self._texts) > BARE_TOKENS:
                self._over = True
                return None
            return 0 if self._bare.match("".join(self._texts)) else None
        if self._mark is not None:
            return len(self._tokens) - 1 if token == self._mark else None
        tail, at = "", len(self._texts)
        while at and len(tail) < 2 * len(self._form.mark) + len(self._texts[-1]):
            at -= 1
            tail = self._texts[at] + tail
            if self._form.mark in tail:
                return at
        return None

    def _enter(self, *, loose: bool) -> bool:
        """Build a grammar, and follow it through the tokens since the call began.

        Args:
            loose: Whether to enforce less, because a grammar became too complex, or refused what the model wrote.

        Returns:
            Whether that worked; if not even the loose grammar does, nothing is enforced any more.
        """
        grammar = self._rules.answer if self._rules.required else self._rules.calls
        try:
            self._inner = self._begin(grammar(self._form, self._added, loose=loose))
            for token in self._tokens:
                self._inner.take(token)
        except RequestError:
            self._inner = None
            self._over = loose or not self._enter(loose=True)
        return self._inner is not None


class FormOrCalls(Constraint):
    """The state of an answer that has a form, or is nothing but calls: its tokens decide."""

    def __init__(self, form: Constraint, calls: CallConstraint) -> None:
        """Start at the beginning of an answer.

        Args:
            form: The form.
            calls: The calls, which are required.
        """
        self._sides: list[Constraint] = [form, calls]

    @property
    def free(self) -> bool:
        """Whether the answer may end here as well as continue."""
        return any(side.free for side in self._sides)

    def masked(self, logits: Float32Array) -> Float32Array:
        """Logits float32 [V], with minus infinity for tokens that neither allows.

        Raises:
            RequestError: the form's grammar has become too complex.
        """
        allowed: Float32Array = np.maximum.reduce([side.masked(logits) for side in self._sides])
        return allowed

    def allows(self, token: int) -> bool:
        """Whether a token may come next."""
        return any(side.allows(token) for side in self._sides)

    def take(self, token: int) -> None:
        """Advance by a sampled token.

        Raises:
            RequestError: the form's grammar has become too complex.
        """
        self._sides = [side for side in self._sides if side.allows(token)] or self._sides
        for side in self._sides:
            side.take(token)

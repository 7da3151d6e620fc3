"""The engine: a prompt goes in, pieces of text come out. It knows tokens, text and time; decoders know neither.

One generation runs at a time; others wait their turn. What the last few conversations left in the cache stays, as many
as the decoder has slots, and a prompt goes on from the one that begins as it does; so switching between chats,
regenerating and branching compute only what is new.

What is reused is not always what a prefill of the same tokens would give. Tokens that were generated keep the cache
entries of decoding, which are compensated row by row, where those of a prompt are compensated together; where a kind of
cache quantizes whole pages, a branch inside a page goes on from what the page reads back as; a prompt that is prefilled
in pieces sees pages where one in a single piece would see the window. So a reply may depend on what was said before it,
on what was dropped for want of room, and on what was saved to disk. But a decoder that was loaded afresh gives the same
replies to the same requests in the same order with the same seeds, where it finds the same saved caches.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from models.progress import never_cancelled
from runtime.constraint import Constraints
from runtime.decoder import Decoder, Float32Array, Step
from runtime.errors import BackendError, Cancelled, ContextOverflowError, RequestError
from runtime.generation import FinishReason, Piece, Run
from runtime.kv.conversations import Conversations
from runtime.kv.saved_folder import SavedCaches
from runtime.sampling import Sampler, SamplingOptions, token_logprob
from runtime.speculation.gamma import Costs, FixedGamma, Gamma, gamma_of
from runtime.speculation.rounds import Place, Rounds
from runtime.stopping import StopMatcher
from runtime.tokenizer import Detokenizer, Tokenizer

TURN_POLL_S = 0.05
"""How often a waiting generation looks whether it has been cancelled."""
LENT_TOKENS = 128
"""Tokens that whoever measures the decoder may put into slot 0, unless more are asked for."""
CONTEXT_TOKENS = 8
"""Prompt tokens that the detokenizer sees before the answer, so that a continuation keeps its leading space."""


class Engine:
    """A decoder with its tokenizer.

    Thread-safe. `close` releases the decoder.
    """

    def __init__(
        self, decoder: Decoder, tokenizer: Tokenizer, *, name: str, eos_token_ids: Sequence[int], reason: str = ""
    ) -> None:
        """Put an engine together.

        Args:
            decoder: The loaded model; the engine uses all its slots and closes it.
            tokenizer: The model's tokenizer.
            name: Name of the model, for reports.
            eos_token_ids: Every token that ends a generation.
            reason: Why this backend was chosen, for reports.
        """
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.name = name
        self.reason = reason
        self._eos = frozenset(eos_token_ids)
        self._constraints = Constraints(
            lambda: self.tokenizer.to_json(), vocab_size=decoder.spec.vocab_size, eos=self._eos
        )
        self._turn = threading.Lock()
        self._closed = False
        self._gamma: Gamma | None = None
        self._first_gamma = 0
        options = decoder.options
        self._conversations = Conversations(decoder.cache, slots=options.slots, context=options.context)

    @property
    def context(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self.decoder.options.context

    @property
    def chat_stops(self) -> tuple[str, ...]:
        """Stop strings that chat answers need beside the caller's own (see `Tokenizer.chat_stops`)."""
        return self.tokenizer.chat_stops

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Tokens of a conversation; see `Tokenizer.chat`."""
        return self.tokenizer.chat(messages, **options)

    def text_prompt(self, text: str) -> list[int]:
        """Tokens of a text to be continued. An empty text gives the beginning-of-sequence token, where there is one."""
        tokens = self.tokenizer.encode(text)
        if not tokens and self.decoder.spec.bos_token_id is not None:
            tokens = [self.decoder.spec.bos_token_id]
        return tokens

    def generate(
        self,
        prompt: Sequence[int],
        options: SamplingOptions,
        cancelled: Callable[[], bool] = never_cancelled,
        *,
        trim: bool = False,
        chat: str | None = None,
    ) -> Iterator[Piece]:
        """Answer a prompt.

        Args:
            prompt: Token ids, from `chat_prompt` or `text_prompt`.
            options: How to draw and when to end.
            cancelled: Asked between steps; True ends the answer with `finish_reason` "cancelled".
            trim: Whether white space at the beginning of the answer is left out, as for a new chat message.
            chat: The conversation that this belongs to, by a name of the caller's, for `forget`.

        Returns:
            Pieces as they come; the last has `finish_reason` and `usage`. Closing the iterator ends the work.

        Raises:
            RequestError: the prompt is empty or holds a token that the model does not have, or the answer cannot be
                constrained as asked.
            ContextOverflowError: the prompt leaves no room for one more token.
            BackendError: the engine has been closed.
            InvalidActivationError: while iterating: the model's numbers broke down.
        """
        tokens = [int(token) for token in prompt]
        V = self.decoder.spec.vocab_size
        if not tokens:
            raise RequestError("the prompt is empty: give at least one token")
        if min(tokens) < 0 or max(tokens) >= V:
            raise RequestError(f"the prompt holds a token outside the model's vocabulary of {V}")
        if len(tokens) + 1 > self.context:
            raise ContextOverflowError(
                f"the prompt has {len(tokens)} tokens and the context holds {self.context}, the answer included: "
                "shorten the conversation, or load the model with a longer context"
            )
        if self._closed:
            raise BackendError("the model has been unloaded: load it again")
        run = Run(prompt=tokens, options=options, trim=trim, chat=chat, begin=time.perf_counter())
        if options.grammar is not None:
            run.constraint = self._constraints.begin(options.grammar)
        return self._generate(run, cancelled)

    def keep_in(self, saved: SavedCaches) -> None:
        """Write long conversations to disk when the engine is closed, and let prompts go on from what is there.

        Args:
            saved: The saved caches of this very model and kind of cache; of no use where the cache has no `layout`.
        """
        with self._turn:
            self._conversations.saved = saved

    def speculate(self, gamma: int | Costs | None) -> None:
        """Draft tokens and verify them several at a time, from the next answer on. What comes out is the same.

        A draft is compensated by the decoder's `draft_k_chunk`.

        Args:
            gamma: Tokens to draft in each round; or what steps cost, and the best number is found while answers go on;
                None: no speculation.

        Raises:
            RequestError: gamma is out of range.
        """
        chosen = None if gamma is None else gamma_of(gamma)
        with self._turn:
            self._gamma = chosen
            self._first_gamma = self._gamma.current if self._gamma else 0

    @property
    def speculates(self) -> bool:
        """Whether tokens are drafted and verified."""
        return self._gamma is not None

    def forget(self, chat: str | None = None) -> None:
        """Drop cached tokens, those of a chat or all, so that they are computed anew, or come from disk.

        Args:
            chat: The name under which `generate` was given its prompts; None: everything is dropped.
        """
        with self._turn:
            self._conversations.forget(chat)

    @contextmanager
    def lent(self, tokens: int = LENT_TOKENS) -> Iterator[Decoder]:
        """While entered, the decoder is the caller's, who may put so many tokens into slot 0.

        Conversations stay: what was in slot 0 moves to another one. Where all are in use, the one unused for longest
        gives way, and is written to disk first if it is worth a file.
        """
        with self._turn:
            self._conversations.vacate(0, min(self.context, tokens))
            try:
                yield self.decoder
            finally:
                self._conversations.clear(0)

    def close(self) -> None:
        """End the running generation after its current step and release the decoder. Safe to call twice."""
        self._closed = True
        with self._turn:
            self._conversations.save()
            self._conversations.forget()
            self.decoder.close()

    def _generate(self, run: Run, cancelled: Callable[[], bool]) -> Iterator[Piece]:
        """Wait for the turn, then run one generation; the turn is given back however it ends."""
        while not self._turn.acquire(timeout=TURN_POLL_S):
            if cancelled():
                yield run.last("cancelled", "")
                return
        try:
            with self.decoder.session():
                yield from self._answer(run, cancelled)
        finally:
            self._turn.release()

    def _answer(self, run: Run, cancelled: Callable[[], bool]) -> Iterator[Piece]:
        """Prefill, then decode in rounds, of one token each where nothing is drafted."""
        options, stops = run.options, StopMatcher(run.options.stop)
        blank = run.trim  # whether white space is still to be left out
        text = Detokenizer(self.tokenizer, run.prompt[-CONTEXT_TOKENS:])
        room = self.context - len(run.prompt)
        limit = room if options.max_tokens is None else min(room, options.max_tokens)
        finish: FinishReason = "length"
        try:
            logits = self._prefill(run, cancelled)
            rounds = self._rounds(run, cancelled)
            for token, own in rounds.tokens(logits, lambda: limit - run.completion):
                run.count()
                if token in self._eos:
                    finish = "stop"
                    break
                given = stops.add(text.add(token))
                given, blank = (given.lstrip(), blank and not given.strip()) if blank else (given, False)
                yield Piece(
                    text=given, token=token, logprob=token_logprob(own, token, options.logprobs, self.tokenizer.piece)
                )
                if stops.stopped:
                    finish = "stop"
                    break
                if run.completion == limit:
                    break
        except Cancelled:
            finish = "cancelled"
        rest = stops.add(text.flush()) + stops.flush()
        finish = "stop" if stops.stopped and finish == "length" else finish
        yield run.last(finish, rest.lstrip() if blank else rest)

    def _rounds(self, run: Run, cancelled: Callable[[], bool]) -> Rounds:
        """What decodes: no drafts under a grammar; draws of a given seed must not hang on the clock as gamma does."""
        sampler, gamma = Sampler(run.options, run.prompt, run.constraint), self._gamma or FixedGamma(0)
        if sampler.constrained:
            gamma = FixedGamma(0)
        elif run.options.seed is not None and not sampler.greedy:
            gamma = FixedGamma(self._first_gamma)
        place = Place(decoder=self.decoder, conversations=self._conversations, slot=run.slot)
        rounds = Rounds(place, sampler, gamma, ends=self._eos, check=lambda: self._check(cancelled))
        if self._gamma is not None:
            run.speculation = lambda: rounds.counts.result(gamma.current)
        return rounds

    def _prefill(self, run: Run, cancelled: Callable[[], bool]) -> Float32Array:
        """Bring the prompt into the cache, reusing what is there. Returns the logits [V] after its last token."""
        self._check(cancelled)
        start = time.perf_counter()
        run.slot, run.cached = self._conversations.begin(run.prompt, run.chat)
        rows = self.decoder.options.max_rows
        for at in range(run.cached, len(run.prompt), rows):
            self._check(cancelled)
            last = at + rows >= len(run.prompt)
            logits = self._run(run.slot, run.prompt[at : at + rows], last=last)
        run.prefill_s = time.perf_counter() - start
        return logits

    def _run(self, slot: int, tokens: list[int], *, last: bool) -> Float32Array:
        """Rows of a prompt after what is cached. Returns the last row's logits [V] (empty where not `last`)."""
        cached = self._conversations.tokens(slot)
        M, start = len(tokens), len(cached)
        self._conversations.make_room(slot, start + M)
        step = Step(
            tokens=np.array(tokens, np.int32),
            slots=np.full(M, slot, np.int32),
            positions=np.arange(start, start + M, dtype=np.int32),
            logit_rows=np.array([M - 1] if last else [], np.int32),
            prefill=True,
        )
        logits = self.decoder.forward(step)
        cached += tokens
        return logits[0] if last else np.empty(0, np.float32)

    def _check(self, cancelled: Callable[[], bool]) -> None:
        """Raise Cancelled where the caller or `close` asks for the end."""
        if self._closed or cancelled():
            raise Cancelled("the generation was asked to stop")

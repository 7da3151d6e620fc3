"""The engine: prompts go in, pieces of text come out. It knows tokens, text and time; decoders know neither.

As many generations run at once as the decoder has slots, step by step (`runtime.engine.scheduling`); others wait. What
the last few conversations left in the cache stays while slots and pages are free, and a prompt goes on from the one
that begins as it does; so switching between chats, regenerating and branching compute only what is new.

What is reused is not always what a prefill of the same tokens would give. Tokens that were generated keep the cache
entries of decoding, which are compensated row by row, where those of a prompt are compensated together; where a kind of
cache quantizes whole pages, a branch inside a page goes on from what the page reads back as; a prompt that is prefilled
in pieces sees pages where one in a single piece would see the window. So a reply may depend on what was said before it,
on what was dropped for want of room, and on what was saved to disk. But a decoder that was loaded afresh gives the same
replies to the same requests in the same order with the same seeds, where it finds the same saved caches.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from models.progress import ProgressCallback, ignore_progress, never_cancelled
from runtime.backends.decoder import Decoder, Float32Array
from runtime.engine.conversations.conversations import Conversations
from runtime.engine.conversations.saved_folder import SavedCaches
from runtime.engine.embedding import embed
from runtime.engine.generation import Piece, Run
from runtime.engine.inspection import MOST_TOKENS, inspect
from runtime.engine.scheduling.answer import Answer, Language, Receive
from runtime.engine.scheduling.request import Request
from runtime.engine.scheduling.scheduler import Scheduler
from runtime.engine.speculation.drafting import Drafting
from runtime.engine.speculation.gamma import Costs
from runtime.engine.speculation.rounds import Rounds
from runtime.errors import BackendError, ContextOverflowError, RequestError
from runtime.text.constraint import Constraints
from runtime.text.sampling import SamplingOptions
from runtime.text.tokenizer import Tokenizer
from runtime.wire.inspection import Inspection

LENT_TOKENS = 128
"""Tokens that whoever measures the decoder may put into slot 0, unless more are asked for."""


class Engine:
    """A decoder with its tokenizer.

    It belongs to one thread at a time, which runs the steps. `close` releases the decoder.
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
        self._constraints = Constraints(tokenizer, vocab_size=decoder.spec.vocab_size, eos=self._eos)
        self._drafting = Drafting()
        options = decoder.options
        self._conversations = Conversations(decoder.cache, slots=options.slots, context=options.context)
        self._scheduler = Scheduler(decoder, self._conversations)

    @property
    def parallel(self) -> int:
        """Requests that are answered at the same time; as many as the decoder has slots, if not set."""
        return self._scheduler.most

    @parallel.setter
    def parallel(self, most: int) -> None:
        self._scheduler.most = most

    @property
    def running(self) -> int:
        """Requests that are being answered; may be asked in any thread, as `waiting`."""
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot, or for room in the cache."""
        return len(self._scheduler.waiting)

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
        return self.tokenizer.chat(messages, most=self.context, **options)

    def text_prompt(self, text: str) -> list[int]:
        """Tokens of a text to be continued. An empty text gives the beginning-of-sequence token, where there is one."""
        tokens = self.tokenizer.encode(text, most=self.context)
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
        """Answer a prompt. Whoever iterates runs the steps of all requests.

        Args:
            prompt: Token ids, from `chat_prompt` or `text_prompt`.
            options: How to draw and when to end.
            cancelled: Asked between steps; True ends the answer with `finish_reason` "cancelled".
            trim: Whether white space at the beginning of the answer is left out, as for a new chat message.
            chat: The conversation that this belongs to, by a name of the caller's, for `forget`.

        Returns:
            Pieces as they come; the last has `finish_reason` and `usage`. Closing the iterator ends the work.

        Raises:
            RuntimeFailure: as `submit`; while iterating, what `submit` gives to its receiver.
        """
        items: deque[Piece | Exception] = deque()
        request = self._request(prompt, options, items.append, cancelled, trim=trim, chat=chat)
        return self._scheduler.pieces(request, items)

    def submit(
        self,
        prompt: Sequence[int],
        options: SamplingOptions,
        receive: Receive,
        cancelled: Callable[[], bool] = never_cancelled,
        *,
        trim: bool = False,
        chat: str | None = None,
    ) -> None:
        """Let a prompt be answered by the calls of `step` that follow. Arguments are as for `generate`, but for one.

        `receive` gets the pieces in the thread that runs the steps. The last has `finish_reason` and `usage`; or an
        error comes in its place: an InvalidActivationError where the model's numbers broke down, an OutOfMemoryError
        where the cache is too small.

        Raises:
            RequestError: the prompt is empty or holds a token that the model does not have, or the answer cannot be
                constrained as asked.
            ContextOverflowError: the prompt leaves no room for one more token.
            BackendError: the engine has been closed.
        """
        self._scheduler.add(self._request(prompt, options, receive, cancelled, trim=trim, chat=chat))

    def step(self) -> bool:
        """Do one step of all requests. Returns whether there is more to do."""
        return self._scheduler.step()

    def keep_in(self, saved: SavedCaches) -> None:
        """Write long conversations to disk when the engine is closed, and let prompts go on from what is there.

        Args:
            saved: The saved caches of this very model and kind of cache; of no use where the cache has no `layout`.
        """
        self._conversations.saved = saved

    def speculate(self, gamma: int | Costs | None, *, copied: bool = True) -> None:
        """Draft tokens and verify them several at a time, from the next answer on. What comes out is the same.

        Args:
            gamma: Tokens that the model drafts in each round, compensated by the decoder's `draft_k_chunk`, and none is
                copied; or what steps cost, and the best number is found while answers go on; None: it drafts none.
            copied: Whether drafts are copied from the text where that pays, as they are in a new engine.

        Raises:
            RequestError: gamma is out of range.
        """
        self._drafting = Drafting(gamma, copied=copied)

    @property
    def speculates(self) -> bool:
        """Whether the model drafts tokens for itself."""
        return self._drafting.gamma is not None

    def forget(self, chat: str | None = None) -> None:
        """Drop cached tokens, those of a chat or all, so that they are computed anew, or come from disk.

        Args:
            chat: The name under which `generate` was given its prompts; None: everything is dropped.
        """
        self._scheduler.forget(chat)

    @contextmanager
    def lent(self, tokens: int = LENT_TOKENS) -> Iterator[Decoder]:
        """While entered, the decoder is the caller's, who may put so many tokens into slot 0.

        Requests are answered to their end before. Conversations stay: what was in slot 0 moves to another one. Where
        all are in use, the one unused for longest gives way, and is written to disk first if it is worth a file.
        """
        while self._scheduler.step():
            pass
        self._conversations.vacate(0, min(self.context, tokens))
        try:
            yield self.decoder
        finally:
            self._conversations.clear(0)

    def embed(self, tokens: Sequence[int], cancelled: Callable[[], bool] = never_cancelled) -> Float32Array:
        """See `runtime.engine.embedding.embed`; tokens are checked as `submit` does, the decoder is `lent`."""
        checked = self._checked(tokens)
        with self.lent(len(checked)) as decoder, decoder.session():
            return embed(decoder, checked, cancelled)

    def inspect(
        self,
        prompt: Sequence[int],
        answer: str,
        progress: ProgressCallback = ignore_progress,
        cancelled: Callable[[], bool] = never_cancelled,
    ) -> Inspection:
        """What the model thought at each token of an answer, or of its start; see `runtime.engine.inspection.inspect`.

        Raises:
            RequestError, ContextOverflowError: as `submit`, of both together.
        """
        spoken = self.tokenizer.encode(answer, special=False, most=self.context)[:MOST_TOKENS]
        if not spoken:
            raise RequestError("the answer is empty: there is no token to look at")
        read = self._checked([*prompt, *spoken[:-1]])
        with self.lent(len(read)) as decoder, decoder.session():
            about: Any = {"name": self.name, "drafts": self.speculates, "progress": progress, "cancelled": cancelled}
            return inspect(decoder, self.tokenizer, prompt, spoken, **about)

    def abandon(self, error: Exception) -> None:
        """End all requests with an error."""
        self._scheduler.end(error)

    def close(self) -> None:
        """End all requests, and release the decoder. Safe to call twice."""
        self._scheduler.closed = True
        self._scheduler.end()
        self._conversations.save()
        self._conversations.forget()
        self.decoder.close()

    def _request(
        self,
        prompt: Sequence[int],
        options: SamplingOptions,
        receive: Receive,
        cancelled: Callable[[], bool],
        *,
        trim: bool,
        chat: str | None,
    ) -> Request:
        """What the scheduler is given; see `submit`."""
        tokens = self._checked(prompt)
        room = self.context - len(tokens)
        run = Run(prompt=tokens, options=options, trim=trim, chat=chat, begin=time.perf_counter())
        if options.grammar is not None:
            run.constraint = self._constraints.begin(options.grammar)
        limit = room if options.max_tokens is None else min(room, options.max_tokens)
        answer = Answer(run, Language(tokenizer=self.tokenizer, ends=self._eos), limit, receive)
        return Request(answer, cancelled, lambda slot: self._rounds(run, slot))

    def _checked(self, prompt: Sequence[int]) -> list[int]:
        """Tokens that the model can read, with room for one more."""
        tokens, V = [int(token) for token in prompt], self.decoder.spec.vocab_size
        if not tokens:
            raise RequestError("the prompt is empty: give at least one token")
        if min(tokens) < 0 or max(tokens) >= V:
            raise RequestError(f"the prompt holds a token outside the model's vocabulary of {V}")
        if len(tokens) + 1 > self.context:
            raise ContextOverflowError(
                f"the prompt has {len(tokens)} tokens and the context holds {self.context}, the answer included: "
                "shorten the conversation, or load the model with a longer context"
            )
        if self._scheduler.closed:
            raise BackendError("the model has been unloaded: load it again")
        return tokens

    def _rounds(self, run: Run, slot: int) -> Rounds:
        """The decoding of one answer."""
        place = self._scheduler.place(slot)
        rounds = self._drafting.rounds(place, run.options, run.constraint, ends=self._eos)
        run.speculation = lambda: rounds.result() if self.speculates or rounds.counts.rounds else None
        return rounds

"""The engine: turns prompts into streams of text. It handles tokens, text and timing, so that decoders need not.

It runs as many generations at once as the decoder has slots, step by step (`runtime.engine.scheduling`); further
requests wait. The KV cache of recent conversations is kept while slots and pages are free, and a prompt reuses the
longest matching prefix. Switching between chats, regenerating and branching therefore compute only new tokens.

Reused entries are not always those that a prefill of the same tokens would give. Generated tokens keep the cache
entries of decoding, which compensates each row by itself, whereas the rows of a prompt are compensated together. Where
a cache quantizes whole pages, a branch inside a page continues from the dequantized page, and a prompt that is
prefilled in pieces reads pages where a single pass would read the window. A reply may therefore depend on earlier
conversations, on evictions, and on saved caches. A freshly loaded decoder with the same saved caches gives the same
replies to the same requests in the same order with the same seeds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from models.progress import never_cancelled
from runtime.backends.decoder import Decoder
from runtime.engine.conversations.conversations import Conversations
from runtime.engine.conversations.saved_folder import SavedCaches
from runtime.engine.generation import Piece, Run
from runtime.engine.rereading import Rereading
from runtime.engine.scheduling.answer import Answer, Language, Receive
from runtime.engine.scheduling.request import Request
from runtime.engine.scheduling.scheduler import Scheduler
from runtime.engine.scheduling.shared_scheduler import SharedScheduler
from runtime.engine.speculation.copying import StepTimes
from runtime.engine.speculation.gamma import Costs, FixedGamma, Gamma, gamma_of
from runtime.engine.speculation.rounds import DecodeContext, Rounds
from runtime.errors import BackendError, ContextOverflowError, RequestError
from runtime.text.constraint import Constraints
from runtime.text.sampling import Sampler, SamplingOptions
from runtime.text.tokenizer import Tokenizer

BORROWED_TOKENS = 128
"""Default number of tokens that a borrower of the decoder may write into slot 0."""


class Engine(Rereading):
    """A decoder with its tokenizer.

    Thread-safe. `close` releases the decoder.
    """

    def __init__(
        self, decoder: Decoder, tokenizer: Tokenizer, *, name: str, eos_token_ids: Sequence[int], reason: str = ""
    ) -> None:
        """Create an engine.

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
        self._gamma: Gamma | None = None
        self._first_gamma = 0
        self._times: StepTimes | None = StepTimes()
        options = decoder.options
        self._conversations = Conversations(decoder.cache, slots=options.slots, context=options.context)
        self._scheduler = Scheduler(decoder, self._conversations)
        self._shared = SharedScheduler(self._scheduler, decoder.session)

    @property
    def parallel(self) -> int:
        """Most requests answered at the same time; defaults to the decoder's slots."""
        return self._scheduler.most

    @parallel.setter
    def parallel(self, most: int) -> None:
        self._scheduler.most = most

    @property
    def running(self) -> int:
        """Requests being answered. Thread-safe, as `waiting` is."""
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        """Requests waiting for a slot or for room in the cache."""
        return len(self._scheduler.waiting)

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self.decoder.options.context

    @property
    def chat_stops(self) -> tuple[str, ...]:
        """Stop strings for chat answers, in addition to the caller's own (see `Tokenizer.chat_stops`)."""
        return self.tokenizer.chat_stops

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Tokens of a conversation; see `Tokenizer.chat`."""
        return self.tokenizer.chat(messages, most=self.context, **options)

    def text_prompt(self, text: str) -> list[int]:
        """Tokens of a text to be continued. An empty text gives the beginning-of-sequence token, if there is one."""
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
        """Answer a prompt. Iterating runs the steps of all requests, or waits while another thread runs them.

        Args:
            prompt: Token ids, from `chat_prompt` or `text_prompt`.
            options: Sampling and stopping options.
            cancelled: Polled between steps; True ends the answer with `finish_reason` "cancelled".
            trim: Whether to strip leading white space from the answer, as for a new chat message.
            chat: The caller's name for the conversation, for `forget`.

        Returns:
            Pieces as they are generated; the last has `finish_reason` and `usage`. Closing the iterator cancels the
            request.

        Raises:
            RuntimeFailure: as `submit`; while iterating, any error that `submit` would pass to its receiver.
        """
        items: deque[Piece | Exception] = deque()
        request = self._request(prompt, options, items.append, cancelled, trim=trim, chat=chat)
        return self._shared.pieces(request, items)

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
        """Queue a prompt, to be answered by later calls of `step`. Arguments are those of `generate`, plus `receive`.

        `receive` is called with each piece, in the thread that runs the steps. The last piece has `finish_reason` and
        `usage`; or an error takes its place: an InvalidActivationError if the model computed NaN or infinity, an
        OutOfMemoryError if the cache is too small.

        Raises:
            RequestError: the prompt is empty or holds a token that the model does not have, or the requested constraint
                is not supported.
            ContextOverflowError: the prompt leaves no room for one more token.
            BackendError: the engine has been closed.
        """
        self._shared.submit(self._request(prompt, options, receive, cancelled, trim=trim, chat=chat))

    def step(self) -> bool:
        """Run one step of all requests. Returns whether work remains."""
        return self._shared.step()

    def save_to(self, saved: SavedCaches) -> None:
        """Save long conversations to disk on close, and let prompts continue from saved ones.

        Args:
            saved: The saved caches of this very model and kind of cache; unused if the cache has no `layout`.
        """
        with self._shared.paused():
            self._conversations.saved = saved

    def speculate(self, gamma: int | Costs | None, *, copied: bool = True) -> None:
        """Speculate from the next answer on: draft tokens and verify several at a time. The output is unchanged.

        Args:
            gamma: Tokens that the model drafts in each round, with the decoder's `draft_k_chunk` of compensation, and
                nothing is copied; or measured costs, from which the best number is found while answering; None: the
                model drafts nothing.
            copied: Whether drafts are copied from the text where that pays, as in a new engine.

        Raises:
            RequestError: gamma is out of range.
        """
        chosen = None if gamma is None else gamma_of(gamma)
        with self._shared.paused():
            self._gamma = chosen
            self._first_gamma = self._gamma.current if self._gamma else 0
            self._times = StepTimes() if copied and not isinstance(gamma, int) else None

    @property
    def speculates(self) -> bool:
        """Whether the model drafts for itself."""
        return self._gamma is not None

    def forget(self, chat: str | None = None) -> None:
        """Drop the cached tokens of one chat or of all; they are then recomputed, or loaded from disk.

        Args:
            chat: The name that was given to `generate`; None: drop everything.
        """
        with self._shared.paused():
            self._scheduler.forget(chat)

    @contextmanager
    def borrow(self, tokens: int = BORROWED_TOKENS) -> Iterator[Decoder]:
        """Borrow the decoder: the caller may write this many tokens into slot 0 while requests wait.

        Waits until all requests have ended. Conversations are kept: slot 0 moves to another slot. If all slots are in
        use, the least recently used one is evicted, and saved to disk first if it is worth a file.
        """
        with self._shared.drained():
            self._conversations.vacate(0, min(self.context, tokens))
            try:
                yield self.decoder
            finally:
                self._conversations.clear(0)

    def abandon(self, error: Exception) -> None:
        """End all requests with an error."""
        self._shared.end(error)

    def close(self) -> None:
        """End all requests after the current step, and release the decoder. Safe to call twice."""
        self._shared.closed = True
        self._shared.end()
        with self._shared.paused():
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
        """Build a request for the scheduler; see `submit`."""
        tokens = self._checked(prompt)
        room = self.context - len(tokens)
        run = Run(prompt=tokens, options=options, trim=trim, chat=chat, begin=time.perf_counter())
        if options.grammar is not None:
            run.constraint = self._constraints.begin(options.grammar)
        limit = room if options.max_tokens is None else min(room, options.max_tokens)
        answer = Answer(run, Language(tokenizer=self.tokenizer, ends=self._eos), limit, receive)
        return Request(answer, cancelled, lambda slot: self._rounds(run, slot))

    def _checked(self, prompt: Sequence[int]) -> list[int]:
        """Check a prompt: known tokens only, and room for at least one more."""
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
        if self._shared.closed:
            raise BackendError("the model has been unloaded: load it again")
        return tokens

    def _rounds(self, run: Run, slot: int) -> Rounds:
        """The decoding of one answer. With a seed, samples depend neither on timing nor on other requests.

        Drafts by the model use random numbers of their own and ignore grammars. Copied drafts use none.
        """
        sampler, gamma = Sampler(run.options, constraint=run.constraint), self._gamma or FixedGamma(0)
        seeded = run.options.seed is not None and not sampler.greedy
        if sampler.constrained:
            gamma = FixedGamma(0)
        elif seeded:
            gamma = FixedGamma(self._first_gamma)
        context = DecodeContext(
            decoder=self.decoder,
            conversations=self._conversations,
            slot=slot,
            concurrent=self._scheduler.concurrent,
            clock=self._scheduler.clock,
        )
        times = None if seeded and gamma.current else self._times
        rounds = Rounds(context, sampler, gamma, ends=self._eos, alike=seeded, times=times)
        run.speculation = lambda: rounds.result() if self._gamma is not None or rounds.counts.rounds else None
        return rounds

"""The engine: turns prompts into streams of text. It handles tokens, text and timing, so that decoders need not.

It runs as many generations at once as the decoder has slots, step by step (`runtime.engine.scheduler`); further
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

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np

from models.progress import ProgressCallback, ignore_progress, never_cancelled
from runtime.backends.decoder import Decoder, Float32Array, PredictsFurther, Step
from runtime.engine.conversations import Conversations
from runtime.engine.decoding import Drafting, Rounds
from runtime.engine.gamma import Costs
from runtime.engine.generation import Answer, Piece, Receive, Run
from runtime.engine.inspection import MAX_TOKENS, inspect
from runtime.engine.mtp import MtpDrafts
from runtime.engine.saved import SavedCaches
from runtime.engine.scheduler import Request, Scheduler
from runtime.errors import BackendError, Cancelled, ContextOverflowError, RequestError
from runtime.text.call_constraint import AnswerConstraints
from runtime.text.sampling import Sampler, SamplingOptions, TokenLogprob, token_logprob
from runtime.text.thought_budget import ThoughtBudget
from runtime.text.tokenizer import Tokenizer
from runtime.wire.requests import Inspection


def embed(decoder: Decoder, tokens: Sequence[int], cancelled: Callable[[], bool]) -> Float32Array:
    """The embedding of a text.

    Args:
        decoder: The model; slot 0 is overwritten.
        tokens: At least one, at most the context.
        cancelled: Polled between steps.

    Returns:
        float32 [C], normalized: the mean over all tokens of the rows after the final norm.

    Raises:
        Cancelled: `cancelled` said so.
        InvalidActivationError: the model computed NaN or infinity.
    """
    total = np.zeros(decoder.spec.hidden_size, np.float64)
    for at in range(0, len(tokens), decoder.options.max_rows):
        if cancelled():
            raise Cancelled("the embedding was cancelled")
        part = tokens[at : at + decoder.options.max_rows]
        total += decoder.hidden(Step.of(part, at, [], prefill=True)).sum(axis=0, dtype=np.float64)
    return (total / np.linalg.norm(total)).astype(np.float32)


BORROWED_TOKENS = 128
"""Default number of tokens that a borrower of the decoder may write into slot 0."""


class Engine:
    """A decoder with its tokenizer.

    It belongs to one thread at a time, which runs the steps. `close` releases the decoder.
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
        self.decoder, self.tokenizer = decoder, tokenizer
        self.name, self.reason = name, reason
        self._eos = frozenset(eos_token_ids)
        self._constraints = AnswerConstraints(tokenizer, vocab_size=decoder.spec.vocab_size, eos=self._eos)
        self._drafting = Drafting()
        self._conversations = Conversations(decoder.cache, slots=decoder.options.slots, context=self.context)
        self._scheduler = Scheduler(decoder, self._conversations)

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

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Tokens of a conversation; see `Tokenizer.chat`."""
        return self.tokenizer.chat(messages, most=self.context, **options)

    def reasoning_opened(self, prompt: Sequence[int]) -> str:
        """The tag of reasoning that belongs before the answer to a prompt of a chat; see `runtime.text.reasoning`."""
        return self.tokenizer.reasoning_opened(prompt)

    def text_prompt(self, text: str) -> list[int]:
        """Tokens of a text to be continued. An empty text gives the beginning-of-sequence token, if there is one."""
        tokens = self.tokenizer.encode(text, most=self.context)
        bos = self.decoder.spec.bos_token_id
        return tokens if tokens or bos is None else [bos]

    def generate(
        self,
        prompt: Sequence[int],
        options: SamplingOptions,
        cancelled: Callable[[], bool] = never_cancelled,
        *,
        trim: bool = False,
        chat: str | None = None,
    ) -> Iterator[Piece]:
        """Answer a prompt. Iterating runs the steps of all requests.

        Args:
            prompt: Token ids, from `chat_prompt` or `text_prompt`.
            options: Sampling and stopping options.
            cancelled: Polled between steps; True ends the answer with `finish_reason` "cancelled".
            trim: Whether to strip leading white space from the answer, as for a new chat message; a base model's stays,
                for its answers continue a text.
            chat: The caller's name for the conversation, for `forget`.

        Returns:
            Pieces as they are generated; the last has `finish_reason` and `usage`. Closing the iterator cancels the
            request.

        Raises:
            RuntimeFailure: as `submit`; while iterating, any error that `submit` would pass to its receiver.
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
        """Queue a prompt, to be answered by later calls of `step`; arguments as of `generate`, plus `receive`.

        `receive` is called with each piece, in the thread that runs the steps. The last piece has `finish_reason` and
        `usage`; or an error takes its place: an InvalidActivationError if the model computed NaN or infinity, an
        OutOfMemoryError if the cache is too small.

        Raises:
            RequestError: the prompt is empty or holds a token that the model does not have, or the requested constraint
                is not supported.
            ContextOverflowError: the prompt leaves no room for one more token.
            BackendError: the engine has been closed.
        """
        self._scheduler.add(self._request(prompt, options, receive, cancelled, trim=trim, chat=chat))

    def step(self, *, beside: bool = False) -> bool:
        """Run one step of all requests. Returns whether work remains.

        Args:
            beside: Whether other models answer, too, and get the next step.
        """
        self._scheduler.beside = beside
        return self._scheduler.step()

    def save_to(self, saved: SavedCaches) -> None:
        """Save long conversations to disk on close, and let prompts continue from `saved`, this very model's caches."""
        self._conversations.saved = saved

    def speculate(self, gamma: int | Costs | None, *, copied: bool = True, mtp: bool = False) -> None:
        """Speculate from the next answer on: draft tokens and verify several at a time. The output is unchanged.

        Args:
            gamma: Tokens that the model drafts in each round, with the decoder's `draft_k_chunk` of compensation, and
                nothing is copied; or measured costs, from which the best number is found while answering; None: the
                model drafts nothing.
            copied: Whether drafts are copied from the text where that pays, as in a new engine.
            mtp: Whether the block that predicts further tokens drafts, which the decoder must have, and not the model.

        Raises:
            RequestError: gamma is out of range.
        """
        block = cast("PredictsFurther", self.decoder).mtp if mtp else None
        self._drafting = Drafting(gamma, copied=copied, mtp=None if block is None else MtpDrafts(block))

    @property
    def speculates(self) -> bool:
        """Whether the model drafts for itself, with its low-bit weights."""
        return self._drafting.gamma is not None and not self.drafts_by_head

    @property
    def drafts_by_head(self) -> bool:
        """Whether its block that predicts further tokens drafts."""
        return self._drafting.mtp is not None

    def forget(self, chat: str | None = None) -> None:
        """Drop the cached tokens of one chat or of all; they are then recomputed, or loaded from disk.

        Args:
            chat: The name that was given to `generate`; None: drop everything.
        """
        self._scheduler.forget(chat)

    def has_spare(self, tokens: int = BORROWED_TOKENS) -> bool:
        """Whether `borrow` would find this much room without waiting, and without evicting a conversation."""
        return not (self.running or self.waiting) and self._conversations.has_spare(min(self.context, tokens))

    @contextmanager
    def borrow(self, tokens: int = BORROWED_TOKENS) -> Iterator[Decoder]:
        """Borrow the decoder: the caller may write this many tokens into slot 0.

        Runs all requests to their end first. Conversations are kept: slot 0 moves to another slot. If all slots are in
        use, the least recently used one is evicted, and saved to disk first if it is worth a file.
        """
        while self._scheduler.step():
            pass
        self._conversations.vacate(0, min(self.context, tokens))
        try:
            yield self.decoder
        finally:
            self._conversations.clear(0)

    def embed(self, tokens: Sequence[int], cancelled: Callable[[], bool] = never_cancelled) -> Float32Array:
        """See `runtime.engine.engine.embed`; tokens are checked as `submit` does, the decoder is borrowed."""
        checked = self._checked(tokens)
        with self.borrow(len(checked)) as decoder, decoder.session():
            return embed(decoder, checked, cancelled)

    def score(
        self,
        prompt: Sequence[int],
        options: SamplingOptions,
        *,
        more: bool,
        cancelled: Callable[[], bool] = never_cancelled,
    ) -> list[TokenLogprob]:
        """Log-probabilities of a prompt's tokens, by the steps with which `eval` computes a perplexity.

        Args:
            prompt: The tokens; the first has no log-probability (NaN).
            options: Count the most likely tokens that are wanted, and say how one more is sampled.
            more: Whether one more token is wanted, behind the prompt.
            cancelled: Polled between steps.

        Raises:
            RequestError, ContextOverflowError: as `submit`.
            Cancelled: `cancelled` said so.
        """
        read, piece, count = self._checked(prompt), self.tokenizer.piece, options.logprobs or 0
        found = [TokenLogprob(token=read[0], text=piece(read[0]), logprob=math.nan)]
        with self.borrow(len(read)) as decoder, decoder.session():
            decoder.cache.clear(0)
            at = 0
            while at < len(read):
                if cancelled():
                    raise Cancelled("the scoring was cancelled")
                rows = read[at : at + min(decoder.options.max_rows, decoder.cache.rows_until_flush(0))]
                for own in decoder.forward(Step.of(rows, at))[: len(read) + more - len(found)]:
                    token = read[len(found)] if len(found) < len(read) else Sampler(options).draw(own)
                    scored = token_logprob(own, token, count, piece)
                    assert scored is not None, "a count was given"
                    found.append(scored)
                at += len(rows)
        return found

    def inspect(
        self,
        prompt: Sequence[int],
        answer: str,
        progress: ProgressCallback = ignore_progress,
        cancelled: Callable[[], bool] = never_cancelled,
    ) -> Inspection:
        """Inspect the tokens of an answer, or of its beginning; see `runtime.engine.inspection.inspect`.

        Raises:
            RequestError, ContextOverflowError: as `submit`, of both together.
        """
        spoken = self.tokenizer.encode(answer, special=False, most=self.context)[:MAX_TOKENS]
        if not spoken:
            raise RequestError("the answer is empty: there is no token to look at")
        read = self._checked([*prompt, *spoken[:-1]])
        with self.borrow(len(read)) as decoder, decoder.session():
            about: Any = {"name": self.name, "drafts": self.speculates, "progress": progress, "cancelled": cancelled}
            return inspect(decoder, self.tokenizer, prompt, spoken, **about)

    def fail_all(self, error: Exception) -> None:
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
        """Build a request for the scheduler; see `submit`."""
        tokens, V = self._checked(prompt), self.decoder.spec.vocab_size
        if unknown := [token for token, _ in options.logit_bias if token >= V]:
            message = f"logit_bias names token {unknown[0]}, but the model's tokens are 0 to {V - 1}: leave it out"
            raise RequestError(message, field="logit_bias")
        room = self.context - len(tokens)
        trim = trim and self.tokenizer.has_chat_template
        run = Run(prompt=tokens, options=options, trim=trim, chat=chat, begin=time.perf_counter())
        limit = room if options.max_tokens is None else min(room, options.max_tokens)
        run.constraint = self._constraints.of(options.grammar, options.calls, limit)
        budget = options.thought_tokens
        if budget is not None and (budget < limit or options.thought) and not options.formed:
            run.constraint = ThoughtBudget(run.constraint, budget, self.tokenizer, tokens, options.thought)
        answer = Answer(run, self.tokenizer, self._eos, limit, receive)
        return Request(answer, cancelled, lambda slot: self._rounds(run, slot))

    def _checked(self, prompt: Sequence[int]) -> list[int]:
        """Check a prompt: known tokens only, and room for at least one more."""
        tokens, V = [int(token) for token in prompt], self.decoder.spec.vocab_size
        if not tokens:
            raise RequestError("the prompt is empty: give at least one token")
        if min(tokens) < 0 or max(tokens) >= V:
            raise RequestError(f"the prompt contains a token outside the model's vocabulary of {V}")
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
        rounds = self._drafting.rounds(self._scheduler.context(slot), run.options, run.constraint, ends=self._eos)
        run.speculation = lambda: rounds.result() if self._drafting.gamma or rounds.counts.rounds else None
        return rounds
